"""The micro-batches of a global batch, and the weight of each."""

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
from tfpar.pipeline.execution.other_workers import LocalPart
from tfpar.pipeline.graph.ir import Value
from tfpar.pipeline.stages.bundles import is_copied
from tfpar.pipeline.stages.padding import Rows

HOST = "CPU:0"


def host_of(device: str) -> str:
    """Return the host of a device: the CPU of its process.

    Args:
        device: A full or a partial name; without a task, a device of this process.

    Example:
        >>> host_of("GPU:1"), host_of("/job:worker/replica:0/task:1/device:GPU:0")
        ('CPU:0', '/job:worker/replica:0/task:1/device:CPU:0')
    """
    is_named_in_full = tf.DeviceSpec.from_string(device).task is not None
    return tf_distribute.host_of(device) if is_named_in_full else HOST


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
        """The numbers of its examples, without and with padding."""
        return Rows(self.size, self.padded_size)

    @property
    def example_weight(self) -> tf.Tensor:
        """The weight of each example: 1, or 0 if it is repeated; a scalar in Keras' float type."""
        with tf.device(self.host):
            return tf.cast(self.num_counted > 0, keras.config.floatx())

    @property
    def part(self) -> tf.Tensor:
        """Its part of the examples of the global batch, from 0 to 1, a float64 scalar."""
        with tf.device(self.host):
            return tf.cast(self.num_counted, tf.float64) / tf.cast(self.num_examples, tf.float64)


