"""The kinds of sparse gradient rows, read from a trace of the gradients before the first step."""

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
from tfpar.engines.one_device import WHOLE_BATCH, forward_backward
from tfpar.reduction import objective, whole_batch
from tfpar.reduction.gradients.gradient_addition import spec_of
from tfpar.reduction.gradients.indexed_slices import Kind, kinds_of
from tfpar.reduction.gradients.row_numbers import Sources
from tfpar.reduction.replicas import local_replica_id

# Keras layers that look up rows of a weight, or may do so in a user's function; all other layers multiply.
_LOOKING_UP = (keras.layers.Embedding, keras.layers.Lambda)

Run = Callable[[Callable[[], None]], Any]
Gradients = Callable[[Any], Sequence[Any]]


def may_look_up(model: keras.Model, batch: Any) -> bool:
    """Return True if gradients of a model may be `tf.IndexedSlices`.

    Lookups have such gradients, and weights that multiply sparse tensors, such as outputs of
    `CategoryEncoding(sparse=True)`; custom layers may have them.

    Args:
        model: A built and compiled model.
        batch: A batch, `(inputs, targets, sample_weight)`; the last two are optional.
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
def _traced_kinds(gradients: Gradients, batch: Any, run: Run) -> list[list[Kind | None]]:
    """Return the kind of each lookup of each gradient; None for an unknown kind.

    Args:
        gradients: Returns the gradient of each weight for a batch.
        batch: A batch, `(inputs, targets, sample_weight)`; the last two are optional.
        run: Runs a function where the gradients are computed.
    """
    kinds: list[list[Kind | None]] = []
    tensors, size = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None], int(data.num_rows(batch))

    def traced(leaves: list[Any]) -> None:
        remaining = iter(leaves)
        traced_batch = tf.nest.map_structure(lambda leaf: None if leaf is None else next(remaining), batch)

        def here() -> None:
            sources = Sources()
            with keras_variables.PenalizedScope(collect_losses=True):
                kinds[:] = [kinds_of(gradient, sources) for gradient in gradients(traced_batch)]

        with whole_batch.Recording().recording(size), keras_losses.local_losses():
            run(here)

    tf.function(traced, autograph=False).get_concrete_function(list(map(spec_of, tensors)))
    return kinds


def eager_kinds(model: keras.Model, batch: Any, run: Run) -> list[list[Kind | None]]:
    """Return the kinds of the sparse gradient rows of a model that runs eagerly.

    An eager gradient concatenates the rows of all lookups of a weight. Replicas sum it as a dense gradient if the
    lookups are of several kinds or the model cannot be traced.

    Args:
        model: A built and compiled model; without objectives, its loss counts as the only objective.
        batch: A batch, `(inputs, targets, sample_weight)`; the last two are optional.
        run: Runs a function on every replica, where TensorFlow reads variables with operations of its own.

    Returns:
        The kind of each weight's gradient, by objective; None for a dense gradient.
    """
    run_on_first = functools.partial(_run_on_first, run)
    by_objective = []
    for gradients in _gradients_of(model):
        try:
            kinds = _traced_kinds(gradients, batch, run_on_first)
        except Exception:  # an eager model may need values, or compute something else in a graph
            kinds = []
        by_objective.append([_common(kinds_of_weight) for kinds_of_weight in kinds])
    return by_objective


def _run_on_first(run: Run, function: Callable[[], None]) -> Any:
    """Run a function on the first replica only, as all replicas have the same lookups."""
    return run(lambda: function() if local_replica_id() == 0 else None)


def _common(kinds: Sequence[Kind | None]) -> Kind | None:
    """Return the common kind of several lookups; rows of two lookups to merge cannot be told apart."""
    return kinds[0] if len({*kinds}) == 1 and (len(kinds) == 1 or kinds[0] != "merge") else None


def _gradients_of(model: keras.Model) -> Iterator[Gradients]:
    """Yield a function per objective that computes gradients on one device."""

    def loss_gradients(batch: Any) -> list[Any]:
        return forward_backward(model, *keras.utils.unpack_x_y_sample_weight(batch))[2]

    def objective_gradients(current: objective.Objective, batch: Any) -> list[Any]:
        return objective.forward_backward(model, current, batch, WHOLE_BATCH)[1]

    objectives = objective.objectives_of(model)
    for current in objectives:
        yield functools.partial(objective_gradients, current)
    if not objectives:
        yield loss_gradients
