"""Trials of losses on made-up outputs: the values of some examples and those of parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_losses, keras_losses_in_call, keras_model
from tfpar.reduction.sum_or_mean import RULE, WAY_OUT, Kind
from tfpar.reduction.trial_examples import NUM_EXAMPLES, SIZES, Examples, made_up
from tfpar.reduction.trial_losses import losses_noted
from tfpar.reduction.whole_batch import Trial

_TOLERANCES = {tf.float64: 1e-8, tf.float32: 1e-4}
_HALF_TOLERANCE = 2e-2

# Named values of some examples.
Named = list[tuple[str, tf.Tensor]]


class Value(NamedTuple):
    """A value of all examples, and those of the parts.

    Args:
        name: What it is the value of.
        whole: The value of all examples.
        parts: The values of the parts.
    """

    name: str
    whole: tf.Tensor
    parts: Sequence[tf.Tensor]

    @property
    def kind(self) -> Kind | None:
        """Whether a scalar is a mean or a sum over the examples; None for one that is zero, infinite or neither."""
        whole, parts = _array(self.whole), np.array([_array(part) for part in self.parts])
        if not np.isfinite(whole) or not np.isfinite(parts).all() or not np.any([whole, *parts]):
            return None
        if self._is_close(np.dot(SIZES, parts) / NUM_EXAMPLES, whole):
            return "mean"
        return "sum" if self._is_close(parts.sum(), whole) else None

    @property
    def is_decided(self) -> bool:
        """Whether it is finite, and not zero throughout."""
        values = np.concatenate([np.ravel(_array(one)) for one in (self.whole, *self.parts)])
        return bool(np.isfinite(values).all() and values.any())

    @property
    def has_rows(self) -> bool:
        """Whether there is a value for each example."""
        shapes = [one.shape[:1] for one in (self.whole, *self.parts)]
        return shapes == [(size,) for size in (NUM_EXAMPLES, *SIZES)]

    @property
    def is_by_example(self) -> bool:
        """Whether the values of the parts are those of all examples."""
        if any(part.shape[1:] != self.whole.shape[1:] for part in self.parts):
            return False
        return self._is_close(np.concatenate([_array(part) for part in self.parts]), _array(self.whole))

    def _is_close(self, value: Any, expected: Any) -> bool:
        tolerance = _TOLERANCES.get(self.whole.dtype, _HALF_TOLERANCE)
        return bool(np.all(np.abs(value - expected) <= tolerance * np.max(np.abs([value, expected]))))


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
    return [(str(getattr(loss, "__name__", loss)), value) for loss, value in zip(names, found, strict=True)]


def _own_loss(model: keras.Model, examples: Examples, training: bool) -> Named:
    with keras_losses_in_call.scalars_noted(lambda *_: None):
        loss = _compute_loss(model, examples, training)
    return [(f"{type(model).__name__}.compute_loss", tf.convert_to_tensor(loss))]


def _compute_loss(model: keras.Model, examples: Examples, training: bool) -> Any:
    inputs, targets, weights, outputs = examples
    return keras_model.compute_loss(model, inputs, targets, outputs, weights, training)


def _kind_of_loss(value: Value) -> Kind | None:
    """Return the kind of a scalar loss, None for one with a value per example; refuse any other."""
    if value.whole.shape.rank:
        if value.has_rows and not value.is_by_example:
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
    starts = np.cumsum((0, *SIZES))[:-1].tolist()
    with contextlib.suppress(Exception):
        again = values_of(examples)
        with trial.recording() if trial else contextlib.nullcontext():
            whole = values_of(examples)
        parts = []
        for start, part in zip(starts, examples.parts(), strict=True):
            with trial.replaying(start) if trial else contextlib.nullcontext():
                parts.append([value for _, value in values_of(part)])
        if all(bool(tf.reduce_all(one == other)) for (_, one), (_, other) in zip(whole, again, strict=True)):
            return [
                Value(name, value, of_parts)
                for (name, value), of_parts in zip(whole, zip(*parts, strict=True), strict=True)
            ]
    return []
