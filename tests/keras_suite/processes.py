"""Keras' tests in separate processes, so that a crash or a hang affects one test only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

ROOT = Path(__file__).parent.parent.parent
KERAS = Path(keras.__file__).parent / "src"

_NOTHING_COLLECTED = 5  # pytest's exit code, as for a file of tests for other backends only

Records = dict[str, dict[str, Any]]


def test_files(packages: Iterable[str]) -> list[str]:
    """The tests that the installed Keras brings, as paths from its source folder."""
    return sorted(str(path.relative_to(KERAS)) for name in packages for path in (KERAS / name).rglob("*_test.py"))


def groups(tests: Sequence[str], size: int) -> list[list[str]]:
    """Put tests, or whole files, into groups that one process runs."""
    return [list(tests[first : first + size]) for first in range(0, len(tests), size)]


def run(strategy: str, tests: Sequence[str], seconds: float) -> Records:
    """Run tests under a strategy until each has a result.

    Args:
        strategy: A name of `plugin.STRATEGIES`, or "keras".
        tests: Files, or tests such as `trainers/trainer_test.py::TestTrainer::test_fit_flow_eager`.
        seconds: The limit of one test.

    Returns:
        The records by test; the outcome is "passed", "failed", "skipped" or "crashed".
    """
    found: Records = {}
    left = list(tests)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            code, output, records = _run_once(strategy, left, seconds, Path(folder), list(found))
        if not records and code not in (0, _NOTHING_COLLECTED):
            raise RuntimeError(f"pytest ended with {code} under {strategy}:\n{output}")
        crashed = [name for name, record in records.items() if record["outcome"] == "started"]
        for name in crashed:
            records[name] = {"outcome": "crashed", "calls": 0, "refusals": [], "error": output, "where": ""}
        found |= records
        left = [test for test in left if test not in found] if crashed else []
    return found


def _run_once(
    strategy: str, tests: Sequence[str], seconds: float, folder: Path, done: Sequence[str]
) -> tuple[int, str, Records]:
    """Run tests in one process; return its exit code, the end of its output and the records."""
    file = folder / "records.jsonl"
    file.touch()
    settings = {
        "CUDA_VISIBLE_DEVICES": "-1",
        "KERAS_BACKEND": "tensorflow",
        "KERAS_SUITE_RECORDS": str(file),
        "KERAS_SUITE_SECONDS": str(seconds),
        "KERAS_SUITE_STRATEGY": strategy,
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with (folder / "output").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pytest", "-c", str(Path(__file__).with_name("pytest.ini"))),
                *("--rootdir", str(KERAS), "-p", "tests.keras_suite.plugin"),
                *(str(KERAS / test) for test in tests),
                *(f"--deselect={test}" for test in done),
            ],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            # What a test started does not outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()[-2000:]
    records: Records = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        # A failure after the test itself, when it is torn down, counts for more than its success.
        if records.get(record["test"], {}).get("outcome") != "failed":
            records[record.pop("test")] = record
    return code, text, records
