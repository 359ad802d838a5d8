"""Copies of tables in replicas: weights with lookups whose rows do not belong to single examples, such as positions.

One device looks positions up once for a batch, and each replica once for its part. Keras 3.15's Adam applies duplicate
rows separately, so the rows of the replicas are added before the update, by `reduction.indexed_slices`. Each replica
reads a copy, whose gradient is that of the replica alone:

            ┌─► copy   replica 0   gradient of rows 0 1 2 ─┐
    table ──┤                                              ├─► gradient of rows 0 1 2, their sum
            └─► copy   replica 1   gradient of rows 0 1 2 ─┘

TensorFlow lists the lookups of one weight in an order that depends on how the weight is read. So the trial that finds
the kinds of lookups reads copies of the tables, as the steps do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import tf_divided_memory
from tfpar.pipeline.execution.row_gradients import added, joined, numbered
from tfpar.reduction.gradient_addition import plus
from tfpar.reduction.indexed_slices import Kind
from tfpar.strategies.gradient_sums import lookups_of
from tfpar.strategies.lookup_trials import find_kinds
from tfpar.strategies.tensor_parallel.pieces import sent


class Tables(NamedTuple):
    """The tables of a model.

    Args:
        pieces: The pieces of each table in turn; a table that is not divided is its own piece.
        places: The place of each among the pieces of all trained weights.
        kinds: The kinds of the lookups of each piece.
        num_pieces: The number of the pieces of all trained weights.
        failure: Why the tables are not known; empty if they are.
    """

    pieces: Sequence[keras.Variable] = ()
    places: Sequence[int] = ()
    kinds: tuple[tuple[Kind, ...], ...] = ()
    num_pieces: int = 0
    failure: str = ""


Gradients = Callable[[Any, Callable[[tf.GradientTape], "TableCopies"] | None], Sequence[Any]]


def find_tables(model: keras.Model, batch: Any, gradients: Gradients) -> Tables:
    """Return the tables of a model, from trials on a few examples.

    Args:
        model: A built and compiled model.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given.
        gradients: Returns for a batch the gradients of the pieces of the trained weights without replicas; or those of
            copies, which a function returns for a tape.

    Raises:
        ValueError: If row numbers of a part of a batch can differ from those of the whole batch, or a layer hides the
            gradient of a table.
    """
    weights = [(weight, tf_divided_memory.pieces_of(weight)) for weight in model.trainable_variables]
    pieces = [piece for _, of_one in weights for piece in of_one]
    owners = [weight for weight, of_one in weights for _ in of_one]
    found = find_kinds(lambda part: gradients(part, None), pieces, model.run_eagerly, batch)
    if found.failure:
        return Tables(num_pieces=len(pieces), failure=found.failure)
    are_tables = {id(owner) for owner, kinds in zip(owners, found.kinds, strict=True) if {*kinds} - {"listed"}}
    places = [place for place, owner in enumerate(owners) if id(owner) in are_tables]
    tables = Tables([pieces[place] for place in places], places, ((),) * len(places), len(pieces))
    if not places:
        return tables
    copying = functools.partial(TableCopies, tables)
    again = find_kinds(lambda part: gradients(part, copying), tables.pieces, model.run_eagerly, batch)
    for place, kinds in zip(places, again.kinds or [[]] * len(places), strict=True):
        if sorted(kinds) != sorted(found.kinds[place]):
            raise ValueError(
                f"Replicas add the rows of the table {owners[place].path!r} by the gradients of copies, which "
                "keras.RematScope and custom gradients of a function that reads it hide. Look up its rows outside of "
                "these, or use TensorParallel without replicas."
            )
    only_first = 1 if model.run_eagerly else None  # an eager gradient has the rows of all lookups, of one kind
    return tables._replace(kinds=tuple(tuple(kinds[:only_first]) for kinds in again.kinds))


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
            ValueError: If the trial failed, and a gradient has lookups; or other weights are trained now.
        """
        pieces, places, kinds, num_pieces, failure = self._tables
        if len(gradients) != num_pieces:
            raise ValueError(
                f"The trained weights are those of the compilation, received {len(gradients)} pieces in place of "
                f"{num_pieces}. Call compile() after a change of `trainable`."
            )
        for gradient in gradients if failure else ():
            lookups_of(gradient, [], failure)
        if not pieces:
            return list(gradients)
        parts = [of_copies[start : start + len(pieces)] for start in range(0, len(of_copies), len(pieces))]
        rows = [[_by_lookup(*one) for one in zip(part, kinds, strict=True)] for part in parts]
        # A batch of another structure may have a dense gradient.
        of_rows = tuple(one if isinstance(first, tuple) else () for one, first in zip(kinds, rows[0], strict=True))
        sums = dict(zip(places, joined(added(rows, of_rows, pieces), of_rows, pieces), strict=True))
        # A regularizer of the loss reads the table.
        return [plus(sums.get(place), gradient) for place, gradient in enumerate(gradients)]


def _by_lookup(gradient: Any, kinds: Sequence[Kind]) -> Any:
    """Return the rows of each lookup of a gradient, or a dense gradient as it is."""
    return tuple(numbered(rows, kind) for rows, kind in lookups_of(gradient, kinds, "")) or gradient
