"""The kinds of sparse gradient rows, read from a trace of the gradients before the first step; nothing runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_losses, keras_model
from tfpar._compat.random_numbers import random_state
from tfpar._compat.variables import keras_variables
from tfpar.engines.one_device import forward_backward
from tfpar.reduction import objective, whole_batch
from tfpar.reduction.gradients.gradient_addition import spec_of
from tfpar.reduction.gradients.indexed_slices import Kind, kinds_of
from tfpar.reduction.gradients.row_numbers import Sources
from tfpar.reduction.losses import BatchWeights
from tfpar.reduction.replicas import local_replica_id

# Keras layers that look up rows of a weight, or may do so in a user's function; all others multiply their weights.
_LOOKING_UP = (keras.layers.Embedding, keras.layers.Lambda)

# On one device the divisor of a loss needs no sum over parts.
_ALL = BatchWeights(partial_values=True, sum_divisors=lambda weight: weight)

Run = Callable[[Callable[[], None]], Any]
Gradients = Callable[[Any], Sequence[Any]]


def may_look_up(model: keras.Model, batch: Any) -> bool:
    """Return whether the gradients of a model may be indexed slices, as those of custom layers may be.

    A weight that multiplies a sparse output of a layer of Keras, such as `CategoryEncoding(sparse=True)`, is looked up.

    Args:
        model: A built and compiled model.
        batch: A batch.
    """
    layers = keras_model.all_layers(model)
    losses = [loss for loss in keras_losses.flat_losses(model) if not isinstance(loss, str)]
    penalties = [weight.regularizer for weight in model.weights if weight.regularizer is not None]
    users = [*layers, *losses, *penalties, *(loss.fn for loss in losses if hasattr(loss, "fn"))]
    return (
        any(isinstance(layer, _LOOKING_UP) or getattr(layer, "sparse", False) for layer in layers)
        or any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batch))
        or not all(map(keras_model.is_of_keras, users))
    )


@random_state.preserved_random_state()
def _traced_kinds(gradients: Gradients, batch: Any, run: Run = lambda function: function()) -> list[list[Kind | None]]:
    """Return the kind of each lookup of each gradient, None for an unknown one.

    Args:
        gradients: Returns the gradient of each weight for a batch.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        run: Runs a function where the gradients are computed.
    """
    found: list[list[Kind | None]] = []
    given, size = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None], int(data.num_rows(batch))

    def traced(leaves: list[Any]) -> None:
        remaining = iter(leaves)
        part = tf.nest.map_structure(lambda leaf: None if leaf is None else next(remaining), batch)

        def here() -> None:
            sources = Sources()
            with keras_variables.PenalizedScope(collect_losses=True):
                found[:] = [kinds_of(one, sources) for one in gradients(part)]

        with whole_batch.Recording().recording(size), keras_losses.local_losses():
            run(here)

    tf.function(traced, autograph=False).get_concrete_function(list(map(spec_of, given)))
    return found


def eager_kinds(model: keras.Model, batch: Any, run: Run) -> list[list[Kind | None]]:
    """Return the kind of the rows of each weight in eager gradients, for each objective of a model.

    An eager gradient lists the rows of all lookups of a weight one after the other. Replicas add them as a dense
    gradient if the lookups are of several kinds, and if the model cannot be traced.

    Args:
        model: A built and compiled model; without objectives, its loss is the only objective.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        run: Runs a function on every replica, where TensorFlow reads variables with other operations than elsewhere.

    Returns:
        The kind for each weight of each objective; None for a dense gradient.
    """
    first = functools.partial(_run_first, run)
    found = []
    for gradients in _gradients_of(model):
        try:
            kinds = _traced_kinds(gradients, batch, first)
        except Exception:  # a model that runs eagerly may need values, or compute something else in a graph
            kinds = []
        found.append([_common(of_weight) for of_weight in kinds])
    return found


def _run_first(run: Run, function: Callable[[], None]) -> Any:
    """Run a function on the first replica, and nothing on the others: all have the same lookups."""
    return run(lambda: function() if local_replica_id() == 0 else None)


def _common(kinds: Sequence[Kind | None]) -> Kind | None:
    """Return the common kind of several lookups; rows of two lookups to merge cannot be told apart."""
    return kinds[0] if len({*kinds}) == 1 and (len(kinds) == 1 or kinds[0] != "merge") else None


def _gradients_of(model: keras.Model) -> Iterator[Gradients]:
    """Yield functions that compute gradients on one device."""

    def of_loss(batch: Any) -> list[Any]:
        return forward_backward(model, *keras.utils.unpack_x_y_sample_weight(batch))[2]

    def of_objective(one: objective.Objective, batch: Any) -> list[Any]:
        return objective.forward_backward(model, one, batch, _ALL)[1]

    objectives = objective.objectives_of(model)
    for one in objectives:
        yield functools.partial(of_objective, one)
    if not objectives:
        yield of_loss
