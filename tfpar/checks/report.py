"""The result of a check; results as text, as JSON, and as a block for bug reports."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from tfpar.messages.received import excerpt

COLUMNS = 80
_STATUS_COLUMNS, _NAME_COLUMNS = 8, 24
_LONGEST_TEXT = 600  # per check; messages of TensorFlow can be pages long


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: What was checked, such as "copy GPU:0 to GPU:1".
        status: "ok"; "slow" if it works, but misses the bound; "WRONG" if results are wrong or missing; "skipped" if it
            does not apply.
        figure: What was measured, with units.
        bound: The limit it was compared with; may be empty.
        way_out: What to do, as a sentence; may be empty.
        values: The raw figures, for `--json`.

    Example:
        >>> Check("copy GPU:0 to GPU:1", "ok", "bits equal, 21.4 GB/s").status
        'ok'
    """

    name: str
    status: Literal["ok", "slow", "WRONG", "skipped"]
    figure: str
    bound: str = ""
    way_out: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Return lines of 80 columns: status, name, figure and bound, then the way out."""
        text = excerpt(f"{self.figure} (bound: {self.bound})" if self.bound else self.figure, _LONGEST_TEXT)
        indent = " " * (_STATUS_COLUMNS + _NAME_COLUMNS)
        begin = f"{self.status:{_STATUS_COLUMNS}}{self.name:{_NAME_COLUMNS - 1}} "
        lines = []
        if len(begin) > len(indent):  # a long name gets its own line
            lines, begin = [begin.rstrip()], indent
        lines.append(_wrapped(text, begin, indent))
        if self.way_out:
            lines.append(_wrapped(excerpt(self.way_out, _LONGEST_TEXT), f"{' ' * _STATUS_COLUMNS}-> ", " " * 11))
        return "\n".join(lines)


def _wrapped(text: str, begin: str, indent: str) -> str:
    return textwrap.fill(text, COLUMNS, initial_indent=begin, subsequent_indent=indent, break_on_hyphens=False)


def exit_code(checks: Iterable[Check]) -> int:
    """Return the exit code of the command: 2 if a check is "WRONG", 1 if one is "slow", else 0.

    Example:
        >>> exit_code([Check("a", "ok", ""), Check("b", "slow", "")])
        1
    """
    statuses = {check.status for check in checks}
    return 2 if "WRONG" in statuses else 1 if "slow" in statuses else 0


def reported(checks: Iterable[Check], output: str) -> list[Check]:
    """Collect checks, and print them to standard output if `output` is "text" or "json"."""
    known = []
    for check in checks:
        known.append(check)
        if output == "text":
            print(check, flush=True)
    if output == "json":
        listed = [dataclasses.asdict(check) for check in known]
        print(json.dumps({"exit_code": exit_code(known), "checks": listed}, indent=2))
    if output == "text":
        print(f"\n{summary(known)}")
        if exit_code(known):
            print(f"\nPaste this into an issue:\n\n{issue_block(known)}")
    return known


def summary(checks: Sequence[Check]) -> str:
    """Return how many checks have each status, as a sentence.

    Example:
        >>> summary([Check("memory", "ok", ""), Check("copies", "WRONG", "")])
        '2 checks: 1 ok, 1 WRONG.'
    """
    statuses = [check.status for check in checks]
    names = [status for status in ("ok", "slow", "WRONG", "skipped") if status in statuses]
    counts = [f"{statuses.count(name)} {name}" for name in names]
    return f"{len(checks)} checks: {', '.join(counts)}."


def issue_block(checks: Sequence[Check]) -> str:
    """Return versions, driver, devices and all failed checks as a block of Markdown.

    Example:
        >>> issue_block([Check("versions", "ok", "tfpar 0.1.0")]).splitlines()[0]
        '```text'
    """
    facts = ("versions", "driver", "devices")
    shown = [check for check in checks if check.name in facts or check.status in ("slow", "WRONG")]
    return "\n".join(["```text", *map(str, shown), summary(checks), "```"])
