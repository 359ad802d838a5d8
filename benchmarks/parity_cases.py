"""The process of one cell of the parity table: 20 steps of a case in float64, against Keras' `fit` on one device.

`python -m benchmarks.parity_cases '{"case": "clipnorm", "trainer": "keras"}'` prints as JSON how far the weights are
apart, or the words of the error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from benchmarks import process
from benchmarks.parity_table import first_words
from tfpar.parity import relative_difference

DEVICES = ("CPU:0", "CPU:1")
NUM_FEATURES, NUM_CLASSES = 5, 3
NUM_STEPS = 20

BuildModel = Callable[[], keras.Model]


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        build_model: The model function.
        data: Returns 20 global batches.
        build_before: A model that the same process trains before; None for none.
    """

    build_model: BuildModel
    data: Callable[[], tf.data.Dataset]
    build_before: BuildModel | None = None


def _classifier(
    num_hidden: int = 8, regularizer: Any = None, steps_per_execution: int = 1, **optimizer: Any
) -> BuildModel:
    """Return the model function of `[batch, 5]` -> `[batch, 3]` under SGD with these settings."""

    def build_model() -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((NUM_FEATURES,)),
                keras.layers.Dense(num_hidden, "tanh", kernel_regularizer=regularizer),
                keras.layers.Dense(NUM_CLASSES),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9, **optimizer),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            steps_per_execution=steps_per_execution,
        )
        return model

    return build_model


def _sequence_model() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(11, 4, mask_zero=True)(tokens)
    hidden = keras.layers.GRU(5, return_sequences=True)(hidden)
    model = keras.Model(tokens, keras.layers.Dense(2)(hidden))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def _batches(batch_size: int, last_batch_size: int | None = None, weighted: bool = False) -> tf.data.Dataset:
    """Return 20 batches, the last one perhaps smaller."""
    num_examples = (NUM_STEPS - 1) * batch_size + (last_batch_size or batch_size)
    rng = np.random.default_rng(1)
    arrays: tuple[np.ndarray, ...] = (
        rng.normal(size=(num_examples, NUM_FEATURES)),
        rng.integers(0, NUM_CLASSES, size=num_examples),
    )
    if weighted:
        arrays += (rng.uniform(0.1, 2.0, size=num_examples),)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch_size)


def _sequences() -> tf.data.Dataset:
    """Return 20 batches of 8 sequences of 1 to 6 tokens, padded with the token 0."""
    rng = np.random.default_rng(2)
    num_examples = 8 * NUM_STEPS
    is_token = np.arange(6) < rng.integers(1, 7, size=num_examples)[:, None]
    tokens = np.where(is_token, rng.integers(1, 11, size=(num_examples, 6)), 0)
    return tf.data.Dataset.from_tensor_slices((tokens, rng.normal(size=(num_examples, 6, 2)))).batch(8)


def _full() -> tf.data.Dataset:
    return _batches(8)


CASES: dict[str, Case] = {
    "full batches": Case(_classifier(), _full),
    "sample weights": Case(_classifier(), lambda: _batches(8, weighted=True)),
    "L2 regularization": Case(_classifier(regularizer="l2"), _full),
    "global batch of 7 over 2 replicas": Case(_classifier(), lambda: _batches(7)),
    "last batch of 1": Case(_classifier(), lambda: _batches(8, last_batch_size=1)),
    "masked sequence loss": Case(_sequence_model, _sequences),
    "`clipnorm`": Case(_classifier(clipnorm=0.05), _full),
    "`global_clipnorm`": Case(_classifier(global_clipnorm=0.05), _full),
    "`gradient_accumulation_steps=2`": Case(_classifier(gradient_accumulation_steps=2), _full),
    "EMA, `ema_overwrite_frequency=3`": Case(
        _classifier(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3), _full
    ),
    "`steps_per_execution=2`": Case(_classifier(steps_per_execution=2), _full),
    "second model in one process": Case(_classifier(), _full, build_before=_classifier(num_hidden=4)),
}


def compare(case: Case, trainer: str) -> float:
    """Return the largest relative difference of a weight between two devices and one, after 20 steps.

    Args:
        case: What to train.
        trainer: "keras" for its own `fit` under `tf.distribute.MirroredStrategy`, "tfpar" for `tfpar.Mirrored`.
    """
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    train = _train_keras if trainer == "keras" else _train_tfpar
    expected = _train_plainly(case.build_model, case.data())
    if case.build_before is not None:
        train(case.build_before, case.data())
    actual = train(case.build_model, case.data())
    return max(relative_difference(*pair) for pair in zip(actual, expected, strict=True))


def _train_plainly(build_model: BuildModel, data: tf.data.Dataset) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    model = build_model()
    model.fit(data, verbose=0)
    return list(model.get_weights())


def _train_keras(build_model: BuildModel, data: tf.data.Dataset) -> list[np.ndarray]:
    with tf.distribute.MirroredStrategy(DEVICES).scope():
        keras.utils.set_random_seed(0)
        model = build_model()
    model.fit(data, verbose=0)
    return list(model.get_weights())


def _train_tfpar(build_model: BuildModel, data: tf.data.Dataset) -> list[np.ndarray]:
    trainer = tfpar.Trainer(build_model, tfpar.Mirrored(DEVICES), seed=0)
    trainer.fit(data, verbose=0)
    return list(trainer.model.get_weights())


def _output(case: Case, trainer: str) -> dict[str, float | str]:
    tfpar.use_logical_cpus(len(DEVICES))
    try:
        return {"difference": compare(case, trainer)}
    except Exception as error:  # whatever it is, it is what the table shows
        return {"error": first_words(str(error) or type(error).__name__)}


if __name__ == "__main__":
    asked = process.request()
    process.reply(_output(CASES[asked["case"]], asked["trainer"]))
