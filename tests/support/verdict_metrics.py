"""Metrics, and scalars that code of the user counts in them: do the states of parts of a batch add up?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.support.verdict_losses import alike, means, positive
from tests.support.verdicts import (
    CLASSIFICATION,
    EQUAL,
    INPUTS,
    NUM_EXAMPLES,
    NUM_FEATURES,
    VALUES,
    Applies,
    Build,
    Case,
    Refused,
    Verdict,
    batches,
    both,
    crossentropy,
    refused,
    with_layers,
)

# --- metrics of the user ----------------------------------------------------------------------------------------------


def precision(targets: Any, outputs: Any) -> Any:
    found = ops.round(ops.clip(outputs, 0, 1))
    return ops.sum(targets * found) / (ops.sum(found) + 1e-7)


def retrieved(targets: Any, outputs: Any) -> Any:
    scores = ops.matmul(outputs, ops.transpose(outputs))
    return ops.cast(ops.argmax(scores, -1) == ops.arange(ops.shape(outputs)[0]), "float32")


def total(targets: Any, outputs: Any) -> Any:
    return ops.sum(ops.square(targets - outputs))


class State(keras.Metric):
    """A metric whose last number is its result.

    Args:
        change: Returns the numbers after an update from those before it and the errors of a batch.
        **settings: Of the variable.
    """

    def __init__(self, change: Callable[[Any, Any], Any], shape: tuple[int, ...] = (1,), **settings: Any) -> None:
        super().__init__(name="state")
        self.change, self.numbers = change, self.add_variable(shape, "zeros", name="numbers", **settings)

    def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.numbers.assign(self.change(self.numbers, ops.abs(targets - outputs)))

    def result(self) -> Any:
        return self.numbers[-1]


class Confusion(keras.Metric):
    """Counts pairs of classes; labels that are no class are an error."""

    def __init__(self) -> None:
        super().__init__(name="confusion")
        self.counts = self.add_weight(shape=(4, 4), initializer="zeros", name="counts")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        labels, classes = ops.reshape(y_true, [-1]), ops.argmax(y_pred, -1)
        self.counts.assign_add(tf.math.confusion_matrix(labels, classes, 4, dtype=self.counts.dtype))

    def result(self) -> Any:
        return tf.linalg.trace(tf.convert_to_tensor(self.counts))


def sum_and_batches(before: Any, errors: Any) -> Any:
    return before + ops.stack([1e8 * ops.sum(errors), ops.ones((), errors.dtype)])


def with_metric(make: Callable[[], Any], activation: str | None = None, width: int = NUM_FEATURES) -> Build:
    return lambda: alike("mse", activation, (width,), metrics=[make()])()


RARE = (np.arange(NUM_EXAMPLES) % 9 == 8).astype("float64")[:, None]  # none of the first examples
METRICS = {
    "precision as a function": Case(
        with_metric(lambda: precision, "sigmoid", 1),
        both(EQUAL),
        batches(INPUTS, RARE),
    ),
    "sum of errors": Case(with_metric(lambda: State(lambda s, errors: s + ops.sum(errors))), both(EQUAL)),
    "largest error": Case(
        with_metric(lambda: State(lambda s, errors: ops.maximum(s, ops.max(errors)))),
        {"mirrored": EQUAL, "pipelines": EQUAL, "pipeline": EQUAL},
    ),
    "last mean": Case(
        with_metric(lambda: State(lambda s, errors: ops.mean(errors)[None])),
        both(EQUAL),
    ),
    "number of batches beside a large sum": Case(with_metric(lambda: State(sum_and_batches, (2,))), both(EQUAL)),
    "function that compares": Case(with_layers(metrics=[retrieved]), both(EQUAL)),
    "function that sums": Case(
        with_layers(metrics=[total]),
        both(EQUAL) | {"one micro-batch": EQUAL},
    ),
    "means of outputs": Case(with_metric(lambda: means), both(EQUAL)),
    "Pearson over the batch": Case(
        with_metric(lambda: keras.metrics.PearsonCorrelation(axis=0)),
        both(EQUAL),
    ),
    "cosine over the batch": Case(with_metric(lambda: keras.metrics.CosineSimilarity(axis=0)), both(EQUAL)),
    "number of batches, of the first replica": Case(
        with_metric(lambda: State(lambda s, errors: s + 1.0, aggregation="only_first_replica")), {"mirrored": EQUAL}
    ),
    "fails on labels that are no class": Case(
        lambda: alike(crossentropy(), metrics=[Confusion()])(), both(EQUAL), CLASSIFICATION
    ),
    "some values": Case(with_metric(lambda: positive), both(EQUAL), batches(INPUTS, np.clip(VALUES, -1, 1))),
}


# --- scalars that are counted in a metric -----------------------------------------------------------------------------

SCALARS: dict[str, Callable[[Any], Any]] = {"mean": ops.mean, "sum": ops.sum, "largest": ops.max}


class Counts(keras.Model):
    """Counts a scalar of the squared errors in a metric of its own."""

    def __init__(self, metric: type[keras.Metric], scalar: str) -> None:
        super().__init__()
        self.dense, self.last = layers.Dense(4), layers.Dense(NUM_FEATURES)
        self.counter, self.scalar = metric(name="counted"), SCALARS[scalar]

    def call(self, inputs: Any) -> Any:
        return self.last(self.dense(inputs))


class InLoss(Counts):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        self.counter.update_state(self.scalar(ops.square(y - y_pred)))
        return ops.mean(ops.square(y - y_pred))


class InMetrics(Counts):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.counter.update_state(self.scalar(ops.square(y - y_pred)))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def by_model(kind: type[Counts], metric: type[keras.Metric], scalar: str, verdict: dict[str, Verdict]) -> Case:
    def build() -> keras.Model:
        model = kind(metric, scalar)
        model.compile("sgd", "mse")
        return model

    return Case(build, verdict)


def by_layer(metric: type[keras.Metric], function: Callable[[Any], Any], verdict: dict[str, Verdict]) -> Case:
    def call(inputs: Any, training: Any, layer: Any) -> Any:
        layer.counter.update_state(function(inputs))
        return inputs

    return Case(with_layers(lambda: Applies(call, counter=metric(name="counted"))), verdict)


class OverridesMetrics(keras.Sequential):
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().compute_metrics(x, y, y_pred, sample_weight)


class CountsLossByWeight(layers.Layer):
    """Counts a loss of the whole batch, which is neither a sum nor a mean of its values for parts."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        self.counter = keras.metrics.Mean(name="counted")

    def call(self, inputs: Any) -> Any:
        self.counter.update_state(self.loss(ops.zeros_like(inputs[:, :1]), inputs[:, :1], ops.abs(inputs[:, 1])))
        return inputs


