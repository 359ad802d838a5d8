"""Scores of many classes that are computed again, a chunk of rows at a time, wherever they are read.

    inputs [n, width] ─► rows 0 .. c   ─► scores [c, size] ─► results [c] ─┐
                         rows c .. 2c  ─► scores [c, size] ─► results [c] ─┼─► results [n]
                         ...                                               ─┘

The scores of all rows never exist at once, nor do their gradients. The price is one more product of the inputs and the
weights in the backward pass, and one for each metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# Scores of fewer classes, or that take fewer bytes on a device, are kept: this is faster.
LEAST_CLASSES, LEAST_BYTES = 2**14, 2**28
CHUNK_BYTES = 2**24


class RowScores(NamedTuple):
    """How a piece of the scores is computed, each row from the same row of its inputs.

    Args:
        inputs: `[..., width]`.
        weights: What the scores of all rows share.
        function: Returns the scores `[rows, size]` of inputs `[rows, width]` and the weights.
        kept: The scores of all rows, `[rows, size]`, where they take few bytes, and else those of no row; None for
            unknown.
    """

    inputs: tf.Tensor
    weights: tuple[tf.Tensor, ...]
    function: Callable[..., tf.Tensor]
    kept: tf.Tensor | None = None

    def then(self, function: Callable[[tf.Tensor], tf.Tensor]) -> RowScores:
        """Return the computation of another value of each score.

        Args:
            function: A function of scores that treats elements separately.
        """
        before = self.function
        kept = None if self.kept is None else function(self.kept)
        return self._replace(function=lambda *args: function(before(*args)), kept=kept)

    def keeping(self, piece: tf.Tensor) -> RowScores:
        """Return the computation with the scores of a batch that is small.

        Args:
            piece: The scores as they are computed, `[..., size]`; nothing reads them.
        """
        size, width = int(piece.shape[-1]), self.inputs.shape[-1]
        rows = tf.reshape(self.inputs, [-1, width])
        is_small = tf.shape(rows, tf.int64)[0] * (size * piece.dtype.size) < LEAST_BYTES
        kept = tf.cond(is_small, lambda: self.function(rows, *self.weights), lambda: tf.zeros([0, size], piece.dtype))
        return self._replace(kept=tf.ensure_shape(kept, [None, size]))


def are_recomputed(pieces: Sequence[tf.Tensor]) -> bool:
    """Return whether scores are large enough to compute them again where they are read.

    Args:
        pieces: The scores in pieces of the classes, `[batch, ..., classes]` together.
    """
    if not tf.is_symbolic_tensor(pieces[0]) or pieces[0].shape.rank is None or pieces[0].shape.rank < 2:
        return False
    if sum(int(piece.shape[-1]) for piece in pieces) < LEAST_CLASSES:
        return False
    sizes = [piece.shape.num_elements() for piece in pieces]
    return any(size is None or size * pieces[0].dtype.size >= LEAST_BYTES for size in sizes)


def over_rows(
    scores: RowScores,
    function: Callable[..., Sequence[tf.Tensor]],
    arguments: Sequence[tf.Tensor],
    results: Sequence[tf.DType],
    size: int,
) -> list[tf.Tensor]:
    """Return results of the scores of each row, `[rows]` each.

    Args:
        scores: The scores of a piece.
        function: Takes the scores of some rows, `[chunk, size]`, and these rows of the arguments; returns `[chunk]`
            results.
        arguments: What it needs of each row, `[rows]` each.
        results: The type of each result.
        size: The number of columns of the scores.
    """

    def walk(*kept: tf.Tensor) -> list[tf.Tensor]:
        def of_chunk(inputs: tf.Tensor, *given: tf.Tensor) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
            return (function(*given) if kept else function(scores.function(inputs, *scores.weights), *given)), ()

        specs = [tf.TensorSpec([None], dtype) for dtype in results]
        return _walk(scores, of_chunk, [*kept, *arguments], specs, (), size)[0]

    return _by_size(scores, walk)


def gradients(
    scores: RowScores, function: Callable[..., tf.Tensor], arguments: Sequence[tf.Tensor], size: int
) -> list[tf.Tensor]:
    """Return the gradients of the inputs and of the weights.

    Those of weights of less than 32 bits are added up in 32 bits.

    Args:
        scores: The scores of a piece.
        function: Returns the gradient of the scores of some rows, from the scores and the rows of the arguments.
        arguments: What it needs of each row, `[rows]` each.
        size: The number of columns of the scores.
    """

    def walk(*kept: tf.Tensor) -> list[tf.Tensor]:
        def of_chunk(inputs: tf.Tensor, *given: tf.Tensor) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
            sources = [inputs, *map(tf.identity, scores.weights)]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                found = scores.function(*sources)
            here = given if kept else (tf.stop_gradient(found), *given)
            first, *others = tape.gradient(found, sources, function(*here))
            return [first], others

        sums = [tf.zeros(tf.shape(one), _sum_dtype(one)) for one in scores.weights]
        spec = tf.TensorSpec([None, scores.inputs.shape[-1]], scores.inputs.dtype)
        rows, totals = _walk(scores, of_chunk, [*kept, *arguments], [spec], sums, size)
        return [*rows, *(tf.cast(total, one.dtype) for total, one in zip(totals, scores.weights, strict=True))]

    first, *others = _by_size(scores, walk)
    return [tf.reshape(first, tf.shape(scores.inputs)), *others]


def _by_size(scores: RowScores, walk: Callable[..., list[tf.Tensor]]) -> list[tf.Tensor]:
    """Return what a walk over rows returns that takes the scores where they are kept, and else nothing."""
    if scores.kept is None:
        return walk()
    found: list[tf.Tensor] = tf.cond(tf.size(scores.kept) > 0, lambda: walk(scores.kept), walk)
    return found


def _sum_dtype(weight: tf.Tensor) -> tf.DType:
    return tf.float32 if weight.dtype.size < tf.float32.size else weight.dtype


def _rows_of_a_chunk(scores: RowScores, size: int) -> int:
    """Return the number of rows: a chunk takes `CHUNK_BYTES`, or what a matrix of weights takes."""
    return max(1, CHUNK_BYTES // (size * int(tf.float32.size)), int(scores.inputs.shape[-1]))


def _walk(
    scores: RowScores,
    function: Callable[..., tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]],
    arguments: Sequence[tf.Tensor],
    results: Sequence[tf.TensorSpec],
    sums: Sequence[tf.Tensor],
    size: int,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the results of all rows, and sums over the chunks.

    Args:
        scores: The scores of a piece.
        function: Returns the results of some rows, and what to add to the sums.
        arguments: What it needs of each row.
        results: The type and shape of each result, `[None, ...]`.
        sums: Zeros.
        size: The number of columns of the scores.
    """
    rows = tf.reshape(scores.inputs, [-1, scores.inputs.shape[-1]])
    count, most = tf.shape(rows)[0], _rows_of_a_chunk(scores, size)
    num_chunks = tf.maximum(1, (count + most - 1) // most)
    chunk = (count + num_chunks - 1) // num_chunks
    arrays = [tf.TensorArray(one.dtype, num_chunks, element_shape=one.shape, infer_shape=False) for one in results]

    def step(index: tf.Tensor, arrays: list[tf.TensorArray], sums: list[tf.Tensor]) -> Any:
        here = slice(index * chunk, (index + 1) * chunk)
        found, addends = function(rows[here], *(one[here] for one in arguments))
        arrays = [array.write(index, one) for array, one in zip(arrays, found, strict=True)]
        sums = [total + tf.cast(one, total.dtype) for total, one in zip(sums, addends, strict=True)]
        return index + 1, arrays, sums

    _, arrays, totals = tf.while_loop(
        lambda index, *_: index < num_chunks,
        step,
        (tf.constant(0), arrays, list(sums)),
        parallel_iterations=1,  # else several chunks would exist at once
    )
    return [array.concat() for array in arrays], totals
