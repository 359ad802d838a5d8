"""The tensors that a step holds between two actions, and their way through a loop.

before    saved of micro-batches 1 2      an iteration    F3 adds saved 3, B1 takes saved 1
after     saved of micro-batches 2 3      the loop carries two tensors: the older and the newer one
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.pipeline.execution import queues
from tfpar.pipeline.stages.bundles import Devices


class Key(NamedTuple):
    """The name of a live tensor.

    Args:
        role: Such as "saved".
        owner: Such as the index of a stage.
        microbatch: The index of its micro-batch, in a loop that of the first iteration; None for one of all
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
        uses_queues: Whether tensors of a micro-batch pass from one kind of pass to the next in queues, because a loop
            runs one of the two only.
    """

    def __init__(self) -> None:
        self.uses_queues = False
        self._held: dict[Key, Any] = {}
        self._like: dict[Key, Any] = {}  # a structure of each queue
        self._lengths: dict[Key, int] = {}  # of each queue

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __getitem__(self, key: Key) -> Any:
        return self._held[key]

    def __setitem__(self, key: Key, value: Any) -> None:
        self._held[key] = value

    def get(self, key: Key, default: Any = None) -> Any:
        """Return what is held under a key."""
        return self._held.get(key, default)

    def take(self, key: Key, default: Any = None) -> Any:
        """Return what is held under a key, and hold it no longer."""
        return self._held.pop(key, default)

    def add(self, key: Key, value: tf.Tensor) -> None:
        """Add a tensor to the sum under a key."""
        self._held[key] = self._held[key] + value if key in self._held else value

    def of_role(self, role: str) -> list[Key]:
        """Return the keys of a role, in the order in which their tensors were first held."""
        return [key for key in self._held if key.role == role]

    def save(self, key: Key, value: Any, device: Devices) -> None:
        """Hold a structure of tensors of a micro-batch for a later kind of pass, in a queue if the step uses queues.

        Args:
            key: The key of the micro-batch.
            value: As many tensors of the same types for each micro-batch.
            device: The device that holds them, or the device of each.
        """
        if self.uses_queues:
            self.enqueue(key._replace(microbatch=None), value, device)
        else:
            self._held[key] = value

    def take_saved(self, key: Key, device: Devices, default: Any = None) -> Any:
        """Return what `save` holds under a key, and hold it no longer."""
        if not self.uses_queues:
            return self._held.pop(key, default)
        queue = key._replace(microbatch=None)
        return self.dequeue(queue, device) if queue in self._held else default

    def enqueue(self, key: Key, value: Any, device: Devices) -> None:
        """Add a structure of tensors to the end of the queue under a key; `save` has the arguments."""
        self._like.setdefault(key, value)
        self._held[key] = queues.appended(self._held.get(key), _parts(value), device)
        self._lengths[key] = self._lengths.get(key, 0) + 1

    def dequeue(self, key: Key, device: Devices, specs: Any = None) -> Any:
        """Return the structure at the front of the queue under a key, and hold it no longer.

        Args:
            key: The key of the queue.
            device: The device that holds it, or the device of each tensor.
            specs: The structure with the specs of its tensors. Defaults to those of the first structure added, with any
                number of rows.
        """
        like = self._like[key] if specs is None else specs
        flat = [tf.TensorSpec(_any_rows(part) if specs is None else part.shape, part.dtype) for part in _parts(like)]
        self._held[key], parts = queues.pop_first(self._held[key], flat, device)
        self._lengths[key] -= 1
        return _packed(like, parts)

    def dequeue_all(self, key: Key, device: str, specs: Any = None) -> list[Any]:
        """Return all structures of the queue under a key in their order; `dequeue` has the arguments."""
        return [self.dequeue(key, device, specs) for _ in range(self._lengths.get(key, 0))]

    def repeat(self, num_iterations: int, shift: int, act: Callable[[tf.Tensor], None], num_parallel: int) -> None:
        """Run actions in a loop.

        Args:
            num_iterations: The number of iterations.
            shift: The number of micro-batches by which each iteration is later than the one before.
            act: Runs the actions, with the number of micro-batches by which they are later than in the first
                iteration, an int64 scalar. It holds the same tensors before and after, those of micro-batches for later
                ones.
            num_parallel: The number of iterations whose operations may run at the same time.
        """
        keys, before = list(self._held), self._held
        flat = [_parts(value) for value in before.values()]
        shapes = [
            [part.shape if key.microbatch is None else _any_rows(part) for part in parts]
            for key, parts in zip(keys, flat, strict=True)
        ]
        lengths, changes = dict(self._lengths), dict[Key, int]()  # of the queues, before the loop and by an iteration
        origins = [part.device for part in tf.nest.flatten(flat)]
        devices: dict[Any, str] = {}

        def body(index: tf.Tensor, *carried: list[tf.Tensor]) -> list[Any]:
            inputs = [part.ref() for part in tf.nest.flatten(carried)]
            devices.update(zip(inputs, origins, strict=True))
            self._held = {key: _packed(before[key], parts) for key, parts in zip(keys, carried, strict=True)}
            begin = dict(self._lengths)
            act(index * shift)
            changes.update({key: length - begin.get(key, 0) for key, length in self._lengths.items()})
            assert set(self._held) == {key.later(shift) for key in keys}, "a loop holds as many tensors as before"
            return [index + 1, *(_parts(self._held[key.later(shift)]) for key in keys)]

        index = tf.constant(0, tf.int64)
        with _results_where_computed(devices):
            _, *after = tf.while_loop(
                lambda index, *_: index < num_iterations,
                body,
                [index, *flat],
                shape_invariants=[index.shape, *shapes],
                parallel_iterations=num_parallel,
            )
        self._held = {
            key.later(shift * num_iterations): _packed(before[key], parts)
            for key, parts in zip(keys, after, strict=True)
        }
        # Not counted in the body, which runs once for each iteration if it runs eagerly, and else once.
        self._lengths = {key: lengths.get(key, 0) + changes.get(key, 0) * num_iterations for key in self._lengths}


def _results_where_computed(devices: Mapping[Any, str]) -> Any:
    """Return a context in which the results of a loop's body are on the devices that computed them.

    TensorFlow returns each result through an Identity on the device of the loop, which is that of the step, the host:
    all that a loop on GPUs carries would be copied there and back in each iteration.

    Args:
        devices: The devices of the loop's variables, by their `ref()` in its body.
    """

    def device_of(op: tf.Operation) -> str:
        if op.type != "Identity" or op.device:
            return str(op.device)
        return str(op.inputs[0].device) or devices.get(op.inputs[0].ref(), "")

    return tf.compat.v1.get_default_graph().device(device_of)


def _parts(value: Any) -> list[tf.Tensor]:
    return [part for part in tf.nest.flatten(value, expand_composites=True) if part is not None]


def _packed(like: Any, parts: list[tf.Tensor]) -> Any:
    remaining = iter(parts)
    flat = tf.nest.flatten(like, expand_composites=True)
    return tf.nest.pack_sequence_as(
        like, [None if one is None else next(remaining) for one in flat], expand_composites=True
    )


def _any_rows(part: tf.Tensor) -> tf.TensorShape:
    """Return the shape of a tensor of any micro-batch: they differ in their numbers of rows."""
    return tf.TensorShape([None, *part.shape[1:]]) if part.shape.rank else part.shape
