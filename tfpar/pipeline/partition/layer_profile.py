"""The profile of a model: seconds, floating-point operations, parameters and bytes of each layer call."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import random_state, tf_function
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Call, Graph, Value
from tfpar.pipeline.partition.stages import bytes_per_example
from tfpar.reduction.gradient_addition import dense_part

_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class CallCost:
    """The costs of one layer call for one micro-batch.

    A weight that several layer calls use counts for the first of them.

    Args:
        forward_seconds: Duration of its forward pass; 0 if not measured.
        backward_seconds: Duration of its backward pass; 0 if not measured.
        flops: Floating-point operations of its forward pass; 0 if not counted.
        parameters: Number of elements of its weights.
        weight_bytes: Bytes of its weights.
        trainable_bytes: Bytes of its trainable weights.
        activation_bytes: Bytes of its outputs.

    Example:
        >>> CallCost(0.001, 0.002, 0.0, parameters=40, weight_bytes=160, trainable_bytes=160, activation_bytes=256)
        CallCost(forward_seconds=0.001, backward_seconds=0.002, flops=0.0, parameters=40, ...)
    """

    forward_seconds: float
    backward_seconds: float
    flops: float
    parameters: int
    weight_bytes: int
    trainable_bytes: int
    activation_bytes: int


@random_state.preserved_random_state()
def measure(
    graph: Graph, inputs: Sequence[Any], microbatch_size: int, device: str, *, times: bool, flops: bool
) -> list[CallCost]:
    """Measure the costs of each layer call of a model.

    Layer calls of the same class, settings and shapes are measured once. The function copies the weights of one layer
    call at a time to the device, also weights without allocated memory, so the model may be larger than the device.

    Args:
        graph: The model.
        inputs: The flat inputs of the model, `[examples, ...]` each, with at least one example.
        microbatch_size: Number of examples of a micro-batch.
        device: Device of the measurement.
        times: Whether to measure seconds, as the minimum of three runs.
        flops: Whether to count floating-point operations.

    Returns:
        One entry for each layer call, in the order of the graph.

    Example:
        >>> graph = model_graph.trace(keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)]))
        >>> [cost] = measure(graph, [tf.ones([1, 4])], 2, "CPU:0", times=False, flops=False)
        >>> cost.parameters, cost.activation_bytes
        (40, 64)
    """
    costs: list[CallCost] = []
    seen: set[int] = set()
    measured: dict[Any, tuple[float, float, float]] = {}
    values: dict[Value, Any] = {}
    if times or flops:
        values = {
            value: _repeated_to_size(tensor, microbatch_size)
            for value, tensor in zip(graph.inputs, inputs, strict=True)
        }
    last_use = {value: index for index, call in enumerate(graph.calls) for value in call.inputs}
    for index, call in enumerate(graph.calls):
        cost = 0.0, 0.0, 0.0
        if values:
            with tf.device(device):
                cost = _measure_call(call, values, measured, times=times, flops=flops)
            values = {value: tensor for value, tensor in values.items() if last_use.get(value, -1) > index}
        costs.append(_call_cost(call, cost, microbatch_size, seen))
    return costs


def _measure_call(
    call: Call, values: dict[Value, Any], measured: dict[Any, tuple[float, float, float]], *, times: bool, flops: bool
) -> tuple[float, float, float]:
    """Run a layer call, add its outputs to `values`, and return its seconds and floating-point operations."""
    variables = [(variable, tf.identity(variable.value)) for variable in call.variables]
    key = _cost_key(call, values)
    if key in measured:
        _forward(call, values, variables)
        return measured[key]
    with tf_function.own_traces():  # the first run traces and is not counted
        seconds = [_timed(call, values, variables) for _ in range(_REPEATS + 1)][1:] if times else [(0.0, 0.0)]
    operations = _count_flops(call, values, variables) if flops else 0.0
    if not times:
        _forward(call, values, variables)
    measured[key] = min(forward for forward, _ in seconds), min(backward for _, backward in seconds), operations
    return measured[key]


def _forward(call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> None:
    with keras.StatelessScope(variables):
        model_graph.run([call], values, training=True)


def _timed(call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> tuple[float, float]:
    """Run the forward and backward pass of a call, add its outputs to `values`, and return the seconds of both."""
    trainable = [tensor for variable, tensor in variables if variable.trainable]
    sources = [*(values[value] for value in call.inputs), *trainable]
    sources = [dense_part(tensor) for tensor in sources if tensor.dtype.is_floating]
    tensors = dict(values)
    start = time.perf_counter()
    with tf.GradientTape() as tape:
        tape.watch(sources)
        _forward(call, tensors, variables)
    _wait_for_gpus()
    forward_end = time.perf_counter()
    outputs = [dense_part(tensors[value]) for value in call.outputs if tensors[value].dtype.is_floating]
    tape.gradient(outputs, sources)
    _wait_for_gpus()
    end = time.perf_counter()
    values |= {value: tensors[value] for value in call.outputs}
    return forward_end - start, end - forward_end


def _wait_for_gpus() -> None:
    """Wait for the operations on GPUs, which run asynchronously."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def _count_flops(call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> float:
    def forward() -> list[tf.Tensor]:
        tensors = dict(values)
        _forward(call, tensors, variables)
        return [tensors[value] for value in call.outputs]

    graph = tf.function(forward, autograph=False).get_concrete_function().graph
    options = tf.compat.v1.profiler.ProfileOptionBuilder(tf.compat.v1.profiler.ProfileOptionBuilder.float_operation())
    profile = tf.compat.v1.profiler.profile(graph, options=options.with_empty_output().build())
    return float(profile.total_float_ops)


