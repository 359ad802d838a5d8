"""Loss objects that a loss or a metric of `compile` calls: reduced as in Keras, over the examples at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import ops

import tfpar
from tests.support import parity_cases, small
from tests.support.extent import sampled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def inner(targets: Any, outputs: Any, reduction: str | None, sample_weight: Any = None) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    return loss(targets, outputs, sample_weight=sample_weight)


def is_counted(targets: Any) -> Any:
    return ops.cast(targets > 0, "float32")


def masked(targets: Any, outputs: Any) -> Any:
    """Returns a value for each example, as the losses of translation models do for each token."""
    return inner(targets, outputs, None) * is_counted(targets)


def mean_over_mask(targets: Any, outputs: Any) -> Any:
    """Divides by a mask, as the losses of models for named entities do."""
    return ops.sum(masked(targets, outputs)) / ops.sum(is_counted(targets))


class Own(keras.losses.Loss):
    """Calls a function, which calls losses."""

    def __init__(self, function: Callable[[Any, Any], Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.function = function

    def call(self, targets: Any, outputs: Any) -> Any:
        return self.function(targets, outputs)


def with_loss(loss: Any, **compiled: Any) -> Callable[[], keras.Model]:
    return parity_cases.classifier(loss=lambda: loss, **compiled)


def metric(targets: Any, outputs: Any) -> Any:
    return inner(targets, outputs, "mean")


def metric_of_examples(targets: Any, outputs: Any) -> Any:
    return inner(targets, outputs, "none")


EXACT: dict[str, Callable[[], keras.Model]] = {
    "no reduction": with_loss(masked),
    "no reduction in a class": with_loss(Own(masked, reduction="mean_with_sample_weight")),
    "named none": with_loss(lambda y, p: inner(y, p, "none")),
    "a loss in a loss in a loss": with_loss(Own(Own(masked, reduction=None))),
    "mean": with_loss(lambda y, p: inner(y, p, "sum_over_batch_size") + 0.1 * inner(y, p, "mean")),
    "mean by weight without weights": with_loss(Own(lambda y, p: inner(y, p, "mean_with_sample_weight"))),
    "sum": with_loss(Own(lambda y, p: 0.1 * inner(y, p, "sum"))),
    "weights": with_loss(lambda y, p: inner(y, p, "mean", sample_weight=is_counted(y))),
    "metrics": with_loss(masked, metrics=[metric, metric_of_examples]),
}


def pipeline() -> tfpar.Strategy:
    return tfpar.Pipeline(2, 3, balance="parameters")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", sampled(EXACT, of_ci=["no reduction", "mean", "sum", "metrics"]))
def test_a_loss_in_a_loss_equals_one_device(name: str) -> None:
    small.assert_trains_as_one_device(EXACT[name], small.data)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", sampled(EXACT, of_ci=["no reduction in a class", "mean"]))
def test_a_loss_in_a_loss_in_a_pipeline_equals_one_device(name: str) -> None:
    small.assert_trains_as_one_device(EXACT[name], lambda: parity_cases.batches(70, 7), pipeline)


def test_sample_weights_and_a_loss_in_a_loss_equal_one_device() -> None:
    small.assert_trains_as_one_device(with_loss(Own(masked)), lambda: parity_cases.weighted(37, 8))


SCALAR = "must be a sum or a mean over the batch"
REFUSED: dict[str, tuple[Any, str]] = {
    "mask as divisor": (mean_over_mask, SCALAR),
    "mask as divisor in a class": (Own(mean_over_mask), SCALAR),
    "weights as divisor": (lambda y, p: inner(y, p, "mean_with_sample_weight", is_counted(y)), SCALAR),
    "root of a mean": (lambda y, p: ops.sqrt(inner(y, p, "mean")), SCALAR),
    "mean beside values": (lambda y, p: masked(y, p) + inner(y, p, "mean"), "must not depend on the others"),
    "none in compile": (Own(masked, reduction=None), "a loss needs a reduction, received reduction=None"),
}


@pytest.mark.parametrize("strategy", [small.STRATEGIES["mirrored"], pipeline], ids=["mirrored", "pipeline"])
@pytest.mark.parametrize("name", sampled(REFUSED, of_ci=["mask as divisor", "root of a mean", "none in compile"]))
def test_losses_in_losses_that_cannot_be_reduced_are_refused(name: str, strategy: Callable[[], tfpar.Strategy]) -> None:
    loss, message = REFUSED[name]
    trainer = tfpar.Trainer(with_loss(loss), strategy())
    with pytest.raises(ValueError, match=message):
        trainer.fit(small.data(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0
