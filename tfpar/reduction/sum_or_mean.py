"""The kind of a loss, sum or mean over the batch, from its values on two parts of a batch and on both together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses_in_call, keras_model, random_state, tf_distribute, typical_draws
from tfpar.reduction.losses_in_call import PartTrial
from tfpar.reduction.sums_of_parts import add_up
from tfpar.reduction.whole_batch import Trial

Kind = Literal["mean", "sum"]
RULE = "must be a sum or a mean over the batch to be computed by replicas or micro-batches"
WAY_OUT = "Let it return one value per example, with sample weights in place of a mask, or train on SingleDevice()."
_TOLERANCE = 1e-3  # a loss may be a small difference of large numbers


def parts_of(batch: Any) -> tuple[Any, Any, Any]:
    """Return one example, up to three others (the same example if there are no others), and all of them."""
    num_examples = int(data.num_rows(batch))
    first = data.take_rows(batch, 0, 1)
    others = data.take_rows(batch, 1, min(4, num_examples)) if num_examples > 1 else first
    return first, others, data.join_batches([first, others])


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Restore the model's weights and states at the end of this context.

    Their values are copied in the process that holds them, which has room for them.
    """
    before = [(variable, _copy(variable)) for variable in model.variables]
    try:
        yield
    finally:
        for variable, value in before:
            if not _equal(_copy(variable), value):
                variable.assign(value)


def _copy(variable: keras.Variable) -> tf.Tensor:
    """Return the value of a variable in the memory of its host; on a CPU it is copied only when it changes."""
    memory = tf_distribute.local_memory(variable)
    if memory is None:
        return tf.convert_to_tensor(variable.numpy())
    with tf.device(tf_distribute.host_of(memory.device)):
        return tf.identity(memory.read_value())


def _equal(value: tf.Tensor, other: tf.Tensor) -> bool:
    """Return whether two values are the same, NaN included."""
    with tf.device(value.device):
        equal = tf.equal(value, other)
        if value.dtype.is_floating:
            equal |= tf.math.is_nan(value) & tf.math.is_nan(other)
        return bool(tf.reduce_all(equal))


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restore weights, states and random states after a trial, and replace its random numbers by typical values."""
    with random_state.preserved_random_state(), restored(model), typical_draws.typical_draws():
        yield


def _perturb(model: keras.Model) -> None:
    """Add small random numbers to all weights."""
    random = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign_add(random.uniform(0.1, 0.3, variable.shape))


def _spread(model: keras.Model) -> None:
    """Add random numbers to all weights that are as large as these, so that examples differ."""
    random = np.random.default_rng(1)
    for variable in model.trainable_variables:
        value = np.asarray(variable.numpy(), np.float64)
        scale = np.std(value) + 1 / np.sqrt(value.shape[0]) if value.ndim > 1 else 0.3
        variable.assign_add(random.normal(0.0, scale, variable.shape))


def kinds_of(
    model: keras.Model,
    parts: Sequence[Any],
    losses_of: Callable[[keras.Model, Any], list[float]],
    what: str | Callable[[int], str],
    trial: Trial | PartTrial | None = None,
    way_out: str = WAY_OUT,
) -> list[Kind | None]:
    """Classify each loss by its values on one example, on some others, and on all of them.

    Args:
        model: The model.
        parts: One example, some others, all of them.
        losses_of: Returns the losses of a part.
        what: The name of a loss in messages; or a function that returns it for the number of the loss.
        trial: Computes the losses inside of `call` as replicas or micro-batches do; None for the losses of the part
            alone.
        way_out: What the user can do about a loss that is neither.

    At its first weights a model returns almost the same for every example, where many losses are means that are none
    later. So the kinds must be the same with other weights.

    Returns:
        The kind of each loss; None for a loss that is zero on every part.
    """

    def measure(tolerance: float) -> list[list[float]]:
        with trial.recording(int(data.num_rows(parts[2]))) if trial else keras_losses_in_call.losses_in_call():
            both = losses_of(model, parts[2])
        found = []
        for start, part in enumerate(parts[:2] if both else ()):  # most models add no loss: skip two slow calls
            with trial.replaying(start) if trial else keras_losses_in_call.losses_in_call():
                found.append(losses_of(model, part))
        if found and trial and not trial.losses_add_up(tolerance):
            raise ValueError(
                f"A loss object in a layer's call {RULE}, and its values on two parts of a batch do not add up to "
                f"those on both. {WAY_OUT}"
            )
        return [*found, both] if both else []

    num_others = float(data.num_rows(parts[1]))

    def name(number: int) -> str:
        return what(number) if callable(what) else what

    def kinds(tolerance: float = _TOLERANCE) -> Iterator[Kind | None]:
        for number, values in enumerate(zip(*measure(tolerance), strict=True)):
            yield _kind(values, num_others, name(number), tolerance, way_out)

    found = list(kinds())
    if any(found) and not keras_model.computes_in_half(model):
        with restored(model):
            _spread(model)
            others = list(kinds(_TOLERANCE / 10))
        for number, (kind, other) in enumerate(zip(found, others, strict=False)):
            if None not in (kind, other) and kind != other:
                raise ValueError(
                    f"{name(number)} {RULE}, and is a {kind} and, with other weights, a {other}. {way_out}"
                )
    if None in found:  # zero on every part, perhaps only with these weights
        with restored(model):
            _perturb(model)
            found = [kind or other for kind, other in zip(found, kinds(), strict=True)]
    return found


def _kind(values: Sequence[float], num_others: float, what: str, tolerance: float, way_out: str) -> Kind | None:
    one, others, both = values
    if one == others == both == 0 or not np.isfinite(values).all():
        return None
    largest = max(abs(one), abs(others))
    if add_up((one + num_others * others) / (1 + num_others), both, tolerance, largest):
        return "mean"
    if add_up(one + others, both, tolerance, largest):
        return "sum"
    raise ValueError(
        f"{what} {RULE}, received {one:.6g} and {others:.6g} on two parts of a batch and {both:.6g} on both. {way_out}"
    )
