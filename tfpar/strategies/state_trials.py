"""Trials before the first step of the state that layers of the user's update in training, such as moving means.

whole batch   a b c d ─► 0.9 s + 0.1 mean(a b c d)
parts         a b ─► 0.9 s + 0.1 mean(a b) ─┐
c d ─► 0.9 s + 0.1 mean(c d) ─┴─ their mean is that of the whole batch; that of a maximum is not
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, random_state, tf_function, typical_draws
from tfpar.pipeline.graph.example_comparison import close
from tfpar.pipeline.graph.trial_batch import moving_statistics
from tfpar.reduction import whole_batch
from tfpar.strategies.batch_dependence import few_examples

_RULE = "A layer must update its state as on one device, and"


class Found(NamedTuple):
    """The states that layers of the user's update.

    Args:
        equal: The numbers, among the weights of the model, of those with one value for the batch and for its parts.
        averaged: The numbers of others whose mean over the parts is the value for the batch.
        others: The numbers of the rest.
    """

    equal: list[int]
    averaged: list[int]
    others: list[int]


@random_state.preserved_random_state()
def find(model: keras.Model, batch: Any) -> Found:
    """Find the weights that layers of the user's update otherwise for parts of a batch than for all of it.

    Args:
        model: A built model.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given; its first four examples are used.
    """
    numbers = _own_states(model)
    if numbers:
        with contextlib.suppress(Exception):  # the step itself raises too, or the model needs more examples
            return _find(model, few_examples(batch), numbers)
    return Found([], [], [])


def _find(model: keras.Model, inputs: Any, numbers: list[int]) -> Found:
    size = int(data.num_rows(inputs)) // 2
    trial = whole_batch.Trial()
    reduces: list[Any] = []
    kind = type(tf.distribute.get_replica_context())
    original = kind.all_reduce

    def all_reduce(*arguments: Any, **settings: Any) -> Any:
        reduces.append(arguments)
        return original(*arguments, **settings)

    with typical_draws.typical_draws(), mock.patch.object(kind, "all_reduce", all_reduce):
        with trial.recording():
            whole = _new_states(model, inputs, numbers)
        parts = []
        for start in (0, size):
            with trial.replaying(start):
                parts.append(_new_states(model, data.take_rows(inputs, start, start + size), numbers))
    if reduces:  # over the replicas, by the layer itself
        return Found([], [], [])
    differing = [number for number, value in whole.items() if not all(close(value, part[number]) for part in parts)]
    averaged = [number for number in differing if _is_mean(whole[number], [part[number] for part in parts])]
    equal = [number for number in whole if number not in differing]
    return Found(equal, averaged, [number for number in differing if number not in averaged])


def _is_mean(whole: np.ndarray, parts: list[np.ndarray]) -> bool:
    return whole.dtype.kind == "f" and close(whole, np.mean(parts, axis=0, dtype=whole.dtype))


def _own_states(model: keras.Model) -> list[int]:
    """Return the numbers of untrained weights of layers that are not of Keras: those of Keras are handled."""
    owners: dict[int, keras.Layer] = {}
    for layer in keras_model.all_layers(model):  # from the outermost to the innermost
        owners.update({id(weight): layer for weight in layer.weights})
    return [
        number
        for number, weight in enumerate(model.weights)
        if not weight.trainable and not keras_model.is_of_keras(type(owners.get(id(weight), model)))
    ]


def _new_states(model: keras.Model, inputs: Any, numbers: list[int]) -> dict[int, np.ndarray]:
    weights = model.weights
    drawing = [random_state.state_of_no_layer(), *typical_draws.seed_states(keras_model.all_layers(model))]
    with (
        keras.StatelessScope(random_state.seeded(drawing, 0)) as scope,
        keras_losses.collect_added_losses(list),
        tf_function.own_traces(),
        moving_statistics(of_synchronized=False),
    ):
        keras_model.call_model(model, inputs, training=True)
    found = {number: scope.get_current_value(weights[number]) for number in numbers}
    return {number: np.asarray(value) for number, value in found.items() if value is not None}


def check_microbatches(model: keras.Model, batch: Any) -> None:
    """Refuse states that the mean over micro-batches does not give.

    Args:
        model: A built model.
        batch: As for `find`.

    Raises:
        ValueError: If there are any.
    """
    if others := find(model, batch).others:
        raise refusal(model, others, "Reduce with a mean, or train on SingleDevice().")


def refusal(model: keras.Model, numbers: list[int], way_out: str) -> ValueError:
    """Return the error for states that are no mean over the parts of a batch.

    Args:
        model: The model.
        numbers: Their numbers among its weights.
        way_out: What the user can do.
    """
    names = ", ".join(repr(model.weights[number].path) for number in numbers)
    return ValueError(f"{_RULE} after a batch {names} is not its mean over the parts of the batch. {way_out}")
