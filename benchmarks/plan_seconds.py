"""The experiment `plan_seconds`: how long planning takes, next to the first step of the model, and by default.

    python -m benchmarks plan_seconds

The goal is a minute, or three times the first step where that is longer.

The first step is that of one device, from the model function on: it builds the model, traces the step and runs it. Both
are measured in one process, the first step before the plan.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output
from benchmarks.process import ROOT, WorkerError

# A plan may take a minute; of a model whose first step takes long, three times that.
MOST_SECONDS, MOST_FIRST_STEPS = 60.0, 3.0
_TIMEOUT_SECONDS = 600.0
_LARGE, _DEFAULT = "transformer", "default run"


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model whose plan is timed by the function `tfpar.plan`.

    Args:
        model: A model of the experiment `plan`.
        batch: Examples of the global batch.
    """

    model: str
    batch: int


@dataclasses.dataclass(frozen=True)
class PlannedConfiguration:
    """A configuration whose plan is timed by the command, with its start.

    Args:
        config: Its name.
        logical_cpus: Devices into which the CPU is split.
    """

    config: str
    logical_cpus: int = 2


def measure(setting: PlannedModel | PlannedConfiguration) -> Output:
    """Return the seconds of a plan, and of the first step of a model.

    Args:
        setting: What is planned.

    Raises:
        WorkerError: If the process fails.
    """
    if isinstance(setting, PlannedModel):
        return process.ask("benchmarks.plan_seconds_worker", vars(setting))
    return {"planning_seconds": _seconds_of_command(setting)}


def _seconds_of_command(setting: PlannedConfiguration) -> float:
    words = ["--config", setting.config, "--logical_cpus", str(setting.logical_cpus)]
    with tempfile.TemporaryDirectory() as folder:  # the command stores its plan
        began_seconds = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-m", "tfpar.plan", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
        seconds = time.perf_counter() - began_seconds
    if ended.returncode not in (0, 1):  # 1: too noisy to rank, which takes as long
        raise WorkerError(f"exit status {ended.returncode}: {ended.stderr.strip()[-500:]}")
    return seconds


def _most_seconds(first_step_seconds: float) -> float:
    return max(MOST_SECONDS, MOST_FIRST_STEPS * first_step_seconds)


PLAN_SECONDS = Experiment(
    name="plan_seconds",
    summary="The seconds of a plan: of the transformer of `plan` relative to its first step, and of the default run",
    figure="planning_seconds",
    settings={_LARGE: PlannedModel("transformer", 32), _DEFAULT: PlannedConfiguration("digits")},
    measure=measure,
    findings=(
        Finding(
            f"planning / what it may take, {_LARGE}",
            lambda outputs: outputs[_LARGE]["planning_seconds"] / _most_seconds(outputs[_LARGE]["first_step_seconds"]),
            at_most=1.0,
        ),
        Finding(
            f"seconds of planning, {_DEFAULT}",
            lambda outputs: outputs[_DEFAULT]["planning_seconds"],
            at_most=MOST_SECONDS,
        ),
    ),
)
