"""Trials before the first step that find the kinds of lookups: how rows of replicas combine to rows of one device.

batch    [a b]   row numbers 3 5 5 7     [a a]   3 5 3 5         listed: the row numbers of all parts
parts    [a] [b]             3 5, 5 7    [a] [a] 3 5, 3 5        shared: each as often as in the part with the most
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, keras_variables, random_state
from tfpar.messages.reasons import message_of
from tfpar.messages.received import excerpt
from tfpar.pipeline.graph.trial_batch import pairs_of_parts
from tfpar.reduction import indexed_slices, objective, whole_batch
from tfpar.reduction.gradient_addition import spec_of
from tfpar.reduction.indexed_slices import Kind, LookupKinds, Observed
from tfpar.reduction.losses import BatchWeights
from tfpar.reduction.replicas import local_replica_id
from tfpar.strategies.single_device import forward_backward

# Keras layers that look up rows of a weight, or may do so in a user's function; all others multiply their weights.
_LOOKING_UP = (keras.layers.Embedding, keras.layers.Lambda)

_CAUSE_COLUMNS = 200  # of the error of a trial, in a message

# On one device the divisor of a loss needs no sum over parts.
_ALL = BatchWeights(partial_values=True, sum_divisors=lambda weight: weight)

Run = Callable[[Callable[[], None]], Any]
Gradients = Callable[[Any], Sequence[Any]]
Numbers = list[list[Any]]  # the row numbers of each lookup, by gradient


def may_look_up(model: keras.Model, batch: Any) -> bool:
    """Return whether the gradients of a model may be indexed slices, as those of custom layers may be.

    A weight that multiplies a sparse output of a layer of Keras, such as `CategoryEncoding(sparse=True)`, is looked up.

    Args:
        model: A built and compiled model.
        batch: A batch.
    """
    layers, losses = (
        keras_model.all_layers(model),
        [one for one in keras_losses.flat_losses(model) if not isinstance(one, str)],
    )
    penalties = [weight.regularizer for weight in model.weights if weight.regularizer is not None]
    users = [*layers, *losses, *penalties, *(loss.fn for loss in losses if hasattr(loss, "fn"))]
    return (
        any(isinstance(layer, _LOOKING_UP) or getattr(layer, "sparse", False) for layer in layers)
        or any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batch))
        or not all(map(keras_model.is_of_keras, users))
    )


@random_state.preserved_random_state()
def find_lookup_kinds(model: keras.Model, batch: Any, run: Run, first_alone: bool = False) -> list[LookupKinds]:
    """Return the kinds of the lookups in the gradient of each trained weight, for each objective of the model.

    All replicas have the same lookups: the first local replica is enough, and to trace another takes as long again.

    Args:
        model: A built and compiled model; without objectives, its loss is the only objective.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given; its first four examples are used.
        run: Runs a function on every replica, where TensorFlow reads variables with other operations than elsewhere.
        first_alone: Whether TensorFlow raises an error, instead of waiting, if the first replica communicates and the
            others do not. Then the others run for models that communicate only.

    Returns:
        The kinds for each objective; no lookups for a dense gradient, or if the model fails on a few examples.

    Raises:
        ValueError: If row numbers computed from a per-replica batch can differ from those of the global batch.
    """
    runs: list[Run] = [functools.partial(_run_first, run), run] if first_alone else [run]
    return [_find(gradients, weights, model.run_eagerly, batch, runs) for gradients, weights in _gradients_of(model)]


@random_state.preserved_random_state()
def find_kinds(gradients: Gradients, weights: Sequence[keras.Variable], eagerly: bool, batch: Any) -> LookupKinds:
    """Return the kinds of the lookups in gradients that a function computes, as `find_lookup_kinds` does for a model.

    Args:
        gradients: Returns the gradient of each weight for a batch, on one device or its shards.
        weights: The weights, for messages.
        eagerly: Whether the model runs eagerly.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given; its first four examples are used.

    Raises:
        ValueError: If row numbers computed from a part of a batch can differ from those of the whole batch.
    """
    return _find(gradients, weights, eagerly, batch, [lambda function: function()])


def _run_first(run: Run, function: Callable[[], None]) -> Any:
    """Run a function on the first replica, and nothing on the others."""
    return run(lambda: function() if local_replica_id() == 0 else None)


def _find(gradients: Gradients, weights: Sequence[Any], eagerly: bool, batch: Any, runs: Sequence[Run]) -> LookupKinds:
    try:
        found = _kinds(gradients, batch, runs)
    except Exception as error:  # the model may fail on a few examples, which matters only if it has lookups
        return LookupKinds([], excerpt(f"{type(error).__name__}: {message_of(error)}", _CAUSE_COLUMNS))
    return LookupKinds([_checked(kinds, weight, eagerly) for kinds, weight in zip(found, weights, strict=False)])


def _gradients_of(model: keras.Model) -> Iterator[tuple[Gradients, Sequence[keras.Variable]]]:
    """Yield functions that compute gradients on one device, with the weights of these gradients."""

    def of_loss(batch: Any) -> list[Any]:
        return forward_backward(model, *keras.utils.unpack_x_y_sample_weight(batch))[2]

    def of_objective(one: objective.Objective, batch: Any) -> list[Any]:
        return objective.forward_backward(model, one, batch, _ALL)[1]

    objectives = objective.objectives_of(model)
    for one in objectives:
        yield functools.partial(of_objective, one), objective.trained_by(model, one)
    if not objectives:
        yield of_loss, model.trainable_variables


def _checked(kinds: list[Kind | None], weight: keras.Variable, eagerly: bool) -> list[Kind]:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        raise ValueError(
            "With several replicas, the row numbers of a lookup must be computed from each example alone, from "
            f"constants or from positions, received lookups in {weight.path!r} whose row numbers depend on several "
            "examples. Change how they are computed, or train on SingleDevice()."
        )
    if eagerly and len(known) > 1 and (len(set(known)) > 1 or known[0] == "shared"):
        raise ValueError(
            "With several replicas, a weight with several kinds of lookups cannot be trained with run_eagerly=True, "
            f"received {weight.path!r}. Compile the model without run_eagerly, or train on SingleDevice()."
        )
    return known


def _kinds(gradients: Gradients, batch: Any, runs: Sequence[Run]) -> list[list[Kind | None]]:
    """Return the kinds of the lookups of each gradient, None for a lookup of no kind."""
    for run in runs:
        with contextlib.suppress(Exception):  # the replicas may communicate, or the model may need values
            return _tried(_Compiled(gradients, batch, run))
    return _tried(_Eager(gradients, batch, runs[-1]))


def _tried(trial: _Eager) -> list[list[Kind | None]]:
    observed = [trial.observe(*pair) for pair in trial.pairs]
    return [
        [known or indexed_slices.kind_of(seen) for known, *seen in zip(of_weight, *each, strict=True)]
        for of_weight, *each in zip(trial.known, *observed, strict=True)
    ]


class _Eager:
    """An eager trial of a model on a few examples and on halves of them.

    Args:
        gradients: Computes gradients.
        batch: A batch.
        run: Runs a function on every replica.
    """

    def __init__(self, gradients: Gradients, batch: Any, run: Run) -> None:
        self.pairs = pairs_of_parts(batch)
        self._gradients, self._run_on_replicas, self._size = gradients, run, int(data.num_rows(self.pairs[0][0]))
        self.known: list[list[Kind | None]] = []

    def observe(self, one: Any, other: Any) -> list[list[Observed]]:
        """Return the row numbers of the lookups of each gradient, for two halves and for both together."""
        whole, halves = self._run(data.join_batches([one, other]))
        halves = halves or [self._run(half)[0] for half in (one, other)]
        return [
            [Observed(both.numpy(), [half.numpy() for half in each]) for both, *each in zip(*lookups, strict=True)]
            for lookups in zip(whole, *halves, strict=True)
        ]

    def _run(self, batch: Any) -> tuple[Numbers, list[Numbers]]:
        return self._numbers(batch)

    def _numbers(self, batch: Any) -> tuple[Numbers, list[Numbers]]:
        """Return row numbers for some examples, and for their halves if `call` gathers the whole batch."""
        trial = whole_batch.Recording()
        with trial.recording(2 * self._size):
            whole = self._lookups(batch)
        self.known = [list(map(indexed_slices.known_kind, lookups)) for lookups in whole]
        halves = []
        for start in (0, self._size) if trial.num_values else ():
            with trial.replaying(start):
                halves.append(self._lookups(data.take_rows(batch, start, start + self._size)))
        return whole, halves

    def _lookups(self, batch: Any) -> Numbers:
        found: list[Numbers] = []

        def on_replica() -> None:
            with keras_variables.PenalizedScope(collect_losses=True):
                gradients = self._gradients(batch)
            found.append(
                [indexed_slices.lookups(one) if isinstance(one, tf.IndexedSlices) else [] for one in gradients]
            )

        with keras_losses.local_losses():
            self._run_on_replicas(on_replica)
        return found[0]


class _Compiled(_Eager):
    """A trial in a graph, which separates the lookups of one weight."""

    def __init__(self, gradients: Gradients, batch: Any, run: Run) -> None:
        super().__init__(gradients, batch, run)

        def traced(leaves: list[Any]) -> tuple[Numbers, list[Numbers]]:
            given = iter(leaves)
            return self._numbers(tf.nest.map_structure(lambda leaf: None if leaf is None else next(given), batch))

        self._function = tf.function(traced, autograph=False).get_concrete_function(list(map(spec_of, _leaves(batch))))

    def _run(self, batch: Any) -> tuple[Numbers, list[Numbers]]:
        found: tuple[Numbers, list[Numbers]] = self._function(_leaves(batch))
        return found


def _leaves(batch: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
