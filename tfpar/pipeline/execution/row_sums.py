"""Sums of sparse gradient rows over micro-batches, replicas and workers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.pipeline.execution.live_tensors import Key, LiveTensors
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.stages.sparse_rows import Kinds
from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.gradients.gradient_addition import sum_of
from tfpar.reduction.gradients.indexed_slices import RowSlices


class RowSums:
    """The rows of the lookups of parameters, over the micro-batches of a step.

    Rows with the same numbers in every micro-batch, such as positions, are added; others are collected.

    Args:
        live: The tensors that the step holds between two actions.
        owner: The stage, or the loss.
        like: For each parameter its gradient in a traced graph; a tuple has the rows of each lookup.
        kinds: The kind of each lookup of each parameter.
        device: The device of the rows.
    """

    def __init__(self, live: LiveTensors, owner: Hashable, like: Sequence[Any], kinds: Kinds, device: str) -> None:
        self._live, self._owner, self._like, self._kinds, self._device = live, owner, like, kinds, device

    def add(self, gradients: Sequence[Any]) -> None:
        """Add the rows of a micro-batch, one item for each parameter; items that are no tuples are ignored."""
        with tf.device(self._device):
            for place, rows in self._lookups(gradients, equal=True):
                key = Key("equal rows", (self._owner, place))
                before = self._live.get(key)
                self._live[key] = rows if before is None else rows._replace(values=before.values + rows.values)
            others = [part for _, rows in self._lookups(gradients, equal=False) for part in _with_long_numbers(rows)]
            if others:
                self._live.enqueue(Key("rows", self._owner), others, self._device)

    def total(self) -> list[Any]:
        """Return for each parameter a tuple with the rows of each lookup, or None; hold them no longer."""
        flat = self._live.dequeue_all(Key("rows", self._owner), self._device)
        with tf.device(self._device):
            rows = {}
            for index, (place, _) in enumerate(self._lookups(self._like, equal=False)):
                slices = [RowSlices(*tensors[2 * index : 2 * index + 2]) for tensors in flat]
                parts = [numbered(of_microbatch, self._kind(place)) for of_microbatch in slices]
                rows[place] = RowSlices(*(tf.concat(some, 0) for some in zip(*parts, strict=True)))
        for place, _ in self._lookups(self._like, equal=True):
            rows[place] = self._live.take(Key("equal rows", (self._owner, place)))
        return [
            tuple(rows[parameter, lookup] for lookup in range(len(gradient))) if isinstance(gradient, tuple) else None
            for parameter, gradient in enumerate(self._like)
        ]

    def _lookups(self, gradients: Sequence[Any], *, equal: bool) -> list[tuple[tuple[int, int], RowSlices]]:
        """Return the rows of lookups with their places, the index of the parameter and of its lookup."""
        return [
            ((parameter, lookup), rows)
            for parameter, gradient in enumerate(gradients)
            if isinstance(gradient, tuple)
            for lookup, rows in enumerate(gradient)
            if (self._kind((parameter, lookup)) == "sum") is equal
        ]

    def _kind(self, place: tuple[int, int]) -> indexed_slices.Kind | None:
        return self._kinds[place[0]][place[1]]


def _with_long_numbers(rows: RowSlices) -> RowSlices:
    return rows._replace(indices=tf.cast(rows.indices, tf.int64))


def numbered(rows: RowSlices, kind: indexed_slices.Kind | None) -> RowSlices:
    """Return the rows of a micro-batch, numbered if they are merged later."""
    return indexed_slices.numbered(rows) if kind == "merge" else rows


def added(replicas: Sequence[Sequence[Any]], kinds: Kinds, weights: Sequence[keras.Variable]) -> list[Any]:
    """Return the gradients of weights, added over the replicas of a pipeline on the device of each weight.

    Args:
        replicas: For each replica the gradient of each weight: a tensor, a tuple with the rows of each lookup, or None.
        kinds: The kind of each lookup of each weight.
        weights: The weights.
    """
    sums = []
    for gradients, of_weight, weight in zip(zip(*replicas, strict=True), kinds, weights, strict=True):
        with tf.device(weight.value.device):
            if isinstance(gradients[0], tuple):
                lookups = zip(zip(*gradients, strict=True), of_weight, strict=True)
                sums.append(tuple(_added_rows(rows, kind) for rows, kind in lookups))
            else:
                sums.append(sum_of(gradients))
    return sums


def added_over_workers(
    gradients: Sequence[Any], kinds: Kinds, weights: Sequence[keras.Variable], peers: Peers
) -> list[Any]:
    """Return the gradients of weights, added over the workers of a job.

    Args:
        gradients: As `added` returns them.
        kinds: The kind of each lookup of each weight.
        weights: The weights.
        peers: The workers.
    """
    dense = [None if isinstance(gradient, tuple) else gradient for gradient in gradients]
    sums = peers.add_gradients(dense, weights)
    return [
        tuple(_rows_of_workers(*lookup, weight, peers) for lookup in zip(gradient, of_weight, strict=True))
        if isinstance(gradient, tuple)
        else total
        for gradient, total, of_weight, weight in zip(gradients, sums, kinds, weights, strict=True)
    ]


def _rows_of_workers(
    rows: RowSlices, kind: indexed_slices.Kind | None, weight: keras.Variable, peers: Peers
) -> RowSlices:
    if kind == "sum":
        (values,) = peers.add_gradients([rows.values], [weight])
        return rows._replace(values=values)
    return RowSlices(*peers.all_gather(list(rows), weight.value.device))


def _added_rows(replicas: Sequence[RowSlices], kind: indexed_slices.Kind | None) -> RowSlices:
    if len(replicas) == 1:
        return replicas[0]
    if kind == "sum":
        return replicas[0]._replace(values=tf.add_n([rows.values for rows in replicas]))
    return RowSlices(*(tf.concat(parts, 0) for parts in zip(*replicas, strict=True)))


def joined(
    gradients: Sequence[Any], kinds: Sequence[Sequence[indexed_slices.Kind | None]], weights: Sequence[keras.Variable]
) -> list[Any]:
    """Return summed gradients of weights as tensors, slices or None, as one device has them, on their devices."""
    whole = []
    for gradient, of_weight, weight in zip(gradients, kinds, weights, strict=True):
        with tf.device(weight.value.device):
            whole.append(join_rows(gradient, of_weight, weight.shape) if of_weight else gradient)
    return whole


def join_rows(
    lookups: Sequence[indexed_slices.RowSlices], kinds: Sequence[indexed_slices.Kind | None], shape: Sequence[int]
) -> tf.IndexedSlices:
    """Return one gradient for the rows of several lookups, merged as on one device."""
    pairs = zip(lookups, kinds, strict=True)
    merged = [indexed_slices.merged(rows) if kind == "merge" else rows for rows, kind in pairs]
    with tf.device("CPU:0"):  # a size, which a GPU would have in its own memory
        dense_shape = tf.constant(tuple(shape), tf.int64)
    return indexed_slices.join([rows._replace(indices=tf.cast(rows.indices, tf.int64)) for rows in merged], dense_shape)
