"""What `keras_tracing` records, and the small parts that it listens with.

Written for Keras 3.15, whose `call` context holds `training`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras.src.backend.common import global_state


class Recorded(NamedTuple):
    """One operation that a model applied to symbolic tensors.

    Args:
        operation: A layer, or an operation of `keras.ops`.
        args: Its positional arguments.
        kwargs: Its keyword arguments, without `training`.
        outputs: Its symbolic outputs, flat.
        path: Names of the models around it, without the outermost, and its own.
        training: The argument `training` of a layer; None if it receives none, and for an operation.
        autocast_dtype: The dtype to which weights are cast when an operation reads them; None for no cast.
        blocks: The layers around it that are opened, the outermost first.
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
    """A layer that is being called."""

    kwargs: dict[str, Any]
    training: bool | None = None
    opened: bool = False
    is_block: bool = False


class Symbolic(type):
    """Stands in for the class that `any_symbolic_tensors` asks for."""

    is_symbolic: Callable[[Any], bool]

    def __instancecheck__(cls, leaf: Any) -> bool:
        return cls.is_symbolic(leaf)


def is_alike(given: Any, made: keras.KerasTensor) -> bool:
    return isinstance(given, keras.KerasTensor) and all(
        getattr(given, name) == getattr(made, name) for name in ("dtype", "sparse", "ragged")
    )


def training_in_context() -> bool | None:
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value("training")
