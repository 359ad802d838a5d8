"""The micro-batches of a global batch, and the weight of each."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar.pipeline.execution.bundles import is_copied
from tfpar.pipeline.execution.peers import LocalPart
from tfpar.pipeline.execution.row_padding import Rows
from tfpar.pipeline.graph.ir import Value

HOST = "CPU:0"


class Share(NamedTuple):
    """What the devices of one replica read of a batch, on the host or on those devices.

    Args:
        begin: The index of its first example in the batch, an int64 scalar; None where it is the whole batch.
        values: The inputs of the graph, for each pair of a value and a device of the replica that takes it.
        others: The targets and weights; None where those of the batch are on the last device of the replica.
    """

    begin: tf.Tensor | None
    values: list[Any]
    others: list[Any] | None


class StagedBatch(NamedTuple):
    """A batch, and the tensors that the devices of each replica read.

    Args:
        batch: `(inputs, targets, sample_weight)` as far as given, the inputs as the model is called with them.
        shares: The share of each replica.
    """

    batch: Any
    shares: list[Share]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Consecutive examples of a global batch.

    With fewer examples than micro-batches, some micro-batches repeat an example with weight 0: layers, and TensorFlow's
    fused convolutions, do not support empty batches.

    Args:
        batch: The examples, in the structure of the global batch.
        num_counted: The number of examples with weight 1, an int64 scalar.
        size: The number of examples, an int64 scalar, at least 1.
        num_examples: The number of examples of the global batch, an int64 scalar.
        padded_size: The number of examples to which a stage that XLA compiles may pad it, an int64 scalar.
        values: The inputs of the graph for the examples, by value and device.
    """

    batch: Any
    num_counted: tf.Tensor
    size: tf.Tensor
    num_examples: tf.Tensor
    padded_size: tf.Tensor
    values: Mapping[tuple[Value, str], Any]

    @property
    def rows(self) -> Rows:
        """The numbers of its examples, without and with padding."""
        return Rows(self.size, self.padded_size)

    @property
    def example_weight(self) -> tf.Tensor:
        """The weight of each example: 1, or 0 if it is repeated; a scalar in Keras' float type."""
        with tf.device("CPU:0"):
            return tf.cast(self.num_counted > 0, keras.config.floatx())

    @property
    def part(self) -> tf.Tensor:
        """Its part of the examples of the global batch, from 0 to 1, a float64 scalar."""
        with tf.device("CPU:0"):
            return tf.cast(self.num_counted, tf.float64) / tf.cast(self.num_examples, tf.float64)


