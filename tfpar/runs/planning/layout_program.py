"""The program of a measuring subprocess, which trains layouts for some steps as the train command would.

A subprocess has its own devices, threads and memory, and can form its own TensorFlow cluster, of which a process can
form only one. In a job, all workers run this program at the same time.

    {"file": "run.toml", "devices": []}       a line of standard input per layout
    {"is_measured": true, "laps": [...]}      the answer, a line of standard output
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfpar import cluster, config
from tfpar.commands import parent_process


def main() -> int:
    """Answer the lines of standard input until it ends.

    If a line lists devices, the run is measured on the first one alone, and the answer includes the facts of its model.

    Returns:
        The exit code, 0.
    """
    parent_process.end_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what models and data print
    with cluster.native_messages_to(Path(os.devnull)):
        for line in sys.stdin:
            try:
                answer = _measured(**json.loads(line))
            except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), file=answers, flush=True)
    return 0


def _measured(file: str, devices: Sequence[str]) -> dict[str, Any]:
    from tfpar import data, strategies
    from tfpar.planning import first_batches, step_measurement
    from tfpar.planning.plan import Measured
    from tfpar.runs import run_data, user_trainer

    run = config.load(file)

    def make_trainer(strategy: strategies.Strategy) -> tuple[Any, first_batches.FirstBatches]:
        with strategy.job.vote(f"The constructor of {run.trainer}"):
            trainer = user_trainer.make_trainer(run, strategy)
        return trainer, first_batches.read(run_data.training_batches(run, trainer))

    if not devices:
        outcome = step_measurement.measure(make_trainer, functools.partial(strategies.from_settings, run.strategy))
        return {"is_measured": isinstance(outcome, Measured), **outcome._asdict()}
    free_bytes = cluster.free_bytes(devices)
    explain = functools.partial(data.user_message, settings=run.data)
    device = "CPU:0" if devices[0].startswith("CPU") else devices[0]  # here the CPU is not split
    facts, outcome = step_measurement.measure_one_device(make_trainer, device, explain)
    measured = {"is_measured": isinstance(outcome, Measured), **outcome._asdict()}
    return {"facts": vars(facts), "free_bytes": free_bytes, **measured}


if __name__ == "__main__":
    raise SystemExit(main())
