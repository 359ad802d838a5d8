"""The program of a worker for test_multi_worker_parity_multi_process.py: cases of the parity table."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import tfpar
from tests.properties.test_parity import CASES, computing_in, train
from tests.support import multi_worker_cases as cases
from tests.support import small, workers


def train_case(strategy: tfpar.MultiWorker, dtype: str, name: str) -> tuple[dict[str, list[float]], list[Any]]:
    case = CASES[name]
    with computing_in(dtype):
        trainer = tfpar.Trainer(case.build, strategy, seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


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
