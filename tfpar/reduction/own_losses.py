"""The value of an overridden `compute_loss` for parts of a batch, in the trials before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model
from tfpar.reduction.sum_or_mean import parts_of


@contextlib.contextmanager
def failing_on(num_examples: int) -> Iterator[None]:
    """Say of an error of TensorFlow in a loss on how many examples it fails, such as the mean of the k largest."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if sentence := data.label_out_of_range(error.message):
            raise ValueError(sentence) from None
        reason = error.message.partition("} ")[2] or error.message
        raise ValueError(
            "With several replicas or micro-batches a loss must run on any number of examples, and this one fails on "
            f"{num_examples} of the first batch: {reason.partition(' [Op:')[0]}. Mend the loss or the targets, or "
            "train on SingleDevice()."
        ) from None


def parts_that_run(model: keras.Model, batch: Any, call: Callable[..., Any], training: bool) -> tuple[Any, Any, Any]:
    """Return parts as `parts_of`, the first of them an example whose loss can be computed alone.

    An image without boxes may have no loss alone, but has one in a batch with others, which pads its targets.

    Args:
        model: A built and compiled model.
        batch: Its first batch.
        call: Calls the model.
        training: The argument `training` of `compute_loss`.

    Raises:
        ValueError: If no example has one, or `compute_loss` returns no scalar or divides by masks or weights.
    """
    some = parts_of(batch)[2]
    for start in range(int(data.num_rows(some))):
        parts = parts_of(_from(some, start))
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            check_own_weights(model, parts[0], call, training)
            return parts
    with failing_on(1):
        check_own_weights(model, parts[0], call, training)
    return parts


def _from(batch: Any, start: int) -> Any:
    """Return the examples from one on, and then those before it."""
    if not start:
        return batch
    return data.join_batches([data.take_rows(batch, start, int(data.num_rows(batch))), data.take_rows(batch, 0, start)])


def own_loss(model: keras.Model, batch: Any, call: Callable[..., Any], training: bool) -> list[float]:
    """Return the value of an overridden `compute_loss`.

    Args:
        model: A built and compiled model.
        batch: Some examples.
        call: Calls the model.
        training: The argument `training` of `compute_loss`.
    """
    return [scalar(model, loss_of(model, batch, call, training)())]


def scalar(model: keras.Model, loss: Any) -> float:
    """Return the value of an overridden `compute_loss`, and refuse one that is no scalar.

    Raises:
        ValueError: If it has a value for each example.
    """
    value = tf.convert_to_tensor(loss)
    if value.shape.rank:
        raise ValueError(
            f"On replicas and in micro-batches {type(model).__name__}.compute_loss must return a scalar, and returned "
            f"values of shape {tuple(value.shape)}. Average them over the batch, with a `reduction` of the loss or "
            "with keras.ops.mean."
        )
    return float(value)


def loss_of(model: keras.Model, batch: Any, call: Callable[..., Any], training: bool) -> Callable[[], Any]:
    """Call a model, and return a function that computes its loss from the outputs; arguments as for `own_loss`."""
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = call(model, inputs, training=False)
    return lambda: keras_model.compute_loss(model, inputs, targets, outputs, weights, training)


def check_own_weights(model: keras.Model, batch: Any, call: Callable[..., Any], training: bool) -> None:
    """Refuse losses in an overridden `compute_loss` that are divided by masks or sample weights.

    Such a loss needs their sum over the whole batch, which `compute_loss` cannot receive. The check reads the
    arguments of the losses and not their values: the first batch may have nothing to mask.

    Args:
        model: A built and compiled model.
        batch: Some examples.
        call: Calls the model.
        training: The argument `training` of `compute_loss`.

    Raises:
        ValueError: If there is such a loss.
    """

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
        by_weight = reduction == "mean_with_sample_weight" and sample_weight is not None
        if reduction not in (None, "none", "sum") and (by_weight or mask is not None):
            what = f"the weights of reduction={reduction!r}" if by_weight else "a mask"
            raise ValueError(
                "With several replicas or micro-batches, the losses of a model that overrides compute_loss are divided "
                f"by the number of examples, received {what} as the divisor in {type(model).__name__}. Do not override "
                "compute_loss, or train on SingleDevice()."
            )
        return keras_losses.reduce_weighted_values(values, sample_weight, mask, reduction, dtype)

    with keras_losses.every_loss_reduction(reduce, keras_losses.aggregate_added_loss):
        own_loss(model, batch, call, training)
