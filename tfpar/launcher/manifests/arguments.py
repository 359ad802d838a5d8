"""Checks of the arguments of every template."""

from __future__ import annotations

from collections.abc import Sequence


def check(num_workers: int, command: Sequence[str], cores_per_worker: int, gpus_per_worker: int) -> None:
    """Refuse a job that cannot run.

    Args:
        num_workers: Number of workers, at least 1.
        command: The command line of every worker, as words.
        cores_per_worker: Number of cores and threads per worker, at least 1.
        gpus_per_worker: Number of GPUs per worker, at least 0.

    Raises:
        ValueError: If a number is too small or the command is empty.

    Example:
        >>> check(2, ["python", "-m", "tfpar.train"], cores_per_worker=4, gpus_per_worker=0)
    """
    for name, value in (("num_workers", num_workers), ("cores_per_worker", cores_per_worker)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, received {value}. A job needs one worker with one core.")
    if gpus_per_worker < 0:
        raise ValueError(f"gpus_per_worker must be at least 0, received {gpus_per_worker}. Leave it out without GPUs.")
    if not command:
        raise ValueError(
            "command must have the words that run a worker, received none. Try ['python', '-m', 'tfpar.train']."
        )
