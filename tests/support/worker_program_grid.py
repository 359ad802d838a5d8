"""The program of a worker for test_grid_across_workers_multi_process.py: replicas of a pipeline over all workers."""

from __future__ import annotations

import functools
import sys
from typing import Any

import keras

import tfpar
from tests.properties.test_parity import Result, computing_in, train
from tests.strategies.test_hybrid import wide
from tests.support import parity_cases, pipeline_cases, small, workers


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
        }
    )


if __name__ == "__main__":
    main()
