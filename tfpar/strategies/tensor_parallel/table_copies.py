"""Copies of tables in replicas: weights with lookups whose rows do not belong to single examples, such as positions.

One device looks positions up once for a batch, and each replica once for its part. Keras 3.15's Adam applies duplicate
rows separately, so the rows of the replicas are added before the update, by `reduction.indexed_slices`. Each replica
reads a copy, whose gradient is that of the replica alone:

            ┌─► copy   replica 0   gradient of rows 0 1 2 ─┐
    table ──┤                                              ├─► gradient of rows 0 1 2, their sum
            └─► copy   replica 1   gradient of rows 0 1 2 ─┘

A weight is a table if the trace of a call before the first step has such lookups.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import tf_divided_memory
from tfpar.pipeline.execution.row_sums import added, joined, numbered
from tfpar.pipeline.stages.sparse_rows import by_lookup
from tfpar.reduction.gradient_addition import plus
from tfpar.reduction.indexed_slices import Kind, kinds_of
from tfpar.reduction.row_numbers import Sources
from tfpar.strategies.tensor_parallel.pieces import sent
from tfpar.strategies.traced_rows import common, traced_kinds


class Tables(NamedTuple):
    """The tables of a model.

    Args:
        pieces: The pieces of each table in turn; a table that is not divided is its own piece.
        places: The place of each among the pieces of all trained weights.
        eager_kinds: The kind of the rows of each piece in eager gradients.
        dense: By their places, pieces of other weights whose gradients become dense: replicas cannot match their rows.
        num_pieces: The number of the pieces of all trained weights.
    """

    pieces: Sequence[keras.Variable] = ()
    places: Sequence[int] = ()
    eager_kinds: Sequence[Kind | None] = ()
    dense: Mapping[int, keras.Variable] = MappingProxyType({})
    num_pieces: int = 0


Gradients = Callable[[Any, Callable[[tf.GradientTape], "TableCopies"] | None], Sequence[Any]]


def find_tables(model: keras.Model, batch: Any, gradients: Gradients) -> Tables:
    """Return the tables of a model, from traces of its call.

    Args:
        model: A built and compiled model.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        gradients: Returns for a batch the gradients of the outputs with respect to the pieces of the trained weights,
            without replicas; a function returns, for a tape, copies of tables to read instead.
    """
    pieces = [piece for weight in model.trainable_variables for piece in tf_divided_memory.pieces_of(weight)]
    try:
        found = traced_kinds(lambda part: gradients(part, None), batch)
    except Exception:
        if not model.run_eagerly:
            raise
        return Tables(dense=dict(enumerate(pieces)), num_pieces=len(pieces))  # it may need values
    shared = {place: kinds for place, kinds in enumerate(found) if {*kinds} - {"listed"}}
    unknown = {place for place, kinds in shared.items() if None in kinds or (model.run_eagerly and not common(kinds))}
    tables = _tables(pieces, shared, unknown)
    if not tables.pieces:
        return tables
    # keras.RematScope and custom gradients of a function that reads a table hide the gradient of its copy.
    copying = functools.partial(TableCopies, tables)
    hidden = traced_kinds(lambda part: gradients(part, copying), batch)
    return _tables(pieces, shared, unknown | {place for place in tables.places if {*hidden[place]} - {"listed"}})


def _tables(
    pieces: Sequence[keras.Variable], shared: Mapping[int, Sequence[Kind | None]], unknown: Collection[int]
) -> Tables:
    places = [place for place in shared if place not in unknown]
    kinds = [common(shared[place]) for place in places]
    dense = {place: pieces[place] for place in unknown}
    return Tables([pieces[place] for place in places], places, kinds, dense, len(pieces))


class TableCopies:
    """The copies of one step, and the sums of their gradients.

    Args:
        tables: The tables of the model.
        tape: The tape of the forward pass.
    """

    def __init__(self, tables: Tables, tape: tf.GradientTape) -> None:
        self._tables, self._tape = tables, tape
        self._of_replicas: list[list[tf.Tensor]] = []

    @contextlib.contextmanager
    def read_on(self, first: str, device: str) -> Iterator[None]:
        """Let one more replica read copies of the tables inside this context.

        Args:
            first: The first device of the first replica, which has the tables that are not divided.
            device: The first device of the replica.
        """
        copies = []
        for piece in self._tables.pieces:
            is_divided = tf_divided_memory.piece_of(piece) is not None
            # TensorFlow chooses the operations of a lookup by the names of devices.
            with tf.device(piece.value.device if is_divided else first):
                copy = tf.stop_gradient(piece.value)
            copies.append(copy if is_divided else sent(copy, first, device))
            self._tape.watch(copies[-1])
        self._of_replicas.append(copies)
        with tf_divided_memory.with_values(list(zip(self._tables.pieces, copies, strict=True))):
            yield

    @property
    def sources(self) -> list[tf.Tensor]:
        """All copies, those of each replica in turn."""
        return [copy for copies in self._of_replicas for copy in copies]

    def add(self, gradients: Sequence[Any], of_copies: Sequence[Any]) -> list[Any]:
        """Return the gradients of all pieces, with those of the copies added over the replicas.

        Args:
            gradients: The gradient of each piece of the trained weights.
            of_copies: The gradients of `sources`.

        Raises:
            ValueError: If other weights are trained now.
        """
        pieces, places, eager_kinds, dense, num_pieces = self._tables
        if len(gradients) != num_pieces:
            raise ValueError(
                f"The trained weights are those of the compilation, received {len(gradients)} pieces in place of "
                f"{num_pieces}. Call compile() after a change of `trainable`."
            )
        own = [
            by_lookup(gradient, dense[place], ()) if place in dense else gradient
            for place, gradient in enumerate(gradients)
        ]
        if not pieces:
            return own
        parts = [of_copies[start : start + len(pieces)] for start in range(0, len(of_copies), len(pieces))]
        sources = Sources()
        kinds = [
            [kind] if tf.executing_eagerly() else kinds_of(gradient, sources)
            for kind, gradient in zip(eager_kinds, parts[0], strict=True)
        ]
        rows = [[_numbered(*one) for one in zip(part, pieces, kinds, strict=True)] for part in parts]
        # A batch of another structure may have a dense gradient.
        pairs = zip(kinds, rows[0], strict=True)
        of_rows = tuple(tuple(one) if isinstance(first, tuple) else () for one, first in pairs)
        sums = dict(zip(places, joined(added(rows, of_rows, pieces), of_rows, pieces), strict=True))
        # A regularizer of the loss reads the table.
        return [plus(sums.get(place), gradient) for place, gradient in enumerate(own)]


def _numbered(gradient: Any, piece: keras.Variable, kinds: Sequence[Kind | None]) -> Any:
    """Return the rows of each lookup of a gradient, or a dense gradient."""
    rows = by_lookup(gradient, piece, kinds)
    return tuple(map(numbered, rows, kinds)) if isinstance(rows, tuple) else rows
