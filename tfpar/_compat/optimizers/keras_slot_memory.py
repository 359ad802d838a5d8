"""The resource handles of a weight and its slots, for fused update kernels.

Written for Keras 3.15 and TensorFlow 2.21. An optimizer has one list per kind of slot, in the order of its weights
(keras/src/optimizers/base_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def handles(optimizer: Any, weight: Any, kinds: Sequence[str]) -> list[tf.Tensor] | None:
    """Return the handles of a weight and its slots, or None if they differ in device, dtype or shape.

    Args:
        optimizer: A built optimizer.
        weight: The `tf.Variable` of one of its weights; of a replicated weight that of the calling replica.
        kinds: Keras' names for the lists of slots, without a leading underscore.
    """
    index = optimizer._get_variable_index(weight)
    slots = [_of_kind(optimizer, kind) for kind in kinds]
    if not all(isinstance(of_kind, list | tuple) and index < len(of_kind) for of_kind in slots):
        return None
    memories = [weight, *(_memory(of_kind[index]) for of_kind in slots)]
    if not all(map(_has_handle, memories)):
        return None
    if any(_kind(memory) != _kind(weight) for memory in memories):
        return None
    return [memory.handle for memory in memories]


def _of_kind(optimizer: Any, kind: str) -> Any:
    """Return a list of slots: SGD calls one `momentums`, Adam `_momentums`."""
    public = getattr(optimizer, kind, None)
    return getattr(optimizer, f"_{kind}", ()) if public is None else public


def _memory(slot: Any) -> Any:
    return slot._value if isinstance(slot, keras.Variable) else slot


def _has_handle(memory: Any) -> bool:
    """Return whether memory is a single resource here: not sharded, remote, or replicated outside a replica context."""
    if isinstance(memory, DistributedVariable):
        return get_current_replica_id_as_int() is not None
    return isinstance(memory, ResourceVariable)


def _kind(memory: Any) -> tuple[Any, ...]:
    return memory.device, memory.dtype, memory.shape
