"""The program of a worker for test_grid_across_workers_multi_process.py: replicas of a pipeline over all workers."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import keras

import tfpar
from tests.properties.test_parity import Result, computing_in, train
from tests.strategies.test_hybrid import wide
from tests.support import checkpoint_matrix, parity_cases, pipeline_cases, small, workers

SHARDED = ("accumulation 4, ragged end, clipped", "embedding, sparse gradients")


def grid(num_microbatches: int = 2, schedule: str = "1f1b", devices: Any = None, **settings: Any) -> tfpar.Hybrid:
    """Return two replicas of two stages on two devices of each worker."""
    settings = {"balance": "parameters", **settings}
    pipeline = tfpar.Pipeline(2, num_microbatches, schedule, across_workers=True, **settings)
    return tfpar.Hybrid(pipeline, 2, devices)


def train_row(row: pipeline_cases.Row) -> Result:
    case = pipeline_cases.deepened(parity_cases.CASES[row.case])
    with computing_in(row.dtype):
        trainer = tfpar.Trainer(case.build, grid(row.num_microbatches, row.schedule, recompute=row.recompute), seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


def homes(units: int, length: int, devices: Any = None) -> Any:
    """Return the devices of each weight and of its optimizer state, and the preview of a step.

    Args:
        units: The units of the layers, which decide the bytes of weights.
        length: The length of the sequence between the stages, which decides the bytes of activations.
        devices: Those of the grid.
    """

    def build() -> keras.Model:
        first = [keras.layers.Dense(units, "tanh"), keras.layers.RepeatVector(length)]
        second = [keras.layers.Dense(units, "tanh"), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *first, *second])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    trainer = tfpar.Trainer(build, grid(balance=[2, 3], devices=devices), seed=0)
    trainer.fit(small.data(), verbose=0)
    optimizer = trainer.model.optimizer
    slots = zip(trainer.model.trainable_variables, optimizer._momentums, optimizer._velocities, strict=True)
    homes = [{tfpar.cluster.short_name(one.value.device) for one in of_one} for of_one in slots]
    return homes, str(trainer.preview(small.data()))


def train_sharded(name: str) -> Result:
    """Train a case with each weight on one device of one worker."""
    case = parity_cases.CASES[name]
    with computing_in("float64"):
        trainer = tfpar.Trainer(case.build, tfpar.MultiWorker(shard="weights"), seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


def homes_of_shards(folder: Path) -> Any:
    """Leave a checkpoint in a folder; return the description, the preview and the devices of weights."""
    strategy = tfpar.MultiWorker(["CPU:0"], shard="weights")
    checkpoint_matrix.begin(strategy, folder)
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    preview = str(trainer.preview(small.data()))
    homes = [tfpar.cluster.short_name(one.value.device) for one in trainer.model.trainable_variables]
    return strategy.describe(), preview, homes


def predict() -> Any:
    trainer = tfpar.Trainer(wide, grid(memory_limit_bytes=1 << 20), seed=0)
    return trainer.predict(small.data(), verbose=0), trainer.evaluate(small.data(), verbose=0, return_dict=True)


def main() -> None:
    names = sys.argv[3:]
    tfpar.use_logical_cpus(2)
    rows = {str(row): row for row in pipeline_cases.on_replicas()}
    reversed_devices = ["1/CPU:1", "0/CPU:1", "1/CPU:0", "0/CPU:0"]
    workers.run_all(
        {
            "description": grid().describe,
            **{name: functools.partial(train_row, rows[name]) for name in names},
            "few weights": lambda: homes(units=2, length=100),
            "many weights": lambda: homes(units=64, length=1),
            "named devices": lambda: homes(units=64, length=1, devices=reversed_devices),
            "predict": predict,
            **{f"{name}, weights sharded": functools.partial(train_sharded, name) for name in SHARDED},
            "homes of shards": lambda: homes_of_shards(Path(sys.argv[1]) / "shards"),
        }
    )


if __name__ == "__main__":
    main()