def _cost_key(call: Call, values: dict[Value, Any]) -> Any:
    """Return a key that is equal for layer calls of equal cost."""
    settings: dict[str, Any] = {}
    if isinstance(call.operation, keras.Layer):
        try:
            settings = call.operation.get_config()
        except NotImplementedError:  # a custom layer without get_config
            return id(call.operation), call
        settings.pop("name", None)
    shapes = [(tuple(values[value].shape), values[value].dtype.name) for value in call.inputs]
    constants = [leaf for leaf in keras.tree.flatten((call.args, dict(call.kwargs))) if not isinstance(leaf, Value)]
    own = {name: value for name, value in vars(call.operation).items() if isinstance(value, int | float | str | tuple)}
    own.pop("name", None)
    return type(call.operation), repr(settings), repr(own) if not settings else "", repr(shapes), repr(constants)


def _call_cost(call: Call, measured: tuple[float, float, float], microbatch_size: int, seen: set[int]) -> CallCost:
    first_used = [variable for variable in call.variables if id(variable) not in seen]
    seen.update(map(id, first_used))
    sizes = [(variable, _size(variable.shape) * tf.as_dtype(variable.dtype).size) for variable in first_used]
    return CallCost(
        *measured,
        parameters=sum(_size(variable.shape) for variable in first_used),
        weight_bytes=sum(size for _, size in sizes),
        trainable_bytes=sum(size for variable, size in sizes if variable.trainable),
        activation_bytes=microbatch_size * sum(bytes_per_example(value) for value in call.outputs),
    )


def update_trainable_bytes(graph: Graph, costs: Sequence[CallCost]) -> list[CallCost]:
    """Return the costs of a model after a change of its trainable weights, without another measurement.

    Args:
        graph: The model.
        costs: The costs of its layer calls, from `measure`.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> costs = measure(model_graph.trace(model), [], 1, "CPU:0", times=False, flops=False)
        >>> model.trainable = False
        >>> [cost.trainable_bytes for cost in update_trainable_bytes(model_graph.trace(model), costs)]
        [0]
    """
    seen: set[int] = set()
    unmeasured = [_call_cost(call, (0.0, 0.0, 0.0), 1, seen) for call in graph.calls]
    return [
        dataclasses.replace(cost, trainable_bytes=current.trainable_bytes)
        for cost, current in zip(costs, unmeasured, strict=True)
    ]


def _size(shape: Sequence[int | None]) -> int:
    return math.prod(size or 1 for size in shape)


def _repeated_to_size(tensor: Any, num_examples: int) -> Any:
    """Return `num_examples` examples, the given ones repeated in their order."""
    if isinstance(tensor, tf.SparseTensor):
        repeated = [tensor] * -(-num_examples // int(data.num_rows(tensor)))
        return data.take_rows(data.join_batches(repeated), 0, num_examples)
    tensor = tensor if isinstance(tensor, tf.RaggedTensor) else tf.convert_to_tensor(tensor)
    return tf.gather(tensor, tf.range(num_examples, dtype=tf.int64) % data.num_rows(tensor))
