"""Trials of metrics on made-up outputs: whether parts of a batch count what the whole batch does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_losses_in_call, keras_metrics, keras_model
from tfpar.reduction import trial_losses
from tfpar.reduction.metric_logs import all_metrics
from tfpar.reduction.part_trials import Named, Value, trial_of
from tfpar.reduction.sum_or_mean import kinds_of
from tfpar.reduction.sums_of_parts import ROUNDING
from tfpar.reduction.trial_examples import Examples, made_up

_REFUSAL = (
    "The state of a metric must {rule}, and that of {name!r} for a batch is not {relation} its parts. Let update_state "
    "add sums over examples, and divide them in result(), or train on SingleDevice()."
)
_OF_REPLICAS = {"rule": "add up over replicas", "relation": "the sum of those for"}
_OF_MICROBATCHES = {"rule": "be the same for any micro-batches", "relation": "that after"}


def check_metrics(model: keras.Model, batch: Any, outputs_of: Callable[[], Any], adds: bool) -> None:
    """Refuse metrics that parts of a batch count otherwise than the whole batch.

    Args:
        model: A built and compiled model.
        batch: Its first batch.
        outputs_of: Returns its outputs for some examples, of which types and shapes count.
        adds: Whether replicas add the states of metrics; otherwise micro-batches update one state in turn.

    Raises:
        ValueError: If there is one.
    """
    own = [metric for metric in all_metrics(model) if not keras_model.is_of_keras(type(metric))]
    functions = keras_metrics.unknown_functions(model)
    for examples in made_up(batch, outputs_of()) if own or functions else ():
        if functions:
            for value in trial_of(examples, lambda one: _function_values(model, functions, one), None):
                _check_function(value)
        if own:
            _check_states(model, own, examples, adds)


def _function_values(model: keras.Model, functions: Sequence[keras.Metric], examples: Examples) -> Named:
    found: Named = []

    def note(metric: keras.Metric, values: Any) -> None:
        if any(metric is one for one in functions):
            found.append((metric.name, tf.convert_to_tensor(values)))

    with keras_metrics.function_values(note):
        _count(model, examples)
    return found


def _count(model: keras.Model, examples: Examples) -> None:
    inputs, targets, weights, outputs, *_ = examples
    with keras.StatelessScope():
        model.compute_metrics(inputs, targets, outputs, sample_weight=weights)


def _check_function(value: Value) -> None:
    if value.is_decided and not (value.is_joined if value.whole.shape.rank else value.kind == "mean"):
        raise ValueError(
            "A metric function must return one value per example, or their mean, to be computed by replicas or "
            f"micro-batches, and {value.name!r} returned for parts of a batch what does not average to its result for "
            "all of it. Count sums in a metric, such as keras.metrics.Precision, or train on SingleDevice()."
        )


def _check_states(model: keras.Model, own: Sequence[keras.Metric], examples: Examples, adds: bool) -> None:
    parts, variables = examples.parts(), [one for metric in own for one in metric.variables]
    whole = _states(model, own, [examples])
    if not whole and not examples.is_given:  # made-up targets may be none of the metric's
        return
    of_parts = [_states(model, own, [part]) for part in parts]
    alone = list(zip(*of_parts, strict=True)) if all(of_parts) else []
    if adds:
        found = [_OF_ALL.get(one.aggregation, _first)(states) for one, states in zip(variables, alone, strict=False)]
    else:
        found = _states(model, own, parts)
    names = [metric.name for metric in own for _ in metric.variables]
    if adds and any(of_parts) and not alone:  # the update fails for some of the parts
        raise ValueError(_REFUSAL.format(name=names[0], **_OF_REPLICAS))
    # Those of the parts may cancel, and their rounding remains.
    rounding = [_rounding(states) for states in alone] or [ROUNDING] * len(found)
    for name, one, other, error in zip(names, whole, found, rounding, strict=False):
        if np.isfinite(one).all() and not np.allclose(one, other, rtol=1e-4, atol=error):
            raise ValueError(_REFUSAL.format(name=name, **(_OF_REPLICAS if adds else _OF_MICROBATCHES)))


def _rounding(states: Sequence[np.ndarray]) -> Any:
    """Return the rounding of the sum of each element of some states."""
    return ROUNDING * np.max(np.abs(states), axis=0, initial=1.0, where=np.isfinite(states))


def _first(states: Sequence[np.ndarray]) -> Any:
    return states[0]


# What TensorFlow makes of the states of several replicas, by the aggregation of a variable.
_OF_ALL: dict[str, Callable[[Sequence[np.ndarray]], Any]] = {
    "sum": lambda states: np.sum(states, 0),
    "mean": lambda states: np.mean(states, 0),
}


def _states(model: keras.Model, own: Sequence[keras.Metric], updates: Sequence[Examples]) -> list[np.ndarray]:
    """Return the states of metrics after some updates; none where an update fails outside of a step."""
    with contextlib.suppress(Exception), keras.StatelessScope():
        for metric in own:
            metric.reset_state()
        for one in updates:
            share = int(tf.nest.flatten(one.outputs)[0].shape[0]) / sum(one.sizes)
            with keras_losses_in_call.scalars_weighted(functools.partial(_constant, share)):
                model.compute_metrics(one.inputs, one.targets, one.outputs, sample_weight=one.weights)
        return [np.asarray(one.value, np.float64) for metric in own for one in metric.variables]
    return []


def _constant(share: float, value: tf.Tensor) -> tf.Tensor:
    return tf.cast(share, value.dtype if value.dtype.is_floating else keras.config.floatx())


def check_scalars(model: keras.Model, parts: Sequence[Any], call: Callable[..., Any]) -> None:
    """Refuse a metric function that returns a scalar other than a mean over the batch.

    Args:
        model: A built and compiled model.
        parts: One example, some others, all of them.
        call: Calls the model.

    Raises:
        ValueError: If there is one.
    """
    what = "A metric function that returns a scalar"
    kinds = kinds_of(model, parts, functools.partial(trial_losses.scalar_metrics, call=call), what)
    if "sum" in kinds:
        raise ValueError(
            f"{what} must average over the batch to be reduced over replicas or micro-batches, and this one sums. "
            "Let it return one value per example, or train on SingleDevice()."
        )
