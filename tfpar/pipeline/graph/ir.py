"""The intermediate representation of a model: a graph of layer calls and values, and its execution."""

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
        shape: Shape `(batch, ...)`, with None for unknown dimensions.
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
    """A call of a layer, or of an operation of `keras.ops`.

    Args:
        operation: The layer or operation.
        args: Positional arguments, with a `Value` in place of each tensor.
        kwargs: Keyword arguments, with a `Value` in place of each tensor.
        outputs: Flat outputs.
        name: Name of the operation, with its path in nested models, such as `"encoder/dense"`. Repeated names are
            numbered: `"dense#2"`.
        training: The layer's `training` argument in training and in inference.
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
        """The flat values among the arguments."""
        return [leaf for leaf in self._leaves() if isinstance(leaf, Value)]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables that the call reads."""
        arguments = [leaf for leaf in self._leaves() if isinstance(leaf, keras.Variable)]
        return [*self.operation.variables, *arguments] if isinstance(self.operation, keras.Layer) else arguments

    def training_in(self, training: bool) -> bool | None:
        """Return the layer's `training` argument in training or inference of the model."""
        return self.training[0 if training else 1]

    def _leaves(self) -> list[Any]:
        return keras.tree.flatten((self.args, dict(self.kwargs)))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A model as a sequence of layer calls in topological order.

    Args:
        inputs: Flat inputs of the model.
        calls: Layer calls in topological order.
        outputs: Outputs of the model, in their structure.
        trace_record: The traced symbolic inputs, a description of the operations and the opened blocks, which
            `check_unchanged` reads; None if the operations cannot change.

    Example:
        >>> image = Value("image", (None, 4), "float32")
        >>> Graph(inputs=(image,), calls=(), outputs={"same": image}).outputs["same"].name
        'image'
    """

    inputs: tuple[Value, ...]
    calls: tuple[Call, ...]
    outputs: Any
    trace_record: tuple[Any, list[Any], Any] | None = None


# Layer calls may also return constants. They are no values of the graph: later calls have them in their arguments.
_CONSTANTS = (type(None), bool, int, float, str)


def run(
    calls: Sequence[Call],
    tensors: dict[Value, Any],
    training: bool,
    run_one: Callable[[Call, dict[Value, Any], bool], Any] | None = None,
) -> None:
    """Run layer calls in order, and add their outputs to `tensors`.

    As in Keras, layers receive `training`, and tensors carry masks.

    Args:
        calls: Layer calls of one graph, in its order.
        tensors: Tensors by value, including all inputs of the calls.
        training: Whether the model is trained.
        run_one: Function that runs a layer call and returns its outputs. Defaults to `run_call`.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> graph = trace(keras.Sequential([keras.Input((2,)), keras.layers.ReLU()]))
        >>> tensors = {graph.inputs[0]: keras.ops.array([[-1.0, 2.0]])}
        >>> run(graph.calls, tensors, training=False)
        >>> tensors[graph.outputs].numpy()
        array([[0., 2.]], dtype=float32)
    """
    model_call = keras_tracing.one_model_call(call.operation for call in calls)
    with keras_losses_in_call.in_call(), tf_function.own_traces(), model_call:
        for call in calls:
            outputs = keras.tree.flatten((run_one or run_call)(call, tensors, training))
            output_tensors = [leaf for leaf in outputs if not isinstance(leaf, _CONSTANTS)]
            tensors |= dict(zip(call.outputs, output_tensors, strict=True))


def run_call(call: Call, tensors: Mapping[Value, Any], training: bool) -> Any:
    """Run one layer call as `run` does, and return its outputs."""
    args, kwargs = keras.tree.map_structure(
        lambda leaf: tensors[leaf] if isinstance(leaf, Value) else leaf, (call.args, dict(call.kwargs))
    )
    if keras_tracing.takes_training(call.operation):
        kwargs["training"] = call.training_in(training)  # even None: otherwise it inherits that of the call before
    with keras_tracing.autocast(call.autocast_dtype):
        return keras_tracing.recorded_call(call.operation)(*args, **kwargs)
