"""The results of checks as text of 80 columns, as JSON, and as a block to paste into an issue."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence

from tfpar.checks.check import Check, exit_code
from tfpar.messages.received import excerpt

COLUMNS = 80
_STATUS_COLUMNS, _NAME_COLUMNS = 8, 24
_LONGEST_TEXT = 600  # of one check; a message of TensorFlow can be pages long


def lines(check: Check) -> str:
    """Return one check: status, name, figure and bound, and its way out on a line of its own.

    Example:
        >>> print(lines(Check("memory", "ok", "61.2 GB free", "1 GB")))
        ok      memory                  61.2 GB free (bound: 1 GB)
    """
    text = excerpt(f"{check.figure} (bound: {check.bound})" if check.bound else check.figure, _LONGEST_TEXT)
    indent = " " * (_STATUS_COLUMNS + _NAME_COLUMNS)
    begin = f"{check.status:{_STATUS_COLUMNS}}{check.name:{_NAME_COLUMNS - 1}} "
    if len(begin) > len(indent):  # a long name has a line of its own
        begin = f"{begin.rstrip()}\n{indent}"
    found = [_wrapped(text, begin, indent)]
    if check.way_out:
        found.append(_wrapped(excerpt(check.way_out, _LONGEST_TEXT), f"{' ' * _STATUS_COLUMNS}-> ", " " * 11))
    return "\n".join(found)


def _wrapped(text: str, begin: str, indent: str) -> str:
    first, _, last = begin.rpartition("\n")
    filled = textwrap.fill(
        text, COLUMNS, initial_indent=last, subsequent_indent=indent, break_long_words=True, break_on_hyphens=False
    )
    return f"{first}\n{filled}" if first else filled


def summary(checks: Sequence[Check]) -> str:
    """Return the last line: how many checks have each status.

    Example:
        >>> summary([Check("memory", "ok", ""), Check("copies", "WRONG", "")])
        '2 checks: 1 ok, 1 WRONG.'
    """
    statuses = [check.status for check in checks]
    counts = [f"{statuses.count(one)} {one}" for one in ("ok", "slow", "WRONG", "skipped") if one in statuses]
    return f"{len(checks)} checks: {', '.join(counts)}."


def to_json(checks: Sequence[Check]) -> str:
    """Return all checks and the exit code as JSON.

    Example:
        >>> json.loads(to_json([Check("memory", "ok", "61.2 GB free")]))["exit_code"]
        0
    """
    listed = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"exit_code": exit_code(checks), "checks": listed}, indent=2)


def issue_block(checks: Sequence[Check]) -> str:
    """Return the versions, the machine and all checks that are not ok, as a block of Markdown.

    Example:
        >>> issue_block([Check("versions", "ok", "tfpar 0.1.0")]).splitlines()[0]
        '```text'
    """
    facts = ("versions", "driver", "devices")
    shown = [one for one in checks if one.name in facts or one.status in ("slow", "WRONG")]
    return "\n".join(["```text", *map(lines, shown), summary(checks), "```"])
