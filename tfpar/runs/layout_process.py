"""The measurement of a layout in a process of its own; no TensorFlow."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfpar import config
from tfpar.messages.received import excerpt
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Measured
from tfpar.planning.search import Failed
from tfpar.runs.plan_files import with_strategy

_PROGRAM, _SENTENCE_CODE = "tfpar.runs.layout_program", 2
_LONGEST = 300


def measure(text: str) -> Measured | Failed:
    """Train a run for some steps, and wait for the end.

    Args:
        text: The configuration of the run, under the layout to measure.
    """
    result = _result(text, ())
    return result if isinstance(result, Failed) else _outcome(result)


def measure_one_device(run: config.Run, devices: Sequence[str]) -> tuple[ModelFacts, int | None, Measured | Failed]:
    """Measure a run on one device, and return the facts of its model.

    Args:
        run: The run.
        devices: Names of the devices of this worker, the measured one first.

    Returns:
        The facts; the bytes of memory of the device with the least, None where there is no limit; and the steps.

    Raises:
        ValueError: If run, model and data do not fit together.
    """
    table = _result(config.dump(with_strategy(run, {"kind": "single_device"})), devices)
    if isinstance(table, Failed):
        raise ValueError(table.reason)
    facts = table["facts"]
    facts |= {name: tuple(facts[name]) for name in ("variable_bytes", "normalizing")}
    return ModelFacts(**facts), table["free_bytes"], _outcome(table)


def _outcome(table: Mapping[str, Any]) -> Measured | Failed:
    if table["is_measured"]:
        return Measured(tuple(table["laps"]), table["memory_bytes"])
    return Failed(table["reason"], table["is_refusal"])


def _result(text: str, words: Sequence[str]) -> dict[str, Any] | Failed:
    """Run the program, and return its result."""
    with tempfile.TemporaryDirectory(prefix="tfpar-plan-") as folder:
        file, result = Path(folder, "run.toml"), Path(folder, "result.json")
        file.write_text(text)
        ended = subprocess.run(
            [sys.executable, "-m", _PROGRAM, str(file), str(result), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode == 0 and result.exists():
            table: dict[str, Any] = json.loads(result.read_text())
            return table
    if ended.returncode == _SENTENCE_CODE:
        return Failed(ended.stderr.strip(), is_refusal=True)
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return Failed(f"the process that measures it ended with {ended.returncode}: {excerpt(last, _LONGEST)}")
