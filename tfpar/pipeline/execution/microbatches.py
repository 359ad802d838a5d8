"""The micro-batches of a global batch."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_distribute
from tfpar.pipeline.execution.other_workers import BatchSizes
from tfpar.pipeline.graph.ir import Value
from tfpar.pipeline.stages.bundles import is_copied
from tfpar.pipeline.stages.padding import Rows

HOST = "CPU:0"


def host_of(device: str) -> str:
    """Return the CPU of the process of a device; names without a task mean this process.

    Example:
        >>> host_of("GPU:1"), host_of("/job:worker/replica:0/task:1/device:GPU:0")
        ('CPU:0', '/job:worker/replica:0/task:1/device:CPU:0')
    """
    is_named_in_full = tf.DeviceSpec.from_string(device).task is not None
    return tf_distribute.host_of(device) if is_named_in_full else HOST


class Share(NamedTuple):
    """The tensors of a batch that the devices of one replica read.

    Args:
        begin: The index of its first example in the batch, an int64 scalar; None for the whole batch.
        values: The graph input for each reader, a pair of a value and a device of the replica.
        others: The targets and weights; None if those of the batch are on the last device of the replica.
    """

    begin: tf.Tensor | None
    values: list[Any]
    others: list[Any] | None


class StagedBatch(NamedTuple):
    """A batch, and the tensors that the devices of each replica read.

    Args:
        batch: `(inputs, targets, sample_weight)`, the last two optional.
        shares: The share of each replica.
    """

    batch: Any
    shares: list[Share]


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """Consecutive examples of a global batch.

    If there are fewer examples than micro-batches, some micro-batches repeat an example with weight 0, because layers
    and TensorFlow's fused convolutions do not support empty batches.

    Args:
        batch: The examples, in the structure of the global batch.
        num_counted: The number of examples with weight 1, an int64 scalar.
        size: The number of examples, an int64 scalar, at least 1.
        num_examples: The size of the global batch, an int64 scalar.
        padded_size: The size to which stages compiled by XLA may pad the micro-batch, an int64 scalar.
        values: The graph inputs by value and device.
        host: The device of the scalars.
    """

    batch: Any
    num_counted: tf.Tensor
    size: tf.Tensor
    num_examples: tf.Tensor
    padded_size: tf.Tensor
    values: Mapping[tuple[Value, str], Any]
    host: str = HOST

    @property
    def rows(self) -> Rows:
        """The size with and without padding."""
        return Rows(self.size, self.padded_size)

    @property
    def example_weight(self) -> tf.Tensor:
        """The weight of each example: 1, or 0 for a repeated example; a scalar in Keras' float type."""
        with tf.device(self.host):
            return tf.cast(self.num_counted > 0, keras.config.floatx())

    @property
    def fraction(self) -> tf.Tensor:
        """The fraction of the global batch in this micro-batch, from 0 to 1, a float64 scalar."""
        with tf.device(self.host):
            return tf.cast(self.num_counted, tf.float64) / tf.cast(self.num_examples, tf.float64)


