"""The intermediate representation of a model: values, layer calls, their graph, and its execution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from tfpar._compat.graphs import tf_function
from tfpar._compat.models import keras_losses_in_call, keras_tracing


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A symbolic tensor between layer calls. Values are compared by identity.

    Args:
        name: Name of the layer call that computes it, or of the model's input.
        shape: Its shape, the examples first; None for an unknown dimension.
        dtype: Such as `"float32"`.

    Example:
        >>> Value("image", (None, 28, 28, 1), "float32").shape
        (None, 28, 28, 1)
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A layer call: one use of a layer or of an operation of `keras.ops`.

    Args:
        operation: A layer, or an operation of `keras.ops`.
        args: Its positional arguments, with a `Value` in place of each tensor.
        kwargs: Its keyword arguments, with a `Value` in place of each tensor.
        outputs: Its flat outputs.
        name: Name of the operation; a path for an operation of a nested model, such as `"encoder/dense"`. Further
            calls of the same name are numbered: `"dense#2"`.
        training: The argument `training` of the layer where the model trains, and where it does not; None for none.
        autocast_dtype: Type to which weights among the arguments are cast; None for no cast.

    Example:
        >>> entry, output = Value("entry", (None, 4), "float32"), Value("dense", (None, 8), "float32")
        >>> Call(keras.layers.Dense(8), (entry,), {}, (output,), "dense").inputs == [entry]
        True
    """

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Value, ...]
    name: str
    training: tuple[bool | None, bool | None] = (True, False)
    autocast_dtype: str | None = None

    @property
    def inputs(self) -> list[Value]:
        """The flat values among its arguments."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Value)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The weights and states that it reads."""
        arguments = [leaf for leaf in self._leaves() if isinstance(leaf, keras.Variable)]
        return [*self.operation.variables, *arguments] if isinstance(self.operation, keras.Layer) else arguments

    def training_in(self, training: bool) -> bool | None:
        """Return the argument `training` of the layer.

        Args:
            training: Whether the model trains.
        """
        return self.training[0 if training else 1]

    def _leaves(self) -> list[Any]:
        return keras.tree.flatten((self.args, dict(self.kwargs)))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model as a sequence of layer calls in topological order.

    Args:
        inputs: The flat inputs of the model.
        calls: The layer calls in order.
        outputs: The outputs of the model, in its structure.
        reading: The symbolic inputs that were traced, a description of their operations and the opened blocks, for a
            model whose `call` may trace otherwise later; None for another.

    Example:
        >>> image = Value("image", (None, 4), "float32")
        >>> Graph(inputs=(image,), calls=(), outputs={"same": image}).outputs["same"].name
        'image'
    """

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: Any
    reading: tuple[Any, list[Any], Any] | None = None


# What a layer call may return besides tensors: no values of the graph, but constants in the arguments of later calls.
_CONSTANTS = (type(None), bool, int, float, str)


def run(
    calls: Sequence[Call],
    tensors: dict[Value, Any],
    training: bool,
    run_one: Callable[[Call, dict[Value, Any], bool], Any] | None = None,
) -> None:
    """Run layer calls in order, and add their outputs to `tensors`.

    As in Keras, layers receive the argument `training` where the model gives it, and tensors carry their masks.

    Args:
        calls: Layer calls of one graph, in its order. For a part of the graph `tensors` must have the other inputs.
        tensors: The tensors of the values, at first those of the inputs.
        training: Whether the model trains.
        run_one: Runs one layer call and returns its outputs; None for `run_call`.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> graph = trace(keras.Sequential([keras.Input((2,)), keras.layers.ReLU()]))
        >>> tensors = {graph.inputs[0]: keras.ops.array([[-1.0, 2.0]])}
        >>> run(graph.calls, tensors, training=False)
        >>> tensors[graph.outputs].numpy()
        array([[0., 2.]], dtype=float32)
    """
    one_call = keras_tracing.one_model_call(call.operation for call in calls)
    with keras_losses_in_call.in_call(), tf_function.own_traces(), one_call:
        for call in calls:
            outputs = keras.tree.flatten((run_one or run_call)(call, tensors, training))
            made = [leaf for leaf in outputs if not isinstance(leaf, _CONSTANTS)]
            tensors |= dict(zip(call.outputs, made, strict=True))


def run_call(call: Call, tensors: Mapping[Value, Any], training: bool) -> Any:
    """Run one layer call, as `run` does, and return its outputs.

    Args:
        call: A layer call.
        tensors: The tensors of its inputs.
        training: As for `run`.
    """
    args, kwargs = keras.tree.map_structure(
        lambda leaf: tensors[leaf] if isinstance(leaf, Value) else leaf, (call.args, dict(call.kwargs))
    )
    if keras_tracing.takes_training(call.operation):
        kwargs["training"] = call.training_in(training)  # also None: the layer before it would leave its own
    with keras_tracing.autocast(call.autocast_dtype):
        return keras_tracing.recorded_call(call.operation)(*args, **kwargs)
