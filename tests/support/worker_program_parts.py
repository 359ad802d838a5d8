"""The program of a worker for test_parts_multi_process.py: checkpoints of a pipeline with most weights on worker 1."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import workers
from tfpar.cluster.process_memory import peak_bytes, reset_peak

WIDTH = 5000  # a weight of 100 MB on worker 1, with its momentum and its moving average
NOT_SHARED = Path("/proc/self/cwd/checkpoints")  # another folder in every process


def model_of(width: int) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        layers = [keras.layers.Dense(one) for one in (8, width, width, 1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(1e-9, momentum=0.9, use_ema=True), "mse")
        return model

    return build


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((np.ones((12, 4)), np.ones((12, 1)))).batch(6)


@contextmanager
def growth_of(phase: str, found: dict[str, float]) -> Iterator[None]:
    """Note by how many MB the peak of this process's memory exceeds its memory at the beginning."""
    reset_peak()
    before = peak_bytes()
    yield
    found[phase] = (peak_bytes() - before) / 2**20


def growth(strategy: tfpar.Strategy, root: Path) -> dict[str, float]:
    """Return the growth of the first process's memory by phase; before, a small model takes what does not grow."""
    small = tfpar.Trainer(model_of(16), strategy, seed=0)
    small.fit(data(), verbose=0, checkpoints=tfpar.Checkpoints(root / "small"))
    found: dict[str, float] = {}
    with growth_of("building", found):
        trainer = tfpar.Trainer(model_of(WIDTH), strategy, seed=0)
        trainer.build(data())
    with growth_of("training", found):
        trainer.fit(data(), verbose=0, checkpoints=tfpar.Checkpoints(root / "large", every_seconds=0))
    with growth_of("restoring", found):
        trainer.fit(data(), verbose=0, checkpoints=tfpar.Checkpoints(root / "large"))
    return found


def not_shared(strategy: tfpar.Strategy) -> Any:
    """Return the error of a folder that worker 1 does not see, and the steps of the same trainer after it."""
    trainer = tfpar.Trainer(model_of(16), strategy, seed=0)
    with pytest.raises(ValueError, match=r".") as raised:
        trainer.fit(data(), verbose=0, checkpoints=tfpar.Checkpoints(NOT_SHARED))
    before = int(trainer.model.optimizer.iterations.numpy())
    trainer.fit(data(), verbose=0)
    return str(raised.value), before, int(trainer.model.optimizer.iterations.numpy())


def main() -> None:
    strategy = tfpar.Pipeline(2, 2, balance=[1, 3], across_workers=True)
    workers.run_all(
        {
            "growth": functools.partial(growth, strategy, Path(sys.argv[3])),
            "not shared": functools.partial(not_shared, strategy),
        }
    )


if __name__ == "__main__":
    main()