def counts_loss_by_weight() -> keras.Model:
    model = OverridesMetrics([keras.Input((NUM_FEATURES,)), CountsLossByWeight(), layers.Dense(NUM_FEATURES)])
    model.compile("sgd", "mse")
    return model


Mean, Sum = keras.metrics.Mean, keras.metrics.Sum
COUNTED_SCALARS = {
    "sum in compute_loss": by_model(InLoss, Sum, "sum", both(EQUAL)),
    "mean of compute_loss in a Sum": by_model(InLoss, Sum, "mean", both(EQUAL)),
    "mean in compute_loss": by_model(InLoss, Mean, "mean", both(EQUAL)),
    "sum of compute_loss in a Mean": by_model(InLoss, Mean, "sum", both(EQUAL)),
    "largest of compute_loss": by_model(InLoss, Sum, "largest", both(EQUAL)),
    "sum in compute_metrics": by_model(InMetrics, Sum, "sum", both(EQUAL)),
    "mean in compute_metrics": by_model(InMetrics, Mean, "mean", both(EQUAL)),
    "mean of compute_metrics in a Sum": by_model(InMetrics, Sum, "mean", both(EQUAL)),
    "sum of compute_metrics in a Mean": by_model(InMetrics, Mean, "sum", both(EQUAL)),
    "largest of compute_metrics": by_model(InMetrics, Sum, "largest", both(EQUAL)),
    "loss in a layer, beside compute_metrics": Case(counts_loss_by_weight, {"mirrored": EQUAL}),
}
SCALARS_OF_LAYERS = {
    "mean": by_layer(Mean, lambda inputs: ops.mean(ops.square(inputs)), both(EQUAL)),
    "sum in a Mean": by_layer(Mean, ops.sum, refused(r"keras\.metrics\.Mean.*'counted' counts a sum")),
    "mean in a Sum": by_layer(Sum, ops.mean, refused(r"keras\.metrics\.Sum.*'counted' counts a mean")),
    "deviation": by_layer(Mean, ops.std, refused("A scalar that a layer counts .* sum or a mean")),
    "sum": by_layer(Sum, lambda inputs: ops.sum(ops.abs(inputs)), both(EQUAL)),
    "constant": by_layer(Mean, lambda inputs: 0.25, both(EQUAL)),
    "number of calls": by_layer(Sum, lambda inputs: 1.0, both(EQUAL)),
}


