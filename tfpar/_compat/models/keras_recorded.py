"""The data types and helpers of `keras_tracing` (Keras 3.15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras.src.backend.common import global_state


class Recorded(NamedTuple):
    """An operation that a model applies to symbolic tensors.

    Args:
        operation: A layer, or an operation of `keras.ops`.
        args: The positional arguments.
        kwargs: The keyword arguments, without a layer's `training`.
        outputs: The symbolic outputs, flattened.
        path: The names of the enclosing models, without the outermost, and its own.
        training: The argument `training` of a layer; None if it gets none.
        autocast_dtype: The dtype to which weights are cast when read; None for no cast.
        blocks: The enclosing blocks, outermost first.
    """

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[keras.KerasTensor, ...]
    path: tuple[str, ...]
    training: bool | None
    autocast_dtype: str | None
    blocks: tuple[keras.Layer, ...] = ()


@dataclasses.dataclass
class Frame:
    """A layer call in progress."""

    kwargs: dict[str, Any]
    training: bool | None = None
    opened: bool = False
    is_block: bool = False


class Symbolic(type):
    """Metaclass of the stand-in for `KerasTensor` in `any_symbolic_tensors`."""

    is_symbolic: Callable[[Any], bool]

    def __instancecheck__(cls, leaf: Any) -> bool:
        return cls.is_symbolic(leaf)


def is_alike(argument: Any, output: keras.KerasTensor) -> bool:
    return isinstance(argument, keras.KerasTensor) and all(
        getattr(argument, name) == getattr(output, name) for name in ("dtype", "sparse", "ragged")
    )


def training_in_context() -> bool | None:
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value("training")
