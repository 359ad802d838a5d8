"""The memory of a variable that another process holds. Written for Keras 3.15, whose variables have it in `_value`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class MemoryElsewhere:
    """The memory of a slot of an optimizer in another process, which is neither read nor changed here.

    Args:
        slot: The slot, whose type and name are known.

    Attributes:
        holder: The rank of the process that holds it; None while the optimizer creates its slots, which may begin with
            other values than those of their creation.
        lent: A value that is read as its own; None for none.
    """

    def __init__(self, slot: Any) -> None:
        self.path, self.dtype = str(slot.path), tf.as_dtype(slot.dtype)
        self.holder: int | None = None
        self.lent: np.ndarray | None = None

    def numpy(self) -> np.ndarray:
        """Return the value that is lent."""
        if self.lent is None:
            raise self._refusal("read")
        return self.lent

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the value that is lent for `tf.convert_to_tensor`."""
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Refuse a value; the holder sets its own when it creates the slot."""
        if self.holder is not None:
            raise self._refusal("change")

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"Worker {self.holder} alone holds {self.path!r}, as the optimizer's state is sharded, and this worker "
            f"cannot {what} it. Save with trainer.save on all workers, with tfpar.Checkpoints, or with ModelCheckpoint "
            "at the end of epochs; resume with tfpar.Checkpoints."
        )


def is_elsewhere(variable: Any) -> bool:
    """Return whether another process holds a Keras variable."""
    return isinstance(variable._value, MemoryElsewhere)


@contextlib.contextmanager
def lent(arrays: Sequence[tuple[Any, np.ndarray]]) -> Iterator[None]:
    """Read variables of other processes as arrays inside this context.

    Args:
        arrays: The variables, each with its value.
    """
    try:
        for variable, array in arrays:
            variable._value.lent = array
        yield
    finally:
        for variable, _ in arrays:
            variable._value.lent = None


def lent_array(variable: Any) -> np.ndarray | None:
    """Return the array that is lent to a variable of another process, without a copy; None for other variables."""
    return variable._value.lent if is_elsewhere(variable) else None
