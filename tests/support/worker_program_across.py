"""The program of a worker for test_pipeline_across_workers_multi_process.py: one pipeline over all workers."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import tfpar
from tests.properties.test_parity import Result, computing_in, train
from tests.strategies.test_hybrid import wide
from tests.support import pipeline_cases, small, workers
from tests.support.parity_cases import CASES

SILENCE_SECONDS = 2.0  # where a worker is lost


def train_row(strategy: tfpar.Strategy, dtype: str, name: str) -> Result:
    case = pipeline_cases.deepened(CASES[name])
    with computing_in(dtype):
        trainer = tfpar.Trainer(case.build, strategy, seed=0)
        return train(case, trainer.fit, trainer.model, steps_per_call=case.steps_per_call)


def homes(strategy: tfpar.Strategy) -> Any:
    """Return the devices of the weights and of the optimizer's moments, by stage."""
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    predicted = trainer.predict(small.data(), verbose=0)
    trainer.fit(small.data(), verbose=0)
    variables = zip(trainer.model.trainable_variables, trainer.model.optimizer._momentums, strict=True)
    devices = [(one.value.device, other.value.device) for one, other in variables]
    return predicted, devices, str(trainer.preview(small.data()))


def homes_of_set_weights(strategy: tfpar.Strategy) -> list[str]:
    """Return the devices of weights that the model function sets, which allocates them before the stages are known."""

    def build() -> keras.Model:
        model = wide()
        model.set_weights(model.get_weights())
        return model

    trainer = tfpar.Trainer(build, strategy, seed=0)
    trainer.fit(small.data(), verbose=0)
    return [variable.value.device for variable in trainer.model.trainable_variables]


class Doubled(keras.layers.Layer):
    """Doubles its inputs in Python."""

    def call(self, inputs: Any) -> Any:
        outputs = tf.numpy_function(lambda rows: 2 * rows, [inputs], inputs.dtype)
        outputs.set_shape(inputs.shape)
        return tf.stop_gradient(outputs)


def with_python(strategy: tfpar.Strategy, *, first: bool) -> float:
    """Train a model with a function of Python in its first or its last layer; return the loss."""

    def build() -> keras.Model:
        dense = [keras.layers.Dense(4) for _ in range(4)]
        layers = [Doubled(), *dense] if first else [*dense, Doubled(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile("sgd", "mse")
        return model

    rows = tf.ones([6, 8])
    data = tf.data.Dataset.from_tensors((rows, tf.zeros([6, 4 if first else 1])))
    return float(tfpar.Trainer(build, strategy, seed=0).fit(data, verbose=0).history["loss"][0])


class NotesEnds(keras.callbacks.Callback):
    """Writes a file after the first epoch."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._file.touch()


def lost(strategy: tfpar.Strategy, file: Path) -> None:
    """Train until the other worker is lost."""
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    trainer.fit(small.data(), epochs=10_000, verbose=0, callbacks=[NotesEnds(file)])


def stopped(strategy: tfpar.Strategy, file: Path) -> bool:
    """Train until a worker gets SIGTERM; return whether training was interrupted."""
    trainer = tfpar.Trainer(wide, strategy, seed=0)
    checkpoints = tfpar.Checkpoints(file.with_name("stopped"), every_seconds=1000)
    try:
        trainer.fit(small.data(), epochs=10_000, verbose=0, callbacks=[NotesEnds(file)], checkpoints=checkpoints)
    except SystemExit as ending:
        return ending.code == 130 and trainer.interrupted
    return False


def main() -> None:
    root, *rows = sys.argv[3:]
    silence_seconds = SILENCE_SECONDS if "lost" in rows else 30.0
    strategy = tfpar.Pipeline(2, 3, balance="parameters", across_workers=True, silence_seconds=silence_seconds)
    functions = {row: functools.partial(train_row, strategy, *row.split(" ", 1)) for row in rows if row != "lost"}
    functions |= {
        "description": strategy.describe,
        "homes": functools.partial(homes, strategy),
        "homes of set weights": functools.partial(homes_of_set_weights, strategy),
        "Python on the chief": functools.partial(with_python, strategy, first=True),
        "Python on the other worker": functools.partial(with_python, strategy, first=False),
        "stopped": functools.partial(stopped, strategy, Path(root) / "trains"),
    }
    if "lost" in rows:
        functions = {"lost": functools.partial(lost, strategy, Path(root) / "trains")}
    workers.run_all(functions)


if __name__ == "__main__":
    main()
