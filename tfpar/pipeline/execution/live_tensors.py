"""The tensors that a step holds between two actions, and their way through a loop.

before    saved of micro-batches 1 2      an iteration    F3 adds saved 3, B1 takes saved 1
after     saved of micro-batches 2 3      the loop carries two tensors: the older and the newer one
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

_SCALAR = np.zeros([0], np.int32)


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
    """Structures of tensors by key, while a step is traced."""

    def __init__(self) -> None:
        self._held: dict[Key, Any] = {}
        self._num_pushed: dict[Key, int] = {}

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

    def of_role(self, role: str) -> list[Key]:
        """Return the keys of a role, in the order in which their tensors were first held."""
        return [key for key in self._held if key.role == role]

    def push(self, key: Key, tensors: Sequence[tf.Tensor], device: str) -> None:
        """Add tensors to those under a key, as many for each micro-batch.

        Args:
            key: The key of all.
            tensors: None of them of type int32, which TensorFlow's operations expect in the memory of the host.
            device: The device that holds them.
        """
        with tf.device(device):
            if key not in self._held:
                options = {"element_shape": _SCALAR, "element_dtype": tf.variant, "max_num_elements": -1}
                self._held[key] = tf.raw_ops.EmptyTensorList(**options)
            one = tf.raw_ops.OptionalFromValue(components=list(tensors))
            self._held[key] = tf.raw_ops.TensorListPushBack(input_handle=self._held[key], tensor=one)
        self._num_pushed[key] = self._num_pushed.get(key, 0) + 1

    def pop_all(self, key: Key, specs: Sequence[tf.Tensor | tf.TensorSpec], device: str) -> list[list[tf.Tensor]]:
        """Return the tensors under a key in the order in which they were added, and hold them no longer.

        Args:
            key: The key of all.
            specs: The specs of those of one micro-batch, or tensors like them.
            device: The device that holds them.
        """
        stack, found = self._held.pop(key, None), []
        types, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
        with tf.device(device):
            for _ in range(self._num_pushed.pop(key, 0)):
                stack, one = tf.raw_ops.TensorListPopBack(
                    input_handle=stack, element_shape=_SCALAR, element_dtype=tf.variant
                )
                values = tf.raw_ops.OptionalGetValue(optional=one, output_types=types, output_shapes=shapes)
                found.append(list(values))
        return found[::-1]

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
        shapes = [[_any_rows(part, key) for part in parts] for key, parts in zip(keys, flat, strict=True)]
        pushed = dict(self._num_pushed)

        def body(index: tf.Tensor, *carried: list[tf.Tensor]) -> list[Any]:
            self._held = {key: _packed(before[key], parts) for key, parts in zip(keys, carried, strict=True)}
            act(index * shift)
            assert set(self._held) == {key.later(shift) for key in keys}, "the steady state holds as many tensors"
            return [index + 1, *(_parts(self._held[key.later(shift)]) for key in keys)]

        index = tf.constant(0, tf.int64)
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
        for key, count in self._num_pushed.items():
            self._num_pushed[key] = pushed[key] + (count - pushed[key]) * num_iterations


def _parts(value: Any) -> list[tf.Tensor]:
    return [part for part in tf.nest.flatten(value, expand_composites=True) if part is not None]


def _packed(like: Any, parts: list[tf.Tensor]) -> Any:
    remaining = iter(parts)
    flat = tf.nest.flatten(like, expand_composites=True)
    return tf.nest.pack_sequence_as(
        like, [None if one is None else next(remaining) for one in flat], expand_composites=True
    )


def _any_rows(part: tf.Tensor, key: Key) -> tf.TensorShape:
    """Return the shape of a tensor in all iterations: those of micro-batches differ in their numbers of rows."""
    if key.microbatch is None or not part.shape.rank:
        return part.shape
    return tf.TensorShape([None, *part.shape[1:]])
