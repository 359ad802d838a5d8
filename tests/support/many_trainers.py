"""The memory that trainers leave in a process that creates many of them, as a search for hyperparameters does.

python -m tests.support.many_trainers mirrored 100            # each with another strategy object
python -m tests.support.many_trainers pipeline 100 --shared   # one strategy for all
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

import tfpar

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single_device": tfpar.SingleDevice,
    "mirrored": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
    "multi_worker": lambda: tfpar.MultiWorker(["CPU:0", "CPU:1"]),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
}
INPUTS, LABELS = np.ones((8, 5), "float32"), np.zeros(8, "int64")


class Memory(NamedTuple):
    """The memory of a process.

    Args:
        num_objects: Those that Python's garbage collector knows.
        resident_bytes: Memory of the process.
        num_models: Models of trainers that are gone.
    """

    num_objects: int
    resident_bytes: int
    num_models: int


class LossOfRows(layers.Layer):
    """Adds a loss object's value, which is summed over replicas within the call."""

    def call(self, features: Any) -> Any:
        self.add_loss(keras.losses.MeanSquaredError()(keras.ops.zeros_like(features), features))
        return features


def build_model() -> keras.Model:
    """A model with custom gradients in its activation and in a loss in `call`."""
    hidden = [layers.Dense(4, "silu"), LossOfRows(), layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *hidden])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def train_many(strategies: Iterator[tfpar.Strategy]) -> Iterator[Memory]:
    """Train a model under each strategy and delete it; yield the memory of the process."""
    models: list[weakref.ref[keras.Model]] = []
    for strategy in strategies:
        trainer = tfpar.Trainer(build_model, strategy, seed=0)
        trainer.fit(INPUTS, LABELS, batch_size=4, verbose=0)
        models.append(weakref.ref(trainer.model))
        del trainer, strategy
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        yield Memory(len(gc.get_objects()), pages * 4096, sum(model() is not None for model in models))


def main() -> None:
    """Print the memory of the process after every tenth trainer."""
    name, number = sys.argv[1], int(sys.argv[2])
    tfpar.use_logical_cpus(2)
    one = STRATEGIES[name]() if "--shared" in sys.argv else None
    strategies = (one or STRATEGIES[name]() for _ in range(number))
    for index, memory in enumerate(train_many(strategies), 1):
        if index == 3 or index % 10 == 0:
            print(f"{index} {memory.num_objects:,} objects, {memory.resident_bytes / 1e6:.0f} MB", flush=True)


if __name__ == "__main__":
    main()