# --- metrics beside those that read scores in shards: any metric counts as on one device ------------------------------

NUM_SCORES = 21


class Numbers(keras.Metric):
    """The number of examples, in a variable that each subclass changes in another way."""

    def __init__(self) -> None:
        super().__init__(name="numbers")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.add(keras.ops.cast(tf.shape(y_true)[0], self.total.dtype))

    def add(self, number: Any) -> None:
        self.total.assign_add(number)

    def result(self) -> Any:
        return self.total + 0


class InPython(Numbers):
    """Counts in Python, as the scores of scikit-learn are counted."""

    def add(self, number: Any) -> None:
        found = tf.numpy_function(lambda value: value, [number], number.dtype)
        found.set_shape(())
        self.total.assign_add(found)


class Scattered(Numbers):
    """Adds to an element of a variable that is none of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.own = tf.Variable(np.zeros(2))

    def add(self, number: Any) -> None:
        self.own.scatter_add(tf.IndexedSlices(number[None], [1]))

    def result(self) -> Any:
        return tf.reduce_sum(self.own)

    def reset_state(self) -> None:
        self.own.assign([0.0, 0.0])


class NotesLabels(keras.Model):
    """Its `compute_metrics` notes the largest label in a weight that belongs to no metric."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        noted = self.get_layer("notes").noted
        noted.assign(keras.ops.maximum(noted, keras.ops.max(keras.ops.cast(y, noted.dtype))))
        return super().compute_metrics(x, y, y_pred, sample_weight)


class Notes(layers.Layer):
    """Has a weight that others change."""

    def build(self, shape: Any) -> None:
        self.noted = self.add_weight(shape=(), initializer="zeros", trainable=False, name="noted")

    def call(self, inputs: Any) -> Any:
        return inputs


def scores(kind: type[keras.Model] = keras.Model, metric: type[keras.Metric] | None = None) -> Build:
    def build() -> keras.Model:
        inputs = keras.Input((NUM_FEATURES,))
        hidden = Notes(name="notes")(layers.Dense(7, "tanh")(inputs))
        model = kind(inputs, layers.Dense(NUM_SCORES, name="classes")(hidden))
        model.compile("sgd", crossentropy(), metrics=["accuracy", *([metric()] if metric else [])])
        return model

    return build


BESIDE_SCORES = {
    name: Case(scores(metric=kind), {"stages of shards": EQUAL}, CLASSIFICATION, dtype="float64")
    for name, kind in {"in Python": InPython, "scattered": Scattered}.items()
}
BESIDE_SCORES["another state of compute_metrics"] = Case(
    scores(NotesLabels),
    {
        "stages of shards": EQUAL,
        "pipelines of shards": Refused(r"changes 'notes/noted', which belongs to no metric\. Use add_variable"),
    },
    CLASSIFICATION,
    dtype="float64",
)

FAMILIES: dict[str, dict[str, Case]] = {
    "a metric": METRICS,
    "a scalar in a metric": COUNTED_SCALARS,
    "a scalar of a layer in a metric": SCALARS_OF_LAYERS,
    "a metric beside scores in shards": BESIDE_SCORES,
}
