"""Trials of losses on made-up outputs: the values of some examples and those of parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_losses, keras_losses_in_call, keras_model
from tfpar.reduction.losses import ONE_VALUE
from tfpar.reduction.losses import WAY_OUT as OVER_LAST_AXIS
from tfpar.reduction.sum_or_mean import RULE, WAY_OUT, Kind
from tfpar.reduction.trial_examples import Examples, made_up
from tfpar.reduction.trial_losses import losses_noted
from tfpar.reduction.whole_batch import Trial

# Some kernels, such as that of CTC in TensorFlow 2.21, compute values of float64 in float32.
_TOLERANCES = {tf.float64: 1e-5, tf.float32: 1e-4}
_HALF_TOLERANCE = 2e-2
_ROUNDING = 0.01  # of the tolerance, for the values of parts, which may cancel

# Named values of some examples.
Named = list[tuple[str, tf.Tensor]]


class Value(NamedTuple):
    """A value of all examples, and those of the parts.

    Args:
        name: What it is the value of.
        whole: The value of all examples.
        parts: The values of the parts.
        sizes: The number of examples of each part.
    """

    name: str
    whole: tf.Tensor
    parts: Sequence[tf.Tensor]
    sizes: Sequence[int]

    @property
    def kind(self) -> Kind | None:
        """Whether a scalar is a mean or a sum over the examples; None for one that is zero, infinite or neither."""
        whole, parts = _array(self.whole), np.array([_array(part) for part in self.parts])
        if not np.isfinite(whole) or not np.isfinite(parts).all() or not np.any([whole, *parts]):
            return None
        largest = np.max(np.abs(parts))
        if self._is_close(np.average(parts, weights=self.sizes), whole, largest):
            return "mean"
        return "sum" if self._is_close(parts.sum(), whole, largest) else None

    @property
    def is_decided(self) -> bool:
        """Whether the value of all examples is finite, and not every value is zero."""
        return bool(
            np.isfinite(_array(self.whole)).all() and any(_array(one).any() for one in (self.whole, *self.parts))
        )

    @property
    def is_joined(self) -> bool:
        """Whether the values of all examples are those of the parts, one after another."""
        return self._is_close(
            np.concatenate([np.ravel(_array(one)) for one in self.parts]), np.ravel(_array(self.whole))
        )

    @property
    def is_by_example(self) -> bool:
        """Whether each example has as many values, which do not depend on the others."""
        sizes = [sum(self.sizes) * np.size(part) for part in self.parts]
        return sizes == [size * np.size(self.whole) for size in self.sizes] and self.is_joined

    @property
    def is_average(self) -> bool:
        """Whether each value is the mean of its values for the parts, as that of a mean over the batch."""
        if any(part.shape != self.whole.shape for part in self.parts):
            return False
        average = np.average([_array(part) for part in self.parts], axis=0, weights=self.sizes)
        return self._is_close(average, _array(self.whole))

    def _is_close(self, value: Any, expected: Any, largest_part: float = 0.0) -> bool:
        tolerance = _TOLERANCES.get(self.whole.dtype, _HALF_TOLERANCE)
        return np.shape(value) == np.shape(expected) and bool(
            np.all(
                np.abs(value - expected) <= tolerance * max(np.max(np.abs([value, expected])), _ROUNDING * largest_part)
            )
        )


def _array(tensor: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(tensor, tf.float64))


def loss_kinds(
    model: keras.Model, batch: Any, outputs: Any, training: bool, trial: Trial | None = None
) -> list[Kind | None]:
    """Return the kind of each scalar loss of `compile`, or of an overridden `compute_loss`; None where it has none.

    Args:
        model: A built and compiled model.
        batch: Its first batch.
        outputs: Its outputs for some examples, of which types and shapes count.
        training: The argument `training` of an overridden `compute_loss`.
        trial: Replays the rows that a loss gathers; None where parts cannot gather.

    Raises:
        ValueError: If the loss of an example depends on the others, or a scalar is neither a sum nor a mean.
    """
    is_own = keras_model.overridden(model, "compute_loss")
    losses_of = _own_loss if is_own else _losses
    found: dict[int, Kind | None] = {}
    for examples in made_up(batch, outputs):
        values = trial_of(examples, lambda one: losses_of(model, one, training), trial)
        for number, value in enumerate(values):
            kind = _kind_of_loss(value) if value.is_decided else None
            found[number] = _same_kind(value, found.get(number), kind)
    return list(found.values())


def _losses(model: keras.Model, examples: Examples, training: bool) -> Named:
    found: list[tf.Tensor] = []

    def note(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> tf.Tensor:
        found.append(tf.convert_to_tensor(values))
        return found[-1]

    with losses_noted(note):
        _compute_loss(model, examples, training)
    losses = keras_losses.flat_losses(model)
    names = losses if len(losses) == len(found) else losses[:1] * len(found)
    return [
        (str(getattr(loss, "__name__", getattr(loss, "name", loss))), value)
        for loss, value in zip(names, found, strict=True)
    ]


def _own_loss(model: keras.Model, examples: Examples, training: bool) -> Named:
    with keras_losses_in_call.scalars_noted(lambda *_: None):
        loss = _compute_loss(model, examples, training)
    return [(f"{type(model).__name__}.compute_loss", tf.convert_to_tensor(loss))]


def _compute_loss(model: keras.Model, examples: Examples, training: bool) -> Any:
    inputs, targets, weights, outputs, *_ = examples
    return keras_model.compute_loss(model, inputs, targets, outputs, weights, training)


def _kind_of_loss(value: Value) -> Kind | None:
    """Return the kind of a scalar loss, None for one with a value per example; refuse any other."""
    if value.whole.shape.rank:
        if not (value.is_by_example or value.is_average):
            if any(part.shape == value.whole.shape for part in value.parts):
                raise ValueError(
                    f"{ONE_VALUE}, or means over the batch, and {value.name!r} returned values of shape "
                    f"{tuple(value.whole.shape)} that are neither. {OVER_LAST_AXIS}"
                )
            raise ValueError(
                "With several replicas or micro-batches the loss of an example must not depend on the others of its "
                f"batch, and the values of {value.name!r} for parts of a batch are not those for all of it. Under "
                f"Mirrored or MultiWorker take what compares examples from tfpar.gather, or train on SingleDevice()."
            )
        return None
    if value.kind is None:
        raise ValueError(_neither(value))
    return value.kind


def _same_kind(value: Value, before: Kind | None, kind: Kind | None) -> Kind | None:
    if None not in (before, kind) and before != kind:
        raise ValueError(_neither(value))
    return kind or before


def _neither(value: Value) -> str:
    parts = ", ".join(f"{float(part):.6g}" for part in value.parts)
    return (
        f"A loss function that returns a scalar {RULE}, and {value.name!r} returned {parts} for parts of a batch and "
        f"{float(value.whole):.6g} for all of it. {WAY_OUT}"
    )


def trial_of(examples: Examples, values_of: Callable[[Examples], Named], trial: Trial | None) -> list[Value]:
    """Return the values of all examples and of the parts; none where they fail on what is made up, or are random.

    Args:
        examples: Made-up examples.
        values_of: Returns the values of some examples.
        trial: Replays the rows that a value gathers; None where parts cannot gather.
    """
    starts = np.cumsum((0, *examples.sizes))[:-1].tolist()
    with contextlib.suppress(Exception):
        again = values_of(examples)
        with trial.recording(sum(examples.sizes)) if trial else contextlib.nullcontext():
            whole = values_of(examples)
        parts = []
        for start, part in zip(starts, examples.parts(), strict=True):
            with trial.replaying(start) if trial else contextlib.nullcontext():
                parts.append([value for _, value in values_of(part)])
        if all(bool(tf.reduce_all(one == other)) for (_, one), (_, other) in zip(whole, again, strict=True)):
            return [
                Value(name, value, of_parts, examples.sizes)
                for (name, value), of_parts in zip(whole, zip(*parts, strict=True), strict=True)
            ]
    return []
