"""Verdicts on models: a strategy trains as one device, or refuses before the first step, in words with a way out.

The tables are in `verdict_losses`, `verdict_metrics` and `verdict_layers`: families of cases, the clearest case first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfpar

Build = Callable[[], keras.Model]
Data = Callable[[], tf.data.Dataset]
NUM_EXAMPLES, BATCH, NUM_FEATURES, NUM_CLASSES = 18, 17, 4, 3  # a last batch of 1: fewer examples than parts
TWO = ["CPU:0", "CPU:1"]


class Refused(NamedTuple):
    """The call that is refused; calls before it are as on one device.

    Args:
        message: A regular expression for a part of the error.
        call: The refused call.
        error: Its class.
    """

    message: str
    call: str = "fit"
    error: type[Exception] = ValueError


EQUAL: Literal["equal"] = "equal"  # what Keras' own methods give on one device
RUNS: Literal["runs"] = "runs"  # with finite results: other random numbers, or statistics of parts of a batch
Verdict = Literal["equal", "runs"] | Refused

ENGINES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single device": lambda: tfpar.SingleDevice(),
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "optimizer sharded": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "gathering": lambda: tfpar.Mirrored(TWO, batch_dependent_layers="gather"),
    "pipeline": lambda: tfpar.Pipeline(2, 4, devices=TWO, balance="parameters"),
    "one micro-batch": lambda: tfpar.Pipeline(2, 1, devices=TWO, balance="parameters"),
    "allowing": lambda: tfpar.Pipeline(2, 4, devices=TWO, balance="parameters", allow_batch_dependent_layers=True),
    "stages of shards": lambda: tfpar.Pipeline(2, 2, num_shards=2, balance="parameters"),
    "pipelines": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), 2),
    "pipelines of shards": lambda: tfpar.Hybrid(tfpar.Pipeline(1, 2, num_shards=2), 2),
    "shards": lambda: tfpar.TensorParallel(2),
}


def batches(*arrays: Any, batch: int = BATCH) -> Data:
    """Return a function that batches arrays of floats, in the float type of Keras, or of whole numbers."""

    def data() -> tf.data.Dataset:
        floats = (a.astype(keras.config.floatx()) if a.dtype.kind == "f" else a for a in map(np.asarray, arrays))
        return tf.data.Dataset.from_tensor_slices(tuple(floats)).batch(batch)

    return data


_random = np.random.default_rng(0)
INPUTS = _random.normal(size=(NUM_EXAMPLES, NUM_FEATURES))
VALUES = _random.normal(size=(NUM_EXAMPLES, NUM_FEATURES))
LABELS = _random.integers(0, NUM_CLASSES, NUM_EXAMPLES)
BITS = (_random.uniform(size=(NUM_EXAMPLES, NUM_FEATURES)) < 0.5).astype("float64")
WEIGHTS = _random.uniform(0.1, 2.0, NUM_EXAMPLES)
REGRESSION, CLASSIFICATION = batches(INPUTS, VALUES), batches(INPUTS, LABELS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data, and the verdict of each engine.

    Args:
        build: The model function.
        verdicts: By the name of an engine.
        data: Returns the dataset, with the batches that one device takes.
        calls: What is called in turn: "fit", "validated fit", "evaluate" or "predict".
        dtype: The float type of model and data.
    """

    build: Build
    verdicts: dict[str, Verdict]
    data: Data = REGRESSION
    calls: tuple[str, ...] = ("fit", "evaluate")
    dtype: str = "float32"


def both(verdict: Verdict) -> dict[str, Verdict]:
    """Return a verdict of replicas and of micro-batches."""
    return {"mirrored": verdict, "pipeline": verdict}


def refused(message: str, call: str = "fit") -> dict[str, Verdict]:
    """Return the refusal of replicas and of micro-batches."""
    return both(Refused(message, call))


def crossentropy(**settings: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def with_layers(*makes: Callable[[], Any], optimizer: Any = None, loss: Any = "mse", **compiled: Any) -> Build:
    """Return a model function of a Dense layer, other layers and a last Dense layer.

    Args:
        *makes: Each makes a layer.
        optimizer: Makes the optimizer; SGD by default.
        loss: The loss of the model.
        **compiled: Further arguments of `compile`.
    """

    def build() -> keras.Model:
        hidden = [keras.layers.Dense(4, "tanh"), *(make() for make in makes), keras.layers.Dense(NUM_FEATURES)]
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), *hidden])
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.05), loss, **compiled)
        return model

    return build


class Applies(keras.layers.Layer):
    """A layer with the `call` of a test.

    Args:
        function: Takes the inputs, whether the model trains, and the layer.
        **attributes: Of the layer, such as other layers and generators of random numbers.
    """

    def __init__(self, function: Callable[[Any, Any, Any], Any], dtype: Any = None, **attributes: Any) -> None:
        super().__init__(name="tested", dtype=dtype)
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.function(inputs, training, self)