class Microbatches:
    """The micro-batches of a global batch, whose sizes differ by at most one.

        7 examples, 3 micro-batches:  0 1 2 | 3 4 | 5 6          2 examples, 3 micro-batches:  0 | 1 | (1)

    They are cut in the memory of the host, so that no device receives examples that its stage does not take; or, where
    all examples are on the devices that take them, there.

    Args:
        batch: A structure of tensors or None, `[batch, ...]` each, at least one example.
        count: The number of micro-batches.
        usual_size: The number of examples to which smaller micro-batches are padded, an int64 scalar; None for that of
            the largest micro-batch of this batch.
        part: The part of the global batch that `batch` is on this worker; None where it is all of it.
        first_number: The number of micro-batches of the global batch on workers of lower ranks.

    Example:
        >>> microbatches = Microbatches(tf.zeros([7, 2]), 3)
        >>> [int(microbatches[number].size) for number in range(3)]
        [3, 2, 2]
    """

    def __init__(
        self,
        batch: Any,
        count: int,
        usual_size: tf.Tensor | None = None,
        part: LocalPart | None = None,
        first_number: int = 0,
    ) -> None:
        self._batch, self.count, self.first_number = batch, count, first_number
        self._share: Share | None = None
        self._takers: Sequence[tuple[Value, str]] = ()
        self._last_device: str | None = None
        with tf.device("CPU:0"):
            self._num_rows = data.num_rows(batch)
            self.num_counted, self.num_examples = part or (self._num_rows, self._num_rows)
            largest = -(-tf.maximum(self.num_counted, 1) // count)
            self._padded_size = largest if usual_size is None else tf.maximum(largest, usual_size)

    def reading(self, share: Share, takers: Sequence[tuple[Value, str]], last_device: str | None) -> Microbatches:
        """Return the same micro-batches, whose examples are read from the share of a replica.

        Args:
            share: The share, which has the examples of all micro-batches of the replica.
            takers: The value and the device of each of its values.
            last_device: The device that holds the targets and weights, if the devices hold their tensors; None if the
                host holds all of them.
        """
        found = copy.copy(self)
        found._share, found._takers, found._last_device = share, takers, last_device
        return found

    def share(self, numbers: range, values: Sequence[Any], others: Sequence[Any]) -> Share:
        """Return the examples of consecutive micro-batches.

        Args:
            numbers: The indices of the micro-batches.
            values: Inputs of the graph for the whole batch.
            others: The targets and weights of the whole batch.
        """
        with tf.device("CPU:0"):
            cut = _Cut(self._cut(numbers[0]).begin, self._cut(numbers[-1]).end)
        rows = {id(value): cut.rows(value, HOST) for value in values}
        return Share(cut.begin, [rows[id(value)] for value in values], [cut.rows(one, HOST) for one in others])

    def __getitem__(self, number: int | tf.Tensor) -> Microbatch:
        """Return a micro-batch by its index, an integer or an int64 scalar."""
        with tf.device("CPU:0"):
            num_counted, cut = self._num_counted(number), self._cut(number)
            begin = None if self._share is None else self._share.begin
            in_share = cut if begin is None else _Cut(cut.begin - begin, cut.end - begin)
            size = cut.end - cut.begin
        on_devices = self._last_device is not None
        pairs = zip(self._takers, self._share.values if self._share else (), strict=True)
        values = {key: in_share.rows(value, key[1] if on_devices else HOST) for key, value in pairs}
        if self._last_device is None:
            batch = cut.rows(self._batch, HOST)
        else:
            inputs, *others = self._batch
            if self._share is not None and self._share.others is not None:
                others = self._share.others
            batch = cut.rows(inputs, HOST), *(in_share.rows(one, self._last_device) for one in others)
        return Microbatch(batch, num_counted, size, self.num_examples, self._padded_size, values)

    def _bounds(self, number: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        begin, end = (-(-(number + more) * self.num_counted // self.count) for more in (0, 1))
        return begin, end

    def _num_counted(self, number: int | tf.Tensor) -> tf.Tensor:
        begin, end = self._bounds(number)
        return end - begin

    def _cut(self, number: int | tf.Tensor) -> _Cut:
        """Return the examples of a micro-batch, at least one."""
        begin, end = self._bounds(number)
        first = tf.minimum(begin, self._num_rows - 1)
        return _Cut(first, tf.maximum(end, first + 1))


class _Cut(NamedTuple):
    """The bounds of a micro-batch, int64 scalars of the host."""

    begin: tf.Tensor
    end: tf.Tensor

    def rows(self, structure: Any, device: str) -> Any:
        """Return the rows of all tensors of a structure, cut on a device that holds them."""
        return tf.nest.map_structure(lambda leaf: self._rows(leaf, device), structure)

    def _rows(self, leaf: Any, device: str) -> Any:
        if device == HOST or not is_copied(leaf):
            with tf.device(HOST):
                return data.take_rows(leaf, *self)
        with tf.device(HOST):  # else the bounds are computed on the device, and the host waits for them
            bounds = [tf.stack([bound]) for bound in self]
            stride = tf.ones([1], tf.int64)
        with tf.device(device):
            return tf.strided_slice(leaf, *bounds, stride)
