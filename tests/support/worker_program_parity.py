"""The program of a worker for test_multi_worker_parity_multi_process.py: cases of the parity table."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import tfpar
from tests.properties.test_parity import CASES, computing_in, train, train_in_shards
from tests.support import multi_worker_cases as cases
from tests.support import small, workers

SHARDED = "sharded"  # in place of a dtype; in float64


def train_case(strategy: tfpar.MultiWorker, dtype: str, name: str) -> tuple[dict[str, list[float]], list[Any]]:
    if dtype == SHARDED:
        return train_sharded(name)
    case = CASES[name]
    with computing_in(dtype):
        trainer = tfpar.Trainer(case.build, strategy, seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


def train_sharded(name: str) -> tuple[dict[str, list[float]], list[Any]]:
    """Return the history, the weights and on the chief the optimizer's state of all workers."""
    case = CASES[name]
    with computing_in("float64"):
        return train_in_shards(case, tfpar.Trainer(case.build, sharded(), seed=0))


@functools.cache
def sharded() -> tfpar.MultiWorker:
    return tfpar.MultiWorker(pack_bytes=256, shard="optimizer")


def train_with_checkpoints(strategy: tfpar.MultiWorker, folder: Path) -> tuple[dict[str, list[float]], list[Any]]:
    """Train to the end of epoch 3 from the folder's checkpoint; without a checkpoint, interrupt at step 13."""
    trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
    callback = cases.Interrupt(trainer if strategy.rank == 1 else None, at_step=13)
    checkpoints = tfpar.Checkpoints(folder, every_seconds=1000)
    fit = {"epochs": 3, "verbose": 0, "callbacks": [callback], "checkpoints": checkpoints}
    return trainer.fit(small.shuffled(), **fit).history, cases.state(trainer.model)


def main() -> None:
    checkpoints, pack_bytes, *rows = sys.argv[3:]
    strategy = tfpar.MultiWorker(pack_bytes=int(pack_bytes))
    functions = {row: functools.partial(train_case, strategy, *row.split(" ", 1)) for row in rows}
    workers.run_all(
        {"checkpoints": functools.partial(train_with_checkpoints, strategy, Path(checkpoints)), **functions}
    )


if __name__ == "__main__":
    main()
