"""The operations that a model applies, as data, and how to apply them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfpar._compat import keras_losses, keras_tracing, tf_function


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A tensor that flows between operations; two are equal only if they are the same.

    Args:
        name: Of the operation that makes it, or of the input.
        shape: Its shape, the batch first; None for a size not known.
        dtype: Such as `"float32"`.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One operation applied once.

    Args:
        operation: A layer, or an operation of `keras.ops`.
        args: Its positional arguments, a `Value` in the place of each tensor.
        kwargs: Its named arguments, likewise.
        outputs: What it makes, flat.
        name: The operation's name; a path for what was inside of another model, as `"encoder/dense"`. What is applied
            again is numbered: `"dense#2"`.
        training: What the model always tells the layer; None for what `run` is told.
        autocast_dtype: What weights among the arguments are cast to; None for as they are.
    """

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value, ...]
    name: str
    training: bool | None = None
    autocast_dtype: str | None = None

    @property
    def inputs(self) -> list[Value]:
        """The values it takes, flat."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Value)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The weights and states that it reads."""
        given = [leaf for leaf in self._leaves() if isinstance(leaf, keras.Variable)]
        return [*self.operation.variables, *given] if isinstance(self.operation, keras.Layer) else given

    def _leaves(self) -> list[Any]:
        return keras.tree.flatten((self.args, dict(self.kwargs)))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model as a sequence of calls, each after those whose values it takes.

    Args:
        inputs: What the model takes, flat.
        calls: The operations in order.
        outputs: What it returns, in the structure of the model.
    """

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: Any


def run(calls: Sequence[Call], tensors: dict[Value, Any], training: bool) -> None:
    """Apply calls in order to the tensors in `tensors`, and add what they make.

    As Keras does: a layer is told `training`, masks ride on the tensors.

    Args:
        calls: Of one graph, in its order; a part of them where `tensors` has what the others make.
        tensors: What is known so far, at least the inputs.
        training: What layers are told that the model does not always tell the same.
    """
    one_call = keras_tracing.one_model_call(call.operation for call in calls)
    with keras_losses.in_call(), tf_function.own_traces(), one_call:
        for call in calls:
            outputs = keras.tree.flatten(_apply(call, tensors, training))
            tensors |= dict(zip(call.outputs, outputs, strict=True))


def _apply(call: Call, tensors: Mapping[Value, Any], training: bool) -> Any:
    args, kwargs = keras.tree.map_structure(
        lambda leaf: tensors[leaf] if isinstance(leaf, Value) else leaf, (call.args, dict(call.kwargs))
    )
    if keras_tracing.takes_training(call.operation):
        kwargs["training"] = training if call.training is None else call.training
    with keras_tracing.autocast(call.autocast_dtype):
        return call.operation(*args, **kwargs)