class Microbatches:
    """The micro-batches of a global batch, whose sizes differ by at most one.

        7 examples, 3 micro-batches:  0 1 2 | 3 4 | 5 6          2 examples, 3 micro-batches:  0 | 1 | (1)

    The batch is cut on the devices that read it if it is there already, and otherwise on the host, so that no device
    receives examples that it does not read. Each process with stages computes the sizes itself.

    Args:
        batch: A structure of tensors or None, `[batch, ...]` each, at least one example.
        count: Number of micro-batches.
        usual_size: Size to which smaller micro-batches are padded, an int64 scalar. Defaults to the largest micro-batch
            of this batch.
        sizes: The sizes of the local and the global batch, if they differ.
        first_number: Number of micro-batches of the global batch on workers of lower rank.
        hosts: The hosts of all processes that run stages.

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
        sizes: BatchSizes | None = None,
        first_number: int = 0,
        hosts: Collection[str] = (),
    ) -> None:
        self._batch, self.count, self.first_number = batch, count, first_number
        self._share: Share | None = None
        self._readers: Sequence[tuple[Value, str]] = ()
        self._last_device: str | None = None
        self._begins: dict[str, tf.Tensor] = {}
        with tf.device(HOST):
            num_rows = data.num_rows(batch)
            self.num_counted, self.num_examples = sizes or (num_rows, num_rows)
            largest = -(-tf.maximum(self.num_counted, 1) // count)
            padded_size = largest if usual_size is None else tf.maximum(largest, usual_size)
        self._counts = {HOST: _Counts(num_rows, self.num_counted, self.num_examples, padded_size)}
        for host in sorted({*hosts} - {HOST}):
            with tf.device(host):
                self._counts[host] = _Counts(*map(tf.identity, self._counts[HOST]))

    def for_replica(self, share: Share, readers: Sequence[tuple[Value, str]], last_device: str | None) -> Microbatches:
        """Return the same micro-batches, cut from the share of one replica.

        Args:
            share: The share, with the examples of all micro-batches of the replica.
            readers: The value and device of each of `share.values`.
            last_device: The device of the targets and weights; None if the share is on the host.
        """
        microbatches = copy.copy(self)
        microbatches._begins = {}
        microbatches._share, microbatches._readers, microbatches._last_device = share, readers, last_device
        for host in self._counts if share.begin is not None else ():
            with tf.device(host):
                microbatches._begins[host] = tf.identity(share.begin)
        return microbatches

    def whole(self, examples: Any, host: str) -> Microbatch:
        """Return all examples of the global batch as one micro-batch.

        Args:
            examples: The examples of all workers.
            host: The host of the device that reads them.
        """
        size = self._counts[host].num_examples
        return Microbatch(examples, size, size, size, size, {}, host)

    def share(self, numbers: range, values: Sequence[Any], others: Sequence[Any]) -> Share:
        """Return the examples of consecutive micro-batches.

        Args:
            numbers: Indices of the micro-batches.
            values: Graph inputs for the whole batch.
            others: Targets and weights of the whole batch.
        """
        with tf.device(HOST):
            cut = self._cut(numbers[0], HOST)._replace(end=self._cut(numbers[-1], HOST).end)
        rows = {id(value): _rows(value, HOST, lambda host: cut) for value in values}
        return Share(cut.begin, [rows[id(value)] for value in values], _rows(list(others), HOST, lambda host: cut))

    def __getitem__(self, number: int | tf.Tensor) -> Microbatch:
        """Return a micro-batch by its index, an integer or an int64 scalar."""
        return self.at(lambda host: number, HOST)

    def at(self, index: Callable[[str], int | tf.Tensor], host: str) -> Microbatch:
        """Return a micro-batch for the stages of a process.

        Args:
            index: Returns the index of the micro-batch on a host, an integer or an int64 scalar.
            host: The host of the process.
        """
        cut_on = functools.cache(lambda place: self._cut(index(place), place))
        in_share_on = functools.cache(lambda place: self._in_share(cut_on(place), place))
        on_devices = self._last_device is not None
        values = {
            key: _rows(value, key[1] if on_devices else HOST, in_share_on)
            for key, value in zip(self._readers, self._share.values if self._share else (), strict=True)
            if host in (HOST, host_of(key[1]))
        }
        if self._last_device is None:
            batch = _rows(self._batch, HOST, cut_on)
        else:
            inputs, *others = self._batch
            if self._share is not None and self._share.others is not None:
                others = self._share.others
            batch = _rows(inputs, HOST, cut_on), *_rows(list(others), self._last_device, in_share_on)
        counts, cut = self._counts[host], cut_on(host)
        with tf.device(host):
            size = cut.end - cut.begin
        return Microbatch(batch, cut.num_counted, size, counts.num_examples, counts.padded_size, values, host)

    def _cut(self, number: int | tf.Tensor, host: str) -> _Cut:
        """Return the bounds of a micro-batch, with at least one example."""
        num_rows, num_counted, _, _ = self._counts[host]
        with tf.device(host):
            begin, end = (-(-(number + offset) * num_counted // self.count) for offset in (0, 1))
            first = tf.minimum(begin, num_rows - 1)
            return _Cut(first, tf.maximum(end, first + 1), end - begin)

    def _in_share(self, cut: _Cut, host: str) -> _Cut:
        if host not in self._begins:
            return cut
        with tf.device(host):
            return cut._replace(begin=cut.begin - self._begins[host], end=cut.end - self._begins[host])


class _Counts(NamedTuple):
    """The sizes of a batch, int64 scalars on one host."""

    num_rows: tf.Tensor
    num_counted: tf.Tensor
    num_examples: tf.Tensor
    padded_size: tf.Tensor


class _Cut(NamedTuple):
    """The bounds of a micro-batch, and its number of examples with weight 1, int64 scalars on one host."""

    begin: tf.Tensor
    end: tf.Tensor
    num_counted: tf.Tensor


def _rows(structure: Any, device: str, cut_on: Callable[[str], _Cut]) -> Any:
    """Return the rows of a micro-batch from all tensors in a structure on a device."""

    def rows(leaf: Any) -> Any:
        if device == HOST or not is_copied(leaf):
            begin, end, _ = cut_on(HOST)
            with tf.device(HOST):
                return data.take_rows(leaf, begin, end)
        begin, end, _ = cut_on(host_of(device))
        return rows_between(leaf, begin, end, device)

    return tf.nest.map_structure(rows, structure)


def rows_between(tensor: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, device: str) -> tf.Tensor:
    """Return consecutive rows of a dense tensor.

    Args:
        tensor: The tensor.
        begin: The first row, an int64 scalar on the host.
        end: The row after the last, an int64 scalar on the host.
        device: The device of the tensor.
    """
    with tf.device(host_of(device)):  # otherwise the host waits for the device to compute the bounds
        bounds = [tf.stack([bound]) for bound in (begin, end)]
        stride = tf.ones([1], tf.int64)
    with tf.device(device):
        return tf.strided_slice(tensor, *bounds, stride)
