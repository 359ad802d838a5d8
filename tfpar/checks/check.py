"""The result of one check of the doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

Status = Literal["ok", "slow", "WRONG", "skipped"]


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked, such as "copy GPU:0 to GPU:1".
        status: "ok"; "slow" if it works, but worse than the bound; "WRONG" if results are wrong or missing; "skipped"
            if it does not apply here.
        figure: What was found, with units.
        bound: What it was compared with; empty without a bound.
        way_out: What to do, a sentence; empty if nothing is to be done.
        values: The figures as numbers and texts, for `--json`.

    Example:
        >>> Check("copy GPU:0 to GPU:1", "ok", "bits equal, 21.4 GB/s").status
        'ok'
    """

    name: str
    status: Status
    figure: str
    bound: str = ""
    way_out: str = ""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def exit_code(checks: Iterable[Check]) -> int:
    """Return the exit code of the command: 2 if something is wrong, 1 if something is slow, else 0.

    Example:
        >>> exit_code([Check("a", "ok", ""), Check("b", "slow", "")])
        1
    """
    statuses = {check.status for check in checks}
    return 2 if "WRONG" in statuses else 1 if "slow" in statuses else 0
