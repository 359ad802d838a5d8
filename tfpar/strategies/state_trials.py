"""Trials before the first step of the state that layers of the user's update, such as moving means.

whole    a b c d ─► 0.9 s + 0.1 mean(a b c d)
part 0   a b     ─► 0.9 s + 0.1 mean(a b) ─┐
part 1       c d ─► 0.9 s + 0.1 mean(c d) ─┴─ their mean is the state of the whole; that of a maximum is not
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, random_state, tf_function, typical_draws
from tfpar.pipeline.graph.example_comparison import close
from tfpar.pipeline.graph.trial_batch import moving_statistics
from tfpar.reduction import whole_batch
from tfpar.strategies.batch_dependence import few_examples

_NUM_STEPS = 3
_States = dict[int, tf.Tensor]  # by the number of the weight
_RULE = "A layer must update its state as on one device, and"


class Found(NamedTuple):
    """The states that layers of the user's update.

    Args:
        equal: The numbers, among the weights of the model, of those with one value in the trial, however it is split.
        averaged: The numbers of others whose mean over the parts is the value for the batch.
        others: The numbers of the rest.
    """

    equal: list[int]
    averaged: list[int]
    others: list[int]


_NONE = Found([], [], [])


@random_state.preserved_random_state()
def find(model: keras.Model, batch: Any, training: bool, gathers: bool = True) -> Found:
    """Find the weights that layers of the user's update otherwise for parts of a batch than for all of it.

    The trial has several steps: a layer may update a state in some of them only.

    Args:
        model: A built model.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given; its first four examples are used.
        training: Whether the model trains in the steps.
        gathers: Whether `tfpar.gather` returns the rows of the whole batch.
    """
    owners = _owners(model)
    if not owners:
        return _NONE
    inputs = few_examples(batch)
    size = int(data.num_rows(inputs)) // 2
    halves = [data.take_rows(inputs, start, start + size) for start in (0, size)]
    trial = whole_batch.Trial(gathers)
    original = tf.distribute.ReplicaContext.all_reduce
    reduces: list[Any] = []

    def all_reduce(*arguments: Any, **settings: Any) -> Any:
        reduces.append(arguments)
        return original(*arguments, **settings)

    whole: _States = {}
    parts: list[_States] = [{}, {}]
    with typical_draws.typical_draws(), mock.patch.object(tf.distribute.ReplicaContext, "all_reduce", all_reduce):
        for step in range(_NUM_STEPS):
            with trial.recording(2 * size):
                after = _after_step(model, inputs, whole, owners, step, training)
            if after is None:
                return _NONE
            for number, half in enumerate(halves):
                with trial.replaying(number * size):
                    of_part = _after_step(model, half, parts[number], owners, step, training)
                if of_part is None:
                    return _NONE
                parts[number] = of_part
            whole = after
    kinds = {number: _rounding(model.weights[number], owner) for number, owner in owners.items()}
    differing = [
        number
        for number, value in whole.items()
        if not all(_close(value, part.get(number, value), kinds[number]) for part in parts)
    ]
    averaged = [
        number
        for number in differing
        if kinds[number].is_floating
        and _close(whole[number], tf.reduce_mean([part.get(number, whole[number]) for part in parts], 0), kinds[number])
    ]
    equal = [number for number in whole if number not in differing]
    # A layer that reduces its state by itself does so over the replicas, of which a trial has none.
    others = [] if reduces else [number for number in differing if number not in averaged]
    return Found(equal, averaged, others)


def _owners(model: keras.Model) -> dict[int, keras.Layer]:
    """Return the layers of the untrained weights, by number, that are not of Keras: those of Keras are handled."""
    owners: dict[int, keras.Layer] = {}
    for layer in keras_model.all_layers(model):  # from the outermost to the innermost
        owners.update({id(weight): layer for weight in layer.weights})
    found = {number: owners.get(id(weight), model) for number, weight in enumerate(model.weights)}
    return {
        number: owner
        for number, owner in found.items()
        if not model.weights[number].trainable and not keras_model.is_of_keras(type(owner))
    }


def _rounding(weight: keras.Variable, owner: keras.Layer) -> tf.DType:
    """Return the type of the least precision in which a layer computes a state."""
    kinds = [tf.as_dtype(weight.dtype), tf.as_dtype(owner.compute_dtype)]
    return min(kinds, key=lambda kind: kind.size) if all(kind.is_floating for kind in kinds) else kinds[0]


def _close(one: tf.Tensor, other: tf.Tensor, kind: tf.DType) -> bool:
    return close(tf.cast(one, kind), tf.cast(other, kind))


def _after_step(
    model: keras.Model, inputs: Any, before: _States, owners: Mapping[int, keras.Layer], step: int, training: bool
) -> _States | None:
    """Return the states after a step that begins with others; None if the model fails on a few examples."""
    weights = model.weights
    drawing = [random_state.state_of_no_layer(), *typical_draws.seed_states(keras_model.all_layers(model))]
    begin = [(weights[number], value) for number, value in before.items()]
    with (
        keras.StatelessScope([*random_state.seeded(drawing, step), *begin]) as scope,
        keras_losses.collect_added_losses(list),
        tf_function.own_traces(),
        moving_statistics(of_synchronized=False),
    ):
        try:
            keras_model.call_model(model, inputs, training=training)
        except Exception:  # the step itself raises too, or the model needs more examples
            return None
    found = {number: scope.get_current_value(weights[number]) for number in owners}
    return {number: tf.convert_to_tensor(value) for number, value in found.items() if value is not None}


def check_microbatches(model: keras.Model, batch: Any, training: bool) -> None:
    """Refuse states that the mean over micro-batches does not give.

    Args:
        model: A built model.
        batch: As for `find`.
        training: As for `find`.

    Raises:
        ValueError: If there are any.
    """
    if others := find(model, batch, training, gathers=False).others:
        raise refusal(model, others, training, "Reduce with a mean, or train on SingleDevice().")


def refusal(model: keras.Model, numbers: list[int], training: bool, way_out: str) -> ValueError:
    """Return the error for states that are no mean over the parts of a batch.

    Args:
        model: The model.
        numbers: Their numbers among its weights.
        training: Whether the model updates them in training.
        way_out: What the user can do.
    """
    names = ", ".join(repr(model.weights[number].path) for number in numbers)
    when = "" if training else " in inference"
    return ValueError(f"{_RULE} after a batch{when} {names} is not its mean over the parts of the batch. {way_out}")
