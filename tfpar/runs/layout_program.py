"""The program of a process that trains one layout of a run for some steps, as the train command would train it.

A process of its own has the devices, threads and memory of the layout alone, and it can form a cluster: TensorFlow
forms one cluster in a process. In a job of several workers each of them runs this program at the same time.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tfpar import cluster, config
from tfpar.commands import parent_process

FAILED = 2


def main(file: str, result: str, *devices: str) -> int:
    """Measure the layout that the configuration of a run has, and write its steps as JSON.

    Args:
        file: The configuration.
        result: The file to write.
        devices: With names of devices, the run is measured on the first of them, as one device, and the facts of the
            model are written too.

    Returns:
        The exit code: 0, or 2 after an error in configuration, model or data, with a sentence on standard error.
    """
    parent_process.end_with_parent()
    try:
        with cluster.native_messages_to(Path(os.devnull)):
            Path(result).write_text(json.dumps(_measured(config.load(file), devices)))
        return 0
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print(error, file=sys.stderr)
        return FAILED


def _measured(run: config.Run, devices: tuple[str, ...]) -> dict[str, Any]:
    from tfpar import data, strategies
    from tfpar.planning import first_batches, trial
    from tfpar.planning.plan import Measured
    from tfpar.runs import run_data, user_trainer

    def make_trainer(strategy: strategies.Strategy) -> tuple[Any, first_batches.FirstBatches]:
        with strategy.raising_on_all_workers(f"The constructor of {run.trainer}"):
            trainer = user_trainer.make_trainer(run, strategy)
        return trainer, first_batches.read(run_data.training_batches(run, trainer))

    if not devices:
        outcome = trial.measure(make_trainer, functools.partial(strategies.from_settings, run.strategy))
        return {"is_measured": isinstance(outcome, Measured), **outcome._asdict()}
    free_bytes = cluster.free_bytes(devices)
    explain = functools.partial(data.user_message, settings=run.data)
    facts, outcome = trial.measure_one_device(make_trainer, devices[0], explain)
    measured = {"is_measured": isinstance(outcome, Measured), **outcome._asdict()}
    return {"facts": vars(facts), "free_bytes": free_bytes, **measured}


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
