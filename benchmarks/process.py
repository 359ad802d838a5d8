"""One fresh Python process for one measurement: nothing leaks from the one before, and threads can be set anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class WorkerError(RuntimeError):
    """A worker process ended without an answer; the message holds the last lines that it wrote."""


def ask(module: str, request: Mapping[str, Any], timeout_seconds: float = 600.0) -> dict[str, Any]:
    """Run `python -m module` on a request and return its answer.

    What the process writes to standard error, TensorFlow's start-up messages among it, stays away from the terminal.

    Args:
        module: Name of a module whose `__main__` calls `answer`.
        request: Anything that JSON holds.
        timeout_seconds: After that the process is killed.

    Returns:
        What the module's function returned.

    Raises:
        WorkerError: If the process failed, gave no answer or took too long.
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    except subprocess.TimeoutExpired:
        raise WorkerError(f"no answer within {timeout_seconds:g} seconds") from None
    if done.returncode != 0 or not done.stdout.strip():
        last_lines = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise WorkerError(f"exit status {done.returncode}: {last_lines}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def request() -> dict[str, Any]:
    """Return the request of this worker process."""
    received: dict[str, Any] = json.loads(sys.argv[1])
    return received


def answer(values: Mapping[str, Any]) -> None:
    """Give this worker process' answer: the last line of its standard output."""
    print(json.dumps(values), flush=True)
