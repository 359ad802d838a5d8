"""The live tensors of a step between two actions, and how a loop carries them.

before    saved of micro-batches 1 2      an iteration    F3 adds saved 3, B1 removes saved 1
after     saved of micro-batches 2 3      the loop carries two tensors: the older and the newer
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.pipeline.execution import queues
from tfpar.pipeline.stages.bundles import Devices


class Key(NamedTuple):
    """The key of a live tensor.

    Args:
        role: Such as "saved".
        owner: Such as the index of a stage.
        microbatch: The index of its micro-batch, in a loop its index in the first iteration; None for a tensor of all
            micro-batches.
    """

    role: str
    owner: Hashable
    microbatch: int | None = None

    def later(self, shift: int) -> Key:
        """Return the key of the same tensor of a later micro-batch."""
        return self if self.microbatch is None else self._replace(microbatch=self.microbatch + shift)


class LiveTensors:
    """Structures of tensors by key, while a step is traced.

    Attributes:
        uses_queues: Whether passes hand over saved tensors in queues, because loops run only one kind of pass.
    """

    def __init__(self) -> None:
        self.uses_queues = False
        self._tensors: dict[Key, Any] = {}
        self._examples: dict[Key, Any] = {}  # the first structure of each queue
        self._lengths: dict[Key, int] = {}  # the length of each queue

    def __contains__(self, key: Key) -> bool:
        return key in self._tensors

    def __getitem__(self, key: Key) -> Any:
        return self._tensors[key]

    def __setitem__(self, key: Key, value: Any) -> None:
        self._tensors[key] = value

    def get(self, key: Key, default: Any = None) -> Any:
        """Return the structure of a key."""
        return self._tensors.get(key, default)

    def take(self, key: Key, default: Any = None) -> Any:
        """Remove and return the structure of a key."""
        return self._tensors.pop(key, default)

    def add(self, key: Key, value: tf.Tensor) -> None:
        """Add a tensor to the sum of a key."""
        self._tensors[key] = self._tensors[key] + value if key in self._tensors else value

    def keys(self, role: str) -> list[Key]:
        """Return the keys of a role, in the order of their insertion."""
        return [key for key in self._tensors if key.role == role]

    def save(self, key: Key, value: Any, device: Devices) -> None:
        """Save a structure of tensors for a later pass, in a queue if the step uses queues.

        Args:
            key: The key, with the index of the micro-batch.
            value: The structure, the same for each micro-batch.
            device: The device of all tensors, or of each.
        """
        if self.uses_queues:
            self.enqueue(key._replace(microbatch=None), value, device)
        else:
            self._tensors[key] = value

    def take_saved(self, key: Key, device: Devices, default: Any = None) -> Any:
        """Remove and return the structure that `save` has stored."""
        if not self.uses_queues:
            return self._tensors.pop(key, default)
        queue = key._replace(microbatch=None)
        return self.dequeue(queue, device) if queue in self._tensors else default

    def enqueue(self, key: Key, value: Any, device: Devices) -> None:
        """Append a structure of tensors to the queue of a key; the arguments are those of `save`."""
        self._examples.setdefault(key, value)
        self._tensors[key] = queues.appended(self._tensors.get(key), _flat(value), device)
        self._lengths[key] = self._lengths.get(key, 0) + 1

    def dequeue(self, key: Key, device: Devices, specs: Any = None) -> Any:
        """Remove and return the first structure in the queue of a key.

        Args:
            key: The key of the queue.
            device: The device of all tensors, or of each.
            specs: The structure with the specs of its tensors. Defaults to the specs of the structure that was queued
                first, with any number of rows.
        """
        like = self._examples[key] if specs is None else specs
        flat = [tf.TensorSpec(_any_rows(leaf) if specs is None else leaf.shape, leaf.dtype) for leaf in _flat(like)]
        self._tensors[key], tensors = queues.pop_first(self._tensors[key], flat, device)
        self._lengths[key] -= 1
        return _packed(like, tensors)

    def dequeue_all(self, key: Key, device: str, specs: Any = None) -> list[Any]:
        """Remove and return all structures in the queue of a key; the arguments are those of `dequeue`."""
        return [self.dequeue(key, device, specs) for _ in range(self._lengths.get(key, 0))]

    def repeat(self, num_iterations: int, shift: int, act: Callable[[tf.Tensor], None], num_parallel: int) -> None:
        """Run actions in a loop.

        Args:
            num_iterations: Number of iterations.
            shift: Number of micro-batches between one iteration and the next.
            act: Runs the actions of an iteration, given the number of micro-batches since the first iteration, an int64
                scalar. Afterwards the same tensors are live, for micro-batches that are `shift` later.
            num_parallel: Number of iterations whose operations may run at the same time.
        """
        keys, before = list(self._tensors), self._tensors
        flat = [_flat(value) for value in before.values()]
        shapes = [
            [tensor.shape if key.microbatch is None else _any_rows(tensor) for tensor in tensors]
            for key, tensors in zip(keys, flat, strict=True)
        ]
        lengths, changes = dict(self._lengths), dict[Key, int]()  # of the queues, before the loop and by an iteration
        origins = [tensor.device for tensor in tf.nest.flatten(flat)]
        devices: dict[Any, str] = {}

        def body(index: tf.Tensor, *carried: list[tf.Tensor]) -> list[Any]:
            inputs = [tensor.ref() for tensor in tf.nest.flatten(carried)]
            devices.update(zip(inputs, origins, strict=True))
            self._tensors = {key: _packed(before[key], tensors) for key, tensors in zip(keys, carried, strict=True)}
            begin = dict(self._lengths)
            act(index * shift)
            changes.update({key: length - begin.get(key, 0) for key, length in self._lengths.items()})
            assert set(self._tensors) == {key.later(shift) for key in keys}, (
                "an iteration keeps the number of live tensors"
            )
            return [index + 1, *(_flat(self._tensors[key.later(shift)]) for key in keys)]

        index = tf.constant(0, tf.int64)
        with _results_where_computed(devices):
            _, *after = tf.while_loop(
                lambda index, *_: index < num_iterations,
                body,
                [index, *flat],
                shape_invariants=[index.shape, *shapes],
                parallel_iterations=num_parallel,
            )
        self._tensors = {
            key.later(shift * num_iterations): _packed(before[key], tensors)
            for key, tensors in zip(keys, after, strict=True)
        }
        # Not counted in the body, which runs once in a graph, and once per iteration eagerly.
        self._lengths = {key: lengths.get(key, 0) + changes.get(key, 0) * num_iterations for key in self._lengths}


def _results_where_computed(devices: Mapping[Any, str]) -> Any:
    """Return a context in which the results of a loop's body stay on the devices that computed them.

    TensorFlow returns each result through an Identity on the device of the loop, which is the host. Every iteration on
    GPUs would copy all carried tensors there and back.

    Args:
        devices: The devices of the loop's variables, by their `ref()` in its body.
    """

    def device_of(op: tf.Operation) -> str:
        if op.type != "Identity" or op.device:
            return str(op.device)
        return str(op.inputs[0].device) or devices.get(op.inputs[0].ref(), "")

    return tf.compat.v1.get_default_graph().device(device_of)


def _flat(value: Any) -> list[tf.Tensor]:
    return [leaf for leaf in tf.nest.flatten(value, expand_composites=True) if leaf is not None]


def _packed(like: Any, tensors: list[tf.Tensor]) -> Any:
    remaining = iter(tensors)
    flat = tf.nest.flatten(like, expand_composites=True)
    return tf.nest.pack_sequence_as(
        like, [None if leaf is None else next(remaining) for leaf in flat], expand_composites=True
    )


def _any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    """Return the shape of a tensor with an unknown number of rows, which differs between micro-batches."""
    return tf.TensorShape([None, *tensor.shape[1:]]) if tensor.shape.rank else tensor.shape
