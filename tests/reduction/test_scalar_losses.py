"""Loss and metric functions that return a scalar: trained exactly where it is a mean or a sum over the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers, ops

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def cross_entropies(targets: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def mean(targets: Any, outputs: Any) -> Any:
    return ops.mean(cross_entropies(targets, outputs))


def total(targets: Any, outputs: Any) -> Any:
    return 0.1 * ops.sum(cross_entropies(targets, outputs))


def root(targets: Any, outputs: Any) -> Any:
    return ops.sqrt(mean(targets, outputs))


def contrast(targets: Any, outputs: Any) -> Any:
    """Compares with the whole batch, which it gathers."""
    return mean(targets, outputs) + 0.1 * ops.std(tfpar.gather(outputs))


class Mean(keras.losses.Loss):
    def call(self, targets: Any, outputs: Any) -> Any:
        return mean(targets, outputs)


def with_loss(loss: Any, **compiled: Any) -> Callable[[], keras.Model]:
    return parity_cases.classifier(loss=lambda: loss, **compiled)


def mean_accuracy(targets: Any, outputs: Any) -> Any:
    return ops.mean(
        ops.cast(ops.equal(ops.cast(ops.argmax(outputs, -1), "int64"), ops.cast(targets, "int64")), "float32")
    )


def two_outputs() -> keras.Model:
    model = parity_cases.two_outputs(as_dict=True)()
    losses = {"kind": mean, "size": lambda targets, outputs: ops.sum(ops.abs(targets - outputs))}
    model.compile(keras.optimizers.Adam(0.01), losses, loss_weights={"kind": 0.3, "size": 2.0})
    return model


def half_scalar() -> keras.Model:
    model = parity_cases.two_outputs(as_dict=False)()
    model.compile(keras.optimizers.Adam(0.01), [cross_entropies, lambda y, p: ops.mean(ops.square(y - p))])
    return model


def pipeline() -> tfpar.Strategy:
    return tfpar.Pipeline(2, 3, balance="parameters")


EXACT: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], Any]] = {
    "mean": (with_loss(mean), small.data, "mirrored"),
    "sum": (with_loss(total), small.data, "mirrored"),
    "subclass": (with_loss(Mean()), small.data, "mirrored"),
    "no reduction": (with_loss(Mean(reduction=None)), small.data, "mirrored"),
    "the batch gathered": (with_loss(contrast), small.data, "mirrored"),
    "metric": (with_loss(mean, metrics=[mean_accuracy]), small.data, "mirrored"),
    "two outputs": (two_outputs, parity_cases.two_outputs_data(as_dict=True), "mirrored"),
    "one of two outputs": (half_scalar, parity_cases.two_outputs_data(as_dict=False), "mirrored"),
    "mean in a pipeline": (with_loss(mean), lambda: parity_cases.batches(70, 7), pipeline),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", EXACT)
def test_a_scalar_equals_one_device(name: str) -> None:
    build, dataset, strategy = EXACT[name]
    small.assert_trains_as_one_device(build, dataset, small.STRATEGIES.get(strategy, strategy))


def test_a_scalar_equals_one_device_where_replicas_have_the_same_examples() -> None:
    small.assert_trains_as_one_device(
        with_loss(mean, metrics=[mean_accuracy]),
        lambda: parity_cases.batches(11, 2),
        lambda: tfpar.Mirrored(["CPU:0", "CPU:1", "CPU:2"]),
    )


def masked() -> keras.Model:
    model = parity_cases.sequence_model()
    model.compile("sgd", lambda targets, outputs: ops.mean(ops.square(targets - outputs)))
    return model


REFUSED: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any], str]] = {
    "neither sum nor mean": (
        with_loss(root),
        small.data,
        "loss function that returns a scalar must be a sum or a mean .* replicas or micro-batches",
    ),
    "sample weights": (with_loss(mean), lambda: parity_cases.weighted(16, 8), "weights or masks, received a scalar"),
    "mask": (masked, parity_cases.sequence_data, "weights or masks, received a scalar"),
    "metric that sums": (with_loss(mean, metrics=[total]), small.data, "must average over the batch .* this one sums"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
def test_scalars_that_cannot_be_reduced_are_refused(name: str, strategy: Callable[[], tfpar.Strategy]) -> None:
    build, dataset, message = REFUSED[name]
    trainer = tfpar.Trainer(build, strategy())
    with pytest.raises(ValueError, match=message):
        trainer.fit(dataset(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0


def test_layers_and_scalars_add_up() -> None:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4), parity_cases.CallsLoss(), layers.Dense(3)])
        model.compile("sgd", mean)
        return model

    small.assert_trains_as_one_device(build, small.data)


def test_a_scalar_equals_one_device_eagerly() -> None:
    small.assert_trains_as_one_device(with_loss(mean, run_eagerly=True), lambda: small.data().take(3), epochs=1)


# --- one micro-batch, which is the batch ------------------------------------------------------------------------------


class Contrast(keras.losses.Loss):
    """Compares all examples of the batch, in place of Keras' own reduction."""

    def __call__(self, targets: Any, outputs: Any, sample_weight: Any = None) -> Any:
        return mean(targets, outputs) + 0.1 * ops.mean(ops.abs(ops.matmul(outputs, ops.transpose(outputs))))


class LargestLoss(keras.Sequential):
    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        return ops.max(cross_entropies(y, y_pred)) + ops.sqrt(mean(y, y_pred))


class AddsRoot(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.sqrt(ops.mean(ops.square(inputs))))
        return inputs


def largest() -> keras.Model:
    model = LargestLoss(parity_cases.classifier()().layers)
    model.compile("sgd")
    return model


def adds_root() -> keras.Model:
    hidden = [layers.Dense(4), AddsRoot(), layers.Dense(parity_cases.NUM_CLASSES)]
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), *hidden])
    model.compile("sgd", mean)
    return model


def weighted() -> Any:
    return parity_cases.weighted(37, 8)


OF_ONE_MICROBATCH: dict[str, tuple[Callable[[], keras.Model], Callable[[], Any]]] = {
    "own call": (with_loss(Contrast()), small.data),
    "circle": (parity_cases.classifier(lambda: keras.optimizers.SGD(1e-4), keras.losses.Circle), small.data),
    "neither sum nor mean": (with_loss(root, metrics=[total]), small.data),
    "sample weights": (with_loss(mean), weighted),
    "mask": (masked, parity_cases.sequence_data),
    "compute_loss": (largest, small.data),
    "added loss": (adds_root, small.data),
}


def one_microbatch() -> tfpar.Strategy:
    return tfpar.Pipeline(2, 1, balance="parameters")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", OF_ONE_MICROBATCH)
def test_any_loss_of_one_micro_batch_equals_one_device(name: str) -> None:
    small.assert_trains_as_one_device(*OF_ONE_MICROBATCH[name], one_microbatch)
