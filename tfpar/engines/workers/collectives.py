"""All-reduce over the replicas of all workers, in packs that overlap with the backward pass.

    backward pass   │ layer 3 │ layer 2 │ layer 1 │
    stream 0                  │ pack  │ pack  │ pack
    stream 1                  │ pack  │ pack  │ pack

TensorFlow's collectives send the packs (ring between CPUs, NCCL between GPUs). This module chooses the packs, their
instance keys and how many are sent at the same time.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tfpar import host_sizes
from tfpar.engines.steps.batches_ahead import HOST

AllReduce = Literal["auto", "ring", "nccl"]

PACK_BYTES = 4 << 20
GATHER_BYTES = 1 << 20
NUM_STREAMS = 4
# TensorFlow's own strategies number their group keys from 1.
_GROUP_KEYS = itertools.count(1_000_000)
_NUM_VARIANTS = 32
_GATHERABLE = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
REDUCIBLE = (*_GATHERABLE, tf.bfloat16)


class Group:
    """A group of devices for collective operations, one device per member.

    All members must call the same operations in the same order.

    Args:
        devices: Devices of the members in this process, in order; may be empty.
        num_members: Number of members, in all processes together.
        implementation: `"ring"`, or `"nccl"` if each member has a physical GPU of its own.
        pack_bytes: Larger tensors are sent in packs of about this many bytes.
        hosts: Group of the hosts, one member per process, which exchange sizes; None if the members are hosts.
        order: Members in TensorFlow's order, from `order_of_members`; None if it is the same.
        first: Number of the first member in this process; None if each process has equally many members.

    Example:
        >>> group = Group(["CPU:0"], num_members=2)
        >>> group.all_reduce(tf.constant([1.0, 2.0]))  # in both processes
        <tf.Tensor: shape=(2,), dtype=float32, numpy=array([2., 4.], dtype=float32)>
    """

    def __init__(
        self,
        devices: Sequence[str],
        num_members: int,
        implementation: Literal["ring", "nccl"] = "ring",
        pack_bytes: int = PACK_BYTES,
        hosts: Group | None = None,
        order: Sequence[int] | None = None,
        first: int | None = None,
    ) -> None:
        self.num_members = num_members
        self.order = list(range(num_members)) if order is None else list(order)
        self.devices, self._hosts, self._first = devices, hosts, first
        self._implementation = implementation
        self._pack_bytes = pack_bytes
        self._key = next(_GROUP_KEYS)
        self._counts = [itertools.count(1) for _ in devices]
        self._tokens = [_tokens(device, implementation, self._key) for device in devices]

    def all_reduce(self, tensor: tf.Tensor, member: int = 0) -> tf.Tensor:
        """Return the sum of the tensors of all members, bitwise equal on all.

        Args:
            tensor: A dense tensor of numbers or booleans, with the same shape on every member.
            member: Index of the calling member in this process.
        """
        if self.num_members == 1:
            return tensor
        if tensor.dtype not in REDUCIBLE:
            return tf.cast(self.all_reduce(tf.cast(tensor, tf.int64), member), tensor.dtype)
        num_elements = tensor.shape.num_elements()
        if num_elements is None:
            size = tf.size(tensor)
            exponent, padded = pad_rows(tf.reshape(tensor, [-1]), size)
            return tf.reshape(self._reduce(padded, member, exponent)[:size], tf.shape(tensor))
        size_bytes = num_elements * tensor.dtype.size
        if self.num_members == 2 and size_bytes < GATHER_BYTES:
            # An all-gather takes one round of messages, a ring all-reduce two.
            return tf.add_n(tf.unstack(tf.reshape(self._gather(tensor[None], member), [2, *tensor.shape])))
        return self._reduce(tensor, member, subdivisions=self._subdivisions(size_bytes))

    def _subdivisions(self, size_bytes: int) -> int:
        """Return `max_subdivs_per_device` for a tensor.

        TensorFlow's default chunks exceed the CPU cache and take twice as long (`python -m benchmarks all_reduce`).
        """
        number = -(-size_bytes // (self.num_members * self._pack_bytes))
        return number if number > 2 else 0

    def all_gather(self, tensors: Sequence[tf.Tensor], member: int = 0) -> list[tf.Tensor]:
        """Return the rows of the tensors of all members, in the order of the members.

        Args:
            tensors: Tensors `[rows, ...]` with equal numbers of rows, which may differ between members.
            member: Index of the calling member in this process.
        """
        if self.num_members == 1:
            return list(tensors)
        sizes = self.all_gather_sizes(tf.shape(tensors[0])[:1], member)[:, 0]
        with tf.device(HOST):
            most = tf.reduce_max(sizes)
        padded = [pad_rows(tensor, most) for tensor in tensors]
        with tf.device(HOST):
            filled = tf.sequence_mask(sizes, tf.bitwise.left_shift(1, padded[0][0]))
            indices = tf.where(tf.reshape(filled, [-1]))[:, 0]
        return [tf.gather(self.all_gather_padded(rows, exponent, member), indices) for exponent, rows in padded]

    def all_gather_sizes(self, sizes: tf.Tensor, member: int = 0) -> tf.Tensor:
        """Return sizes of all members, int32 `[members, sizes]`, in the memory of the host.

        Hosts exchange them: a message between GPUs would wait for all operations launched before it, and the host needs
        the sizes to launch the next operations.

        Args:
            sizes: Sizes of the calling member, int32 `[sizes]`.
            member: Index of the calling member in this process.
        """
        if self._hosts is None:
            return self.all_gather_equal_shapes(sizes[None], member)
        hosts, first = self._hosts, self._first

        def gather(strategy: tf.distribute.Strategy, sizes: Any) -> tf.Tensor:
            with tf.device(HOST):
                here = tf.stack(strategy.experimental_local_results(sizes))
                if first is None:
                    return hosts.all_gather_equal_shapes(here)
                others = [[first, self.num_members - first - len(self.devices)], [0, 0]]
                return hosts.all_reduce(tf.pad(here, others))

        return tf.distribute.get_replica_context().merge_call(gather, args=(sizes,))

    def all_gather_equal_shapes(self, tensor: tf.Tensor, member: int = 0) -> tf.Tensor:
        """Return the rows of the tensors of all members, which must have the same static shape."""
        return tensor if self.num_members == 1 else self._gather(tensor, member)

    def all_gather_padded(self, padded: tf.Tensor, exponent: tf.Tensor, member: int = 0) -> tf.Tensor:
        """Return the rows of the padded tensors of all members.

        Args:
            padded: A tensor from `pad_rows`, or its elements as a vector.
            exponent: Exponent from `pad_rows`, equal on all members.
            member: Index of the calling member in this process.
        """
        return padded if self.num_members == 1 else self._gather(padded, member, exponent)

    def all_reduce_many(self, tensors: Sequence[tf.Tensor], member: int = 0) -> list[tf.Tensor]:
        """Return the sums of several small tensors, with one message per dtype."""
        sums: list[Any] = list(tensors)
        indices_by_dtype = collections.defaultdict(list)
        for index, tensor in enumerate(tensors):
            indices_by_dtype[tensor.dtype].append(index)
        for indices in indices_by_dtype.values():
            message = tf.concat([tf.reshape(tensors[index], [-1]) for index in indices], 0)
            sizes = [tf.size(tensors[index]) for index in indices]
            total = self.all_reduce(message, member)
            for index, part in zip(indices, tf.split(total, sizes), strict=True):
                sums[index] = tf.reshape(part, tf.shape(tensors[index]))
        return sums

    def _reduce(self, tensor: tf.Tensor, member: int, variant: Any = 0, subdivisions: int = 0) -> tf.Tensor:
        with tf.device(self.devices[member]):
            return tf.raw_ops.CollectiveReduceV2(
                input=tensor,
                merge_op="Add",
                final_op="Id",
                max_subdivs_per_device=subdivisions,
                **self._collective_arguments(member, variant),
            )

    def _gather(self, tensor: tf.Tensor, member: int, variant: Any = 0) -> tf.Tensor:
        if tensor.dtype == tf.bfloat16:  # TensorFlow 2.21 reduces it, but does not gather it
            return tf.bitcast(self._gather(tf.bitcast(tensor, tf.float16), member, variant), tf.bfloat16)
        if tensor.dtype not in _GATHERABLE:
            wider = tf.float32 if tensor.dtype.is_floating else tf.int64
            return tf.cast(self._gather(tf.cast(tensor, wider), member, variant), tensor.dtype)
        with tf.device(self.devices[member]):
            rows = tf.raw_ops.CollectiveGatherV2(input=tensor, **self._collective_arguments(member, variant))
            if self.order == sorted(self.order):
                return rows
            by_order = tf.split(rows, self.num_members)
            return tf.concat([by_order[self.order.index(number)] for number in range(self.num_members)], 0)

    def _collective_arguments(self, member: int, variant: Any) -> dict[str, Any]:
        """Return the arguments of a collective; TensorFlow allows a single shape per instance key."""
        count = next(self._counts[member])
        tokens = self._tokens[member]
        return {
            "group_size": self.num_members,
            "group_key": self._key,
            "instance_key": count * _NUM_VARIANTS + variant,
            "ordering_token": [tokens[count % len(tokens)]],
            "communication_hint": self._implementation,
        }


def order_of_members(devices: Sequence[str], num_members: int, first: int) -> list[int]:
    """Return all members in the order in which TensorFlow gathers their rows; all processes must call this.

    TensorFlow 2.21 sorts processes by the names of their tasks as text, with task 10 before task 2, and the GPUs of a
    process by their links (`CompleteGroupLocal` and `OrderTaskDeviceMap` in
    tensorflow/core/common_runtime/collective_param_resolver_local.cc).

    Args:
        devices: Devices of the members in this process, in order.
        num_members: Number of members, in all processes together.
        first: Index of the first member of this process among all members.

    Example:
        >>> order_of_members(["CPU:0"], num_members=1, first=0)
        [0]
    """
    if num_members == 1:
        return [0]
    group = Group(devices, num_members)  # a ring has the order of NCCL, and needs no communicator

    @tf.function(autograph=False)
    def gather() -> list[tf.Tensor]:  # all members of this process at the same time
        numbers = range(len(devices))
        return [group.all_gather_equal_shapes(tf.constant([first + number], tf.int64), number) for number in numbers]

    return [int(number) for number in gather()[0]]


def pad_rows(tensor: tf.Tensor, num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Pad a tensor with zero rows to a power of two, for few different shapes.

    Args:
        tensor: A tensor `[rows, ...]`.
        num_rows: Least number of rows after padding.

    Returns:
        `(exponent, padded)`: `padded` has 2 to the power of `exponent` rows.
    """
    rows_here = tf.shape(tensor)[0]
    with tf.device(HOST):
        logarithm = tf.math.log(tf.cast(tf.maximum(num_rows, 1), tf.float64)) / math.log(2.0)
        exponent = tf.cast(tf.math.ceil(logarithm), tf.int32)
        missing = tf.bitwise.left_shift(1, exponent) - rows_here
    return exponent, tf.pad(tensor, [[0, missing]] + [[0, 0]] * (tensor.shape.rank - 1))


def _tokens(device: str, implementation: Literal["ring", "nccl"], group_key: int) -> list[tf.Tensor]:
    """Return the ordering tokens of a member, one per concurrent message.

    A `tf.function` runs collectives with the same token sequentially, others concurrently. NCCL needs the same order on
    all devices, so all groups share the tokens of a GPU. Otherwise two processes could start the collectives of two
    groups in different orders, and wait for each other forever.

    Args:
        device: Device of the member.
        implementation: Implementation of the group.
        group_key: Key of the group.
    """
    num_streams = 1 if implementation == "nccl" else NUM_STREAMS
    if implementation == "nccl" or host_sizes.is_gpu(device):
        return [_shared_token(device, stream) for stream in range(num_streams)]
    return [_token(device, f"{group_key}/{device}/{stream}") for stream in range(num_streams)]


@functools.cache
def _shared_token(device: str, stream: int) -> tf.Tensor:
    """Return the token of a stream, the same object for all groups: a `tf.function` orders by object, not by name."""
    return _token(device, f"{device}/{stream}")


def _token(device: str, name: str) -> tf.Tensor:
    """Return a handle that serves as an ordering token only."""
    with tf.init_scope(), tf.device(device):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"tfpar_collectives/{name}")
