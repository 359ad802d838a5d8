"""The program of a worker for test_hybrid_workers_multi_process.py: pipelines on the devices of each worker."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfpar
from tests.properties.test_parity import Result, computing_in, train
from tests.strategies.test_hybrid import wide
from tests.support import multi_worker_cases as cases
from tests.support import parity_cases, pipeline_cases, small, workers
from tests.support.parity_cases import CASES


def hybrid(num_microbatches: int = 2, schedule: str = "1f1b", **settings: Any) -> tfpar.Hybrid:
    """Return one replica of two stages on each worker."""
    return tfpar.Hybrid(tfpar.Pipeline(2, num_microbatches, schedule, balance="parameters", **settings))


def train_row(row: pipeline_cases.Row) -> Result:
    case = pipeline_cases.deepened(CASES[row.case])
    with computing_in(row.dtype):
        strategy = hybrid(row.num_microbatches, row.schedule, recompute=row.recompute)
        trainer = tfpar.Trainer(case.build, strategy, seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


def train_with_checkpoints(strategy: tfpar.Strategy, folder: Path) -> tuple[dict[str, list[float]], list[Any]]:
    """Train to the end of epoch 3 from the folder's checkpoint; without a checkpoint, interrupt at step 13."""
    trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
    callback = cases.Interrupt(trainer if strategy.rank == 1 else None, at_step=13)
    checkpoints = tfpar.Checkpoints(folder, every_seconds=1000)
    fit = {"epochs": 3, "verbose": 0, "callbacks": [callback], "checkpoints": checkpoints}
    return trainer.fit(small.shuffled(), **fit).history, cases.state(trainer.model)


def train_measured() -> tuple[list[int], list[np.ndarray], str, tuple[float, ...]]:
    """Train in stages of equal time, as measured on the chief.

    Returns:
        The sizes of the stages, the weights, the table of the stages, the predicted seconds of their all-reduces.
    """
    strategy = tfpar.Hybrid(tfpar.Pipeline(2, 2))
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    trainer.fit(small.data(), verbose=0)
    preview = trainer.preview(small.data())
    assert preview.durations is not None
    sizes = [row.num_layers for row in preview.rows]
    return sizes, trainer.model.get_weights(), str(preview), preview.durations.all_reduce_seconds


def preview_of_lookups() -> str:
    """Return the table of the stages of a model with an embedding."""
    case = pipeline_cases.deepened(CASES["embedding, sparse gradients"])
    trainer = tfpar.Trainer(case.build, hybrid(), seed=0)
    return str(trainer.preview(case.data()))


def predict() -> Any:
    trainer = tfpar.Trainer(wide, hybrid(), seed=0)
    return trainer.predict(small.data(), verbose=0), trainer.evaluate(small.data(), verbose=0, return_dict=True)


def methods_in_a_scope() -> Any:
    """Predict a batch before the first `fit` of a model that is built in the scope."""
    with hybrid().scope():
        keras.utils.set_random_seed(0)
        model = wide()
    predicted = model.predict_on_batch(parity_cases.inputs(7))
    return predicted, model.fit(small.data(), verbose=0).history


def trace() -> Any:
    """Return the actions of each device of all workers in the order in which they ran, and the title of the preview."""
    strategy = hybrid(num_microbatches=1)
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    timeline = strategy.trace(trainer.model, trainer.build(small.data()))
    ran = [[str(span.action) for span in timeline.spans if span.device == device] for device in range(4)]
    return ran, str(trainer.preview(small.data())).splitlines()[0]


def differing_grids() -> None:
    """Each worker another number of replicas."""
    num_replicas = workers.place()[1] + 1
    tfpar.Hybrid(tfpar.Pipeline(2 // num_replicas, 2), num_replicas)


def sharded(strategy: tfpar.Strategy, kind: str) -> Any:
    return cases.with_shards(kind, tfpar.Trainer(cases.sharded_model(kind), strategy, seed=0))


def main() -> None:
    checkpoints, *names = sys.argv[3:]
    tfpar.use_logical_cpus(2)
    rows = {str(row): row for row in pipeline_cases.on_replicas()}
    strategy = hybrid()
    workers.run_all(
        {
            "description": strategy.describe,
            "checkpoints": functools.partial(train_with_checkpoints, strategy, Path(checkpoints)),
            **{name: functools.partial(train_row, rows[name]) for name in names},
            **{f"sharded {kind}": functools.partial(sharded, strategy, kind) for kind in cases.SHARDED},
            "measured": train_measured,
            "lookups": preview_of_lookups,
            "predict": predict,
            "methods in a scope": methods_in_a_scope,
            "trace": trace,
            "differing grids": differing_grids,
        }
    )


if __name__ == "__main__":
    main()
