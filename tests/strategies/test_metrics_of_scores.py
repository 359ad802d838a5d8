"""Metrics beside those that read scores in pieces, in stages of shards: any metric counts as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in

pytestmark = pytest.mark.usefixtures("logical_cpus")
FEATURES, CLASSES = 6, 21
# Batches of 3, 3 and 1 example: the second micro-batch of the last one has none.
NUM_EXAMPLES, BATCH, NUM_MICROBATCHES = 7, 3, 2


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


class Counted(keras.metrics.Metric):
    """The number of examples."""

    def __init__(self) -> None:
        super().__init__(name="counted")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.add(keras.ops.cast(tf.shape(y_true)[0], self.total.dtype))

    def add(self, number: Any) -> None:
        self.total.assign_add(number)

    def result(self) -> Any:
        return self.total + 0


class Largest(Counted):
    """The largest score, which does not add up over micro-batches."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(keras.ops.maximum(self.total, keras.ops.cast(keras.ops.max(y_pred), self.total.dtype)))


class InPython(Counted):
    """Counts in Python, as the scores of scikit-learn are counted."""

    def add(self, number: Any) -> None:
        found = tf.numpy_function(lambda one: one, [number], number.dtype)
        found.set_shape(())
        self.total.assign_add(found)


class BehindKeras(Counted):
    """Assigns the TensorFlow variable of a Keras variable."""

    def add(self, number: Any) -> None:
        self.total.value.assign_add(number)


class OfTensorFlow(Counted):
    """Has a variable that is none of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.own = tf.Variable(np.zeros(2))

    def add(self, number: Any) -> None:
        self.own.assign_add([number, 0.0])

    def result(self) -> Any:
        return tf.reduce_sum(self.own)

    def reset_state(self) -> None:
        self.own.assign([0.0, 0.0])


class Scattered(OfTensorFlow):
    """Adds to an element of such a variable."""

    def add(self, number: Any) -> None:
        self.own.scatter_add(tf.IndexedSlices(number[None], [1]))


METRICS = (Counted, Largest, InPython, BehindKeras, OfTensorFlow, Scattered)


class Seen(keras.layers.Layer):
    """Holds a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, inputs: Any) -> Any:
        self.seen.update_state(keras.ops.ones_like(inputs[:, 0]))
        return inputs


class NotesLabels(keras.Model):
    """Its `compute_metrics` notes the largest label in a weight that belongs to no metric."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        noted = self.get_layer("notes").noted
        noted.assign(keras.ops.maximum(noted, keras.ops.max(keras.ops.cast(y, noted.dtype))))
        return super().compute_metrics(x, y, y_pred, sample_weight)


class Notes(keras.layers.Layer):
    """Has a weight that others change."""

    def build(self, shape: Any) -> None:
        self.noted = self.add_weight(shape=(), initializer="zeros", trainable=False, name="noted")

    def call(self, inputs: Any) -> Any:
        return inputs


def model_with(layer: Any, kind: type[keras.Model], metrics: list[Any]) -> keras.Model:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(7, "tanh")(inputs)
    hidden = hidden if layer is None else layer(hidden)
    model = kind(inputs, keras.layers.Dense(CLASSES, name="classes")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy", *metrics])
    return model


def logs_and_state(build: Any, strategy: tfpar.Strategy) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    inputs, labels = random.normal(size=(NUM_EXAMPLES, FEATURES)), random.integers(1, CLASSES, NUM_EXAMPLES)
    trainer = tfpar.Trainer(build, strategy, seed=0)
    history = trainer.fit(inputs, labels, BATCH, shuffle=False, verbose=0).history
    after_fit = [variable.numpy() for variable in trainer.model.non_trainable_variables]
    logs = trainer.evaluate(inputs, labels, BATCH, verbose=0, return_dict=True)
    return history, logs, after_fit


@pytest.mark.parametrize(
    "build",
    [
        *(lambda metric=metric: model_with(None, keras.Model, [metric()]) for metric in METRICS),
        lambda: model_with(Seen(), keras.Model, []),
        lambda: model_with(Notes(name="notes"), NotesLabels, []),
    ],
    ids=["counted", "largest", "python", "behind", "tensorflow", "scattered", "in a layer", "compute_metrics"],
)
def test_a_metric_counts_as_on_one_device(build: Any) -> None:
    strategy = tfpar.Pipeline(2, NUM_MICROBATCHES, num_shards=2)
    found, expected = logs_and_state(build, strategy), logs_and_state(build, tfpar.SingleDevice())
    keras.tree.map_structure(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9), found, expected)


def test_replicas_refuse_a_metric_that_changes_another_state() -> None:
    def build() -> keras.Model:
        return model_with(Notes(name="notes"), NotesLabels, [])

    strategy = tfpar.Hybrid(tfpar.Pipeline(1, NUM_MICROBATCHES, num_shards=2), num_replicas=2)
    with pytest.raises(ValueError, match=r"changes 'notes/noted', which is none of a metric\. Use add_variable"):
        logs_and_state(build, strategy)
