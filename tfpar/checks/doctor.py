"""The function `tfpar.doctor`, and the printed report of the command."""

from __future__ import annotations

from tfpar.checks import examination, report
from tfpar.checks.check import Check, exit_code


def run_checks(num_cpus: int, *, is_json: bool) -> list[Check]:
    """Run all checks, and print each as soon as it is known.

    Args:
        num_cpus: Without GPUs: the number of logical CPUs.
        is_json: Print all of them at the end instead, as JSON.
    """
    checks = []
    for check in examination.examine(num_cpus):
        checks.append(check)
        if not is_json:
            print(report.lines(check), flush=True)
    if is_json:
        print(report.to_json(checks))
        return checks
    print(f"\n{report.summary(checks)}")
    if exit_code(checks):
        print(f"\nPaste this into an issue:\n\n{report.issue_block(checks)}")
    return checks


def doctor(*, num_logical_cpus: int = 2, verbose: int = 1) -> list[Check]:
    """Examine this machine and its devices, as `python -m tfpar.doctor` does.

    Args:
        num_logical_cpus: Without GPUs: the number of devices into which the CPU is split.
        verbose: 1 prints each check as soon as it is known, 0 nothing.

    Returns:
        The results of all checks.

    Example:
        >>> checks = tfpar.doctor(verbose=0)
        >>> [check.name for check in checks if check.status == "WRONG"]
        []
    """
    if not verbose:
        return list(examination.examine(num_logical_cpus))
    return run_checks(num_logical_cpus, is_json=False)