class Microbatches:
    """The micro-batches of a global batch, whose sizes differ by at most one.

        7 examples, 3 micro-batches:  0 1 2 | 3 4 | 5 6          2 examples, 3 micro-batches:  0 | 1 | (1)

    They are cut in the memory of the host, so that no device receives examples that its stage does not take; or, where
    all examples are on the devices that take them, there. Each process with stages computes their numbers itself.

    Args:
        batch: A structure of tensors or None, `[batch, ...]` each, at least one example.
        count: The number of micro-batches.
        usual_size: The number of examples to which smaller micro-batches are padded, an int64 scalar; None for that of
            the largest micro-batch of this batch.
        part: The part of the global batch that `batch` is on this worker; None where it is all of it.
        first_number: The number of micro-batches of the global batch on workers of lower ranks.
        hosts: Those of all processes that run stages.

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
        hosts: Collection[str] = (),
    ) -> None:
        self._batch, self.count, self.first_number = batch, count, first_number
        self._share: Share | None = None
        self._takers: Sequence[tuple[Value, str]] = ()
        self._last_device: str | None = None
        self._begins: dict[str, tf.Tensor] = {}
        with tf.device(HOST):
            num_rows = data.num_rows(batch)
            self.num_counted, self.num_examples = part or (num_rows, num_rows)
            largest = -(-tf.maximum(self.num_counted, 1) // count)
            padded_size = largest if usual_size is None else tf.maximum(largest, usual_size)
        self._counts = {HOST: _Counts(num_rows, self.num_counted, self.num_examples, padded_size)}
        for host in sorted({*hosts} - {HOST}):
            with tf.device(host):
                self._counts[host] = _Counts(*map(tf.identity, self._counts[HOST]))

    def reading(self, share: Share, takers: Sequence[tuple[Value, str]], last_device: str | None) -> Microbatches:
        """Return the same micro-batches, whose examples are read from the share of a replica.

        Args:
            share: The share, which has the examples of all micro-batches of the replica.
            takers: The value and the device of each of its values.
            last_device: The device that holds the targets and weights, if the devices hold their tensors; None if the
                host holds all of them.
        """
        found = copy.copy(self)
        found._begins = {}
        found._share, found._takers, found._last_device = share, takers, last_device
        for host in self._counts if share.begin is not None else ():
            with tf.device(host):
                found._begins[host] = tf.identity(share.begin)
        return found

    def whole(self, examples: Any, host: str) -> Microbatch:
        """Return all examples of the global batch as one micro-batch.

        Args:
            examples: The examples, those of all workers.
            host: The `host_of` the device that takes them.
        """
        size = self._counts[host].num_examples
        return Microbatch(examples, size, size, size, size, {}, host)

    def share(self, numbers: range, values: Sequence[Any], others: Sequence[Any]) -> Share:
        """Return the examples of consecutive micro-batches.

        Args:
            numbers: The indices of the micro-batches.
            values: Inputs of the graph for the whole batch.
            others: The targets and weights of the whole batch.
        """
        with tf.device(HOST):
            cut = self._cut(numbers[0], HOST)._replace(end=self._cut(numbers[-1], HOST).end)
        rows = {id(value): _rows(value, HOST, lambda host: cut) for value in values}
        own = [_rows(one, HOST, lambda host: cut) for one in others]
        return Share(cut.begin, [rows[id(value)] for value in values], own)

    def __getitem__(self, number: int | tf.Tensor) -> Microbatch:
        """Return a micro-batch by its index, an integer or an int64 scalar."""
        return self.at(lambda host: number, HOST)

    def at(self, index: Callable[[str], int | tf.Tensor], host: str) -> Microbatch:
        """Return a micro-batch for the stages of a process.

        Args:
            index: Returns the index of the micro-batch on a host, an integer or an int64 scalar.
            host: The `host_of` the devices of the stages, which computes its numbers.
        """
        cut_on = functools.cache(lambda place: self._cut(index(place), place))
        in_share_on = functools.cache(lambda place: self._in_share(cut_on(place), place))
        on_devices = self._last_device is not None
        values = {
            key: _rows(value, key[1] if on_devices else HOST, in_share_on)
            for key, value in zip(self._takers, self._share.values if self._share else (), strict=True)
            if host in (HOST, host_of(key[1]))
        }
        if self._last_device is None:
            batch = _rows(self._batch, HOST, cut_on)
        else:
            inputs, *others = self._batch
            if self._share is not None and self._share.others is not None:
                others = self._share.others
            batch = _rows(inputs, HOST, cut_on), *(_rows(one, self._last_device, in_share_on) for one in others)
        counts, cut = self._counts[host], cut_on(host)
        with tf.device(host):
            size = cut.end - cut.begin
        return Microbatch(batch, cut.num_counted, size, counts.num_examples, counts.padded_size, values, host)

    def _cut(self, number: int | tf.Tensor, host: str) -> _Cut:
        """Return the examples of a micro-batch, at least one."""
        num_rows, num_counted, _, _ = self._counts[host]
        with tf.device(host):
            begin, end = (-(-(number + more) * num_counted // self.count) for more in (0, 1))
            first = tf.minimum(begin, num_rows - 1)
            return _Cut(first, tf.maximum(end, first + 1), end - begin)

    def _in_share(self, cut: _Cut, host: str) -> _Cut:
        if host not in self._begins:
            return cut
        with tf.device(host):
            return cut._replace(begin=cut.begin - self._begins[host], end=cut.end - self._begins[host])


class _Counts(NamedTuple):
    """The numbers of a batch that those of its micro-batches follow from, int64 scalars of one host."""

    num_rows: tf.Tensor
    num_counted: tf.Tensor
    num_examples: tf.Tensor
    padded_size: tf.Tensor


class _Cut(NamedTuple):
    """The bounds of a micro-batch, and the number of its examples with weight 1, int64 scalars of one host."""

    begin: tf.Tensor
    end: tf.Tensor
    num_counted: tf.Tensor


def _rows(structure: Any, device: str, cut_on: Callable[[str], _Cut]) -> Any:
    """Return the rows of a micro-batch of all tensors of a structure, cut on a device that holds them."""

    def rows(leaf: Any) -> Any:
        if device == HOST or not is_copied(leaf):
            begin, end, _ = cut_on(HOST)
            with tf.device(HOST):
                return data.take_rows(leaf, begin, end)
        begin, end, _ = cut_on(host_of(device))
        return rows_between(leaf, begin, end, device)

    return tf.nest.map_structure(rows, structure)


def rows_between(tensor: tf.Tensor, begin: tf.Tensor, end: tf.Tensor, device: str) -> tf.Tensor:
    """Return consecutive rows of a dense tensor of a device.

    Args:
        tensor: The tensor.
        begin: The first row, an int64 scalar of the host.
        end: The row after the last.
        device: The device that holds it.
    """
    with tf.device(host_of(device)):  # else the bounds are computed on the device, and the host waits for them
        bounds = [tf.stack([bound]) for bound in (begin, end)]
        stride = tf.ones([1], tf.int64)
    with tf.device(device):
        return tf.strided_slice(tensor, *bounds, stride)
