"""Measurement of layouts in subprocesses."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tfpar import config
from tfpar.messages.received import excerpt
from tfpar.planning.model_facts import ModelFacts
from tfpar.planning.plan import Measured
from tfpar.planning.search import OUT_OF_MEMORY, Failed
from tfpar.runs.planning.plan_files import with_strategy

_PROGRAM = "tfpar.runs.planning.layout_program"
_LONGEST = 300


class LayoutProcesses(contextlib.ExitStack):
    """A context with a subprocess that measures layouts, replaced whenever a layout needs another one.

    Layouts with equal needs share a process, because its start takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="tfpar-plan-")))
        self._process: subprocess.Popen[str] | None = None
        self._needs: Hashable = None
        self.callback(self._end)

    def measure(self, text: str, needs: Hashable = None) -> Measured | Failed:
        """Train a run for some steps and return their measurements.

        Args:
            text: The configuration of the run, with the layout to measure.
            needs: What the layout needs of its process, such as a number of logical CPUs; None for a new process.
        """
        is_new = self._prepare(needs)
        outcome = _outcome(self._answer(text, ()))
        if outcome == Failed(OUT_OF_MEMORY) and not is_new:  # earlier layouts may still hold memory
            self._end()
            return self.measure(text, needs)
        return outcome

    def measure_one_device(
        self, run: config.Run, devices: Sequence[str]
    ) -> tuple[ModelFacts, int | None, Measured | Failed]:
        """Measure a run on one device.

        Args:
            run: The run.
            devices: The devices of this worker; the first is measured.

        Returns:
            The facts of the model, the smallest free memory of a device in bytes (None without a limit), and the
            measured steps.

        Raises:
            ValueError: If the configuration, the model and the data do not fit together.
        """
        self._prepare(None)
        answer = self._answer(config.dump(with_strategy(run, {"kind": "single_device"})), devices)
        if isinstance(answer, Failed):
            raise ValueError(answer.reason)
        facts = answer["facts"]
        facts |= {name: tuple(facts[name]) for name in ("variable_bytes", "normalizing")}
        return ModelFacts(**facts), answer["free_bytes"], _outcome(answer)

    def _prepare(self, needs: Hashable) -> bool:
        """Start a process unless the current one fits; return whether it is new."""
        if self._process is not None and self._process.poll() is None and needs is not None and needs == self._needs:
            return False
        self._end()
        with self._errors("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._needs = needs
        return True

    def _answer(self, text: str, devices: Sequence[str]) -> dict[str, Any] | Failed:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        file = self._folder / "run.toml"
        file.write_text(text)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"file": str(file), "devices": list(devices)}), file=process.stdin, flush=True)
        if line := process.stdout.readline():
            answer: dict[str, Any] = json.loads(line)
            return Failed(answer["error"], is_refusal=True) if "error" in answer else answer
        with self._errors("r") as errors:
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
        return Failed(f"the process that measures it ended with {process.wait()}: {excerpt(last, _LONGEST)}")

    def _errors(self, mode: str) -> IO[str]:
        return (self._folder / "errors").open(mode)

    def _end(self) -> None:
        if self._process is not None:
            with self._process as process, contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            self._process = None


def _outcome(answer: Mapping[str, Any] | Failed) -> Measured | Failed:
    if isinstance(answer, Failed):
        return answer
    if answer["is_measured"]:
        return Measured(tuple(answer["laps"]), answer["memory_bytes"])
    return Failed(answer["reason"], answer["is_refusal"])
