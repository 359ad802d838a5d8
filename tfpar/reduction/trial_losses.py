"""Losses and scalar metrics of parts of a batch, for the trials before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_losses_in_call, keras_metrics, keras_model
from tfpar.reduction.losses import ONE_VALUE, WAY_OUT, dense_losses
from tfpar.reduction.losses_in_call import PartTrial
from tfpar.reduction.own_losses import failing_on, loss_of, scalar
from tfpar.reduction.sum_or_mean import Kind, kinds_of
from tfpar.reduction.whole_batch import Trial

_OF_OWN_LOSS = (
    "Let it return a mean over the examples, or train on SingleDevice(). With Mirrored it may compare the rows that "
    "tfpar.gather returns."
)


def check_divisible(model: keras.Model) -> None:
    """Refuse losses of a batch that cannot be computed from its parts.

    Raises:
        ValueError: If a loss object overrides `__call__` or compares the examples of a batch.
    """
    for loss in keras_losses.flat_losses(model):
        if isinstance(loss, keras.losses.Circle):
            raise ValueError(
                "keras.losses.Circle compares all examples of a batch, and a replica or micro-batch sees only a part. "
                "Train on SingleDevice()."
            )
        if isinstance(loss, keras.losses.Loss) and type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(
                "With several replicas or micro-batches the Loss class of Keras must average over the batch, and "
                f"{type(loss).__name__} overrides __call__. Override `call` and return one value per example."
            )


def added_losses(model: keras.Model, batch: Any, training: bool, call: Callable[..., Any]) -> list[float]:
    """Return the losses that the layers of a model add.

    Args:
        model: A built and compiled model.
        batch: Some examples, `(inputs, targets, sample_weight)` as far as given.
        training: The argument `training` of the model's call.
        call: Calls the model.
    """
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    added: list[Any] = []
    with keras_losses.collect_added_losses(lambda: added):
        call(model, inputs, training=training)
    return [float(tf.reduce_sum(loss)) for loss in added]


def check_shapes(
    model: keras.Model, parts: Sequence[Any], call: Callable[..., Any], training: bool
) -> list[tuple[int, ...]]:
    """Return the shapes of the losses of `compile`, in their order.

    Args:
        model: A built and compiled model.
        parts: Two parts of a batch of different sizes.
        call: Calls the model; only the shapes of its outputs count.
        training: The argument `training` of an overridden `compute_loss`.

    Raises:
        ValueError: If the number of values per example depends on the number of examples.
    """
    shapes: list[list[tuple[int, ...]]] = [[], []]
    for part, seen in zip(parts, shapes, strict=True):
        num_rows = int(data.num_rows(part))

        def note(
            values: tf.Tensor, sample_weight: Any, mask: Any, seen: list[Any] = seen, num_rows: int = num_rows
        ) -> None:
            seen.append(tuple(values.shape))
            if values.shape[:1] != (num_rows,) and not keras_model.overridden(model, "compute_loss"):
                check_unweighted(values, sample_weight, mask)

        _note_losses(model, part, call, training, note)
    for of_few, of_all in zip(*shapes, strict=True):
        if of_few[1:] != of_all[1:]:
            raise ValueError(f"{ONE_VALUE}, and this one returned values of shapes {of_few} and {of_all}. {WAY_OUT}")
    return shapes[0]


def check_unweighted(values: tf.Tensor, sample_weight: Any, mask: Any) -> None:
    """Refuse sample weights and masks for values of a whole batch: Keras would multiply a scalar by their mean."""
    if sample_weight is not None or mask is not None:
        received = f"values of shape {tuple(values.shape)}" if values.shape.rank else "a scalar"
        raise ValueError(f"{ONE_VALUE} where there are sample weights or masks, received {received}. {WAY_OUT}")


def _note_losses(
    model: keras.Model,
    part: Any,
    call: Callable[..., Any],
    training: bool,
    note: Callable[[tf.Tensor, Any, Any], None],
) -> None:
    """Call a function with the values, weights and mask of each loss of `compile`."""

    def note_dense(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> tf.Tensor:
        dense = dense_losses(values, reduction)
        # Ragged values are summed, and the longest row of a part may be shorter than that of the batch.
        is_ragged = isinstance(values, tf.RaggedTensor)
        note(tf.reduce_sum(dense, list(range(1, dense.shape.rank))) if is_ragged else dense, sample_weight, mask)
        return dense

    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(part)
    outputs = call(model, inputs, training=False)
    with losses_noted(note_dense), failing_on(int(data.num_rows(part))):
        keras_model.compute_loss(model, inputs, targets, outputs, weights, training)


@contextlib.contextmanager
def losses_noted(note: Callable[[Any, Any, Any, str | None], tf.Tensor]) -> Iterator[None]:
    """Call a function with each loss of `compile` that is computed inside this context; all losses are zero.

    Args:
        note: Takes values, sample weight, mask and reduction, and returns the values as a tensor.
    """

    def reduce(values: Any, sample_weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
        return tf.zeros((), note(values, sample_weight, mask, reduction).dtype)

    def nothing(model: keras.Model, loss: Any) -> tf.Tensor:
        return tf.zeros((), tf.convert_to_tensor(loss).dtype)

    with keras_losses.loss_reduction(reduce, nothing):
        yield


def scalar_kinds(
    model: keras.Model, parts: Sequence[Any], call: Callable[..., Any], trial: Trial | PartTrial | None
) -> list[Kind | None]:
    """Return the kind of each scalar loss of `compile`, None for the others, in their order.

    Args:
        model: A built and compiled model.
        parts: One example, some others, all of them.
        call: Runs the model.
        trial: As for `tfpar.reduction.sum_or_mean.kinds_of`.
    """
    is_scalar: list[bool] = []

    def scalars(model: keras.Model, part: Any) -> list[float]:
        is_scalar.clear()
        found: list[float] = []

        def note(values: tf.Tensor, *others: Any) -> None:
            is_scalar.append(values.shape.rank == 0)
            found.extend([float(values)] if is_scalar[-1] else [])

        _note_losses(model, part, call, False, note)
        return found

    kinds = iter(kinds_of(model, parts, scalars, "A loss function that returns a scalar", trial))
    return [(next(kinds) or "mean") if one else None for one in is_scalar]


def scalar_metrics(model: keras.Model, part: Any, call: Callable[..., Any]) -> list[float]:
    """Return the scalars that metric functions return.

    Args:
        model: A built and compiled model.
        part: Some examples.
        call: Runs the model.
    """
    found: list[float] = []
    if keras_metrics.counts_metrics(model):
        count = metrics_of(model, part, call)
        with keras_losses_in_call.scalars_weighted(lambda value: found.append(float(value))):
            count()
    return found


def metrics_of(model: keras.Model, part: Any, call: Callable[..., Any]) -> Callable[[], None]:
    """Call a model, and return a function that computes its metrics from the outputs.

    Args:
        model: A built and compiled model.
        part: Some examples.
        call: Calls the model.
    """
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(part)
    outputs = call(model, inputs, training=False)

    def count() -> None:
        # An overridden compute_metrics may fail outside of a step.
        with contextlib.suppress(Exception), keras.StatelessScope():
            model.compute_metrics(inputs, targets, outputs, sample_weight=weights)

    return count


def kind_of_own_loss(
    model: keras.Model, parts: Sequence[Any], call: Callable[..., Any], training: bool, trial: Trial | None
) -> Kind | None:
    """Return the kind of an overridden `compute_loss`, and check the scalars that it counts in metrics.

    Args:
        model: A built and compiled model.
        parts: One example, some others, all of them.
        call: Calls the model.
        training: The argument `training` of `compute_loss`.
        trial: Replays the rows that the loss gathers; None where parts cannot gather.

    Raises:
        ValueError: As `kinds_of` and `check_counted_scalars`.
    """
    who = f"{type(model).__name__}.compute_loss"
    metrics: list[keras.Metric] = []

    def values(model: keras.Model, part: Any) -> list[float]:
        loss, scalars = _noted(loss_of(model, part, call, training), metrics)
        return [scalar(model, loss), *scalars]

    def what(number: int) -> str:
        return _counted_by(who) if number else f"The loss of {who}"

    kind, *counted = kinds_of(model, parts, values, what, trial, _OF_OWN_LOSS)
    _check_metrics(metrics, counted, who)
    return kind


def check_counted_scalars(
    model: keras.Model,
    parts: Sequence[Any],
    counting: Callable[[keras.Model, Any], Callable[[], Any]],
    trial: Trial | PartTrial | None = None,
    who: str = "A layer",
) -> None:
    """Refuse scalars in metrics if parts of a batch would give another result.

    Args:
        model: A built and compiled model.
        parts: One example, some others, all of them.
        counting: Takes the model and a part, and returns a function that counts scalars.
        trial: As for `tfpar.reduction.sum_or_mean.kinds_of`.
        who: What counts the scalars, in messages.

    Raises:
        ValueError: If a `Mean` receives a scalar that is not a mean over the batch, or a `Sum` one that is not a sum.
    """
    metrics: list[keras.Metric] = []

    def scalars(model: keras.Model, part: Any) -> list[float]:
        # `counting` calls the layers, whose scalars have their own check.
        return _noted(counting(model, part), metrics)[1]

    _check_metrics(metrics, kinds_of(model, parts, scalars, _counted_by(who), trial), who)


def _counted_by(who: str) -> str:
    return f"A scalar that {who.replace('A layer', 'a layer')} counts in a metric"


def _noted(count: Callable[[], Any], metrics: list[keras.Metric]) -> tuple[Any, list[float]]:
    """Return the result of a function and the scalars that it counts; their metrics replace those of a list."""
    metrics.clear()
    found: list[float] = []

    def note(metric: keras.Metric, value: tf.Tensor) -> None:
        metrics.append(metric)
        found.append(float(value))

    with keras_losses_in_call.scalars_noted(note):
        return count(), found


def _check_metrics(metrics: Sequence[keras.Metric], kinds: Sequence[Kind | None], who: str) -> None:
    for metric, kind in zip(metrics, kinds, strict=True):
        wanted = "sum" if isinstance(metric, keras.metrics.Sum) else "mean"
        if kind not in (None, wanted):
            raise ValueError(
                f"{who} must count a {wanted} over the batch in a keras.metrics.{wanted.capitalize()}, or replicas "
                f"and micro-batches count something else, and {metric.name!r} counts a {kind}. Let it count values of "
                "examples, [batch, ...], or train on SingleDevice()."
            )
