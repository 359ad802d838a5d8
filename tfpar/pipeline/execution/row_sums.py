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
    """The sparse gradient rows of parameters, accumulated over the micro-batches of a step.

    Rows with the same indices in every micro-batch, such as positions, are added. Others are collected.

    Args:
        live: The live tensors of the step.
        owner: The stage, or the loss.
        like: The gradient of each parameter in a traced graph; a tuple for the rows of each lookup.
        kinds: The kind of each lookup in each parameter.
        device: The device of the rows.
    """

    def __init__(self, live: LiveTensors, owner: Hashable, like: Sequence[Any], kinds: Kinds, device: str) -> None:
        self._live, self._owner, self._like, self._kinds, self._device = live, owner, like, kinds, device

    def add(self, gradients: Sequence[Any]) -> None:
        """Add the gradient of each parameter for a micro-batch. Dense gradients are ignored."""
        with tf.device(self._device):
            for lookup, rows in self._lookups(gradients, equal=True):
                key = Key("equal rows", (self._owner, lookup))
                before = self._live.get(key)
                self._live[key] = rows if before is None else rows._replace(values=before.values + rows.values)
            others = [tensor for _, rows in self._lookups(gradients, equal=False) for tensor in _with_int64(rows)]
            if others:
                self._live.enqueue(Key("rows", self._owner), others, self._device)

    def total(self) -> list[Any]:
        """Remove and return the accumulated rows: for each parameter a tuple with those of each lookup, or None."""
        flat = self._live.dequeue_all(Key("rows", self._owner), self._device)
        with tf.device(self._device):
            rows = {}
            for index, (lookup, _) in enumerate(self._lookups(self._like, equal=False)):
                slices = [RowSlices(*tensors[2 * index : 2 * index + 2]) for tensors in flat]
                if self._kind(lookup) == "merge":  # to merge the rows of each micro-batch separately
                    slices = list(map(indexed_slices.numbered, slices))
                rows[lookup] = _concat(slices)
        for lookup, _ in self._lookups(self._like, equal=True):
            rows[lookup] = self._live.take(Key("equal rows", (self._owner, lookup)))
        return [
            tuple(rows[parameter, lookup] for lookup in range(len(gradient))) if isinstance(gradient, tuple) else None
            for parameter, gradient in enumerate(self._like)
        ]

    def _lookups(self, gradients: Sequence[Any], *, equal: bool) -> list[tuple[tuple[int, int], RowSlices]]:
        """Return the rows of each lookup, with the indices of the parameter and of its lookup."""
        return [
            ((parameter, lookup), rows)
            for parameter, gradient in enumerate(gradients)
            if isinstance(gradient, tuple)
            for lookup, rows in enumerate(gradient)
            if (self._kind((parameter, lookup)) == "sum") is equal
        ]

    def _kind(self, lookup: tuple[int, int]) -> indexed_slices.Kind | None:
        parameter, index = lookup
        return self._kinds[parameter][index]


def _with_int64(rows: RowSlices) -> RowSlices:
    return rows._replace(indices=tf.cast(rows.indices, tf.int64))


def _concat(slices: Sequence[RowSlices]) -> RowSlices:
    return RowSlices(*(tf.concat(tensors, 0) for tensors in zip(*slices, strict=True)))


def sum_over_replicas(replicas: Sequence[Sequence[Any]], kinds: Kinds, weights: Sequence[keras.Variable]) -> list[Any]:
    """Sum the gradient of each weight over the replicas of a pipeline, on the device of the weight.

    Args:
        replicas: For each replica, the gradient of each weight: a tensor, a tuple with the rows of each lookup, or
            None.
        kinds: The kind of each lookup in each weight.
        weights: The weights.
    """
    sums = []
    for gradients, lookup_kinds, weight in zip(zip(*replicas, strict=True), kinds, weights, strict=True):
        with tf.device(weight.value.device):
            if isinstance(gradients[0], tuple):
                lookups = zip(zip(*gradients, strict=True), lookup_kinds, strict=True)
                sums.append(tuple(_sum_rows(rows, kind) for rows, kind in lookups))
            else:
                sums.append(sum_of(gradients))
    return sums


def sum_over_workers(
    gradients: Sequence[Any], kinds: Kinds, weights: Sequence[keras.Variable], peers: Peers
) -> list[Any]:
    """Sum the gradient of each weight over the workers of a job.

    Args:
        gradients: The result of `sum_over_replicas`.
        kinds: The kind of each lookup in each weight.
        weights: The weights.
        peers: The workers.
    """
    dense = [None if isinstance(gradient, tuple) else gradient for gradient in gradients]
    sums = peers.add_gradients(dense, weights)
    return [
        tuple(_sum_worker_rows(*lookup, weight, peers) for lookup in zip(gradient, lookup_kinds, strict=True))
        if isinstance(gradient, tuple)
        else total
        for gradient, total, lookup_kinds, weight in zip(gradients, sums, kinds, weights, strict=True)
    ]


def _sum_worker_rows(
    rows: RowSlices, kind: indexed_slices.Kind | None, weight: keras.Variable, peers: Peers
) -> RowSlices:
    if kind == "sum":
        (values,) = peers.add_gradients([rows.values], [weight])
        return rows._replace(values=values)
    return RowSlices(*peers.all_gather(list(rows), weight.value.device))


def _sum_rows(replicas: Sequence[RowSlices], kind: indexed_slices.Kind | None) -> RowSlices:
    if len(replicas) == 1:
        return replicas[0]
    if kind == "sum":
        return replicas[0]._replace(values=tf.add_n([rows.values for rows in replicas]))
    return _concat(replicas)


def to_slices(gradients: Sequence[Any], kinds: Kinds, weights: Sequence[keras.Variable]) -> list[Any]:
    """Convert the rows of lookups to one `tf.IndexedSlices` for each weight, as on one device."""
    converted = []
    for gradient, lookup_kinds, weight in zip(gradients, kinds, weights, strict=True):
        with tf.device(weight.value.device):
            converted.append(_join_lookups(gradient, lookup_kinds, weight.shape) if lookup_kinds else gradient)
    return converted


def _join_lookups(
    lookups: Sequence[RowSlices], kinds: Sequence[indexed_slices.Kind | None], shape: Sequence[int]
) -> tf.IndexedSlices:
    pairs = zip(lookups, kinds, strict=True)
    merged = [indexed_slices.merged(rows) if kind == "merge" else rows for rows, kind in pairs]
    with tf.device("CPU:0"):  # otherwise the size is in the memory of the GPU
        dense_shape = tf.constant(tuple(shape), tf.int64)
    return indexed_slices.join(list(map(_with_int64, merged)), dense_shape)
