"""Profile of a model: seconds, floating-point operations, parameters and bytes of each layer call."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.graphs import tf_function, tf_graph, tf_tapes
from tfpar._compat.models import keras_model
from tfpar._compat.random_numbers import random_state
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Call, Graph, Value
from tfpar.pipeline.partition.layer_settings import operation_settings
from tfpar.pipeline.partition.stages import bytes_per_example
from tfpar.placement.owners import num_bytes
from tfpar.reduction.gradients.gradient_addition import dense_part

_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class CallCost:
    """The costs of one layer call for one micro-batch. Shared weights count for the first call that uses them.

    Args:
        forward_seconds: Duration of the forward pass; 0 if not measured.
        backward_seconds: Duration of the backward pass; 0 if not measured.
        flops: Floating-point operations of the forward pass; 0 if not counted.
        parameters: Number of elements of the weights.
        weight_bytes: Bytes of the weights.
        trainable_bytes: Bytes of the trainable weights.
        activation_bytes: Bytes of the outputs.

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

    Layer calls with equal settings and shapes are measured once. The weights of one layer call at a time are copied to
    the device, so the model may be larger than its memory.

    Args:
        graph: The model.
        inputs: Flat inputs of the model, `[examples, ...]` each, with at least one example.
        microbatch_size: Number of examples in a micro-batch.
        device: Device to measure on.
        times: Whether to measure seconds, the minimum of three runs of a compiled function.
        flops: Whether to count floating-point operations.

    Returns:
        The costs of each layer call, in the order of the graph.

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
    with tf.device(device):
        empty = _empty_seconds() if times else None
    last_use = {value: index for index, call in enumerate(graph.calls) for value in call.inputs}
    for index, call in enumerate(graph.calls):
        cost = 0.0, 0.0, 0.0
        if values:
            with tf.device(device):
                cost = _measure_call(call, values, measured, empty, flops)
            values = {value: tensor for value, tensor in values.items() if last_use.get(value, -1) > index}
        costs.append(_call_cost(call, cost, microbatch_size, seen))
    return costs


def _measure_call(
    call: Call,
    values: dict[Value, Any],
    measured: dict[Any, tuple[float, float, float]],
    empty: tuple[float, float] | None,
    flops: bool,
) -> tuple[float, float, float]:
    """Run a layer call, add its outputs to `values`, and return its seconds and floating-point operations.

    Args:
        call: The layer call.
        values: Tensors by value, including the inputs of the call.
        measured: Cache of the costs of layer calls.
        empty: Seconds of an empty function, which are subtracted; None to measure no seconds.
        flops: Whether to count floating-point operations.
    """
    variables = [(variable, tf.identity(variable.value)) for variable in call.variables]
    key = _cost_key(call, values)
    if key not in measured:
        with tf_function.own_traces(), tf_function.short_graph_optimization():
            compiled = _CompiledCall(call, values, variables)
            seconds = compiled.seconds() if empty else (0.0, 0.0)
            forward, backward = (
                max(0.0, total - overhead) for total, overhead in zip(seconds, empty or (0.0, 0.0), strict=True)
            )
            measured[key] = forward, backward, compiled.flops() if flops else 0.0
    with tf_tapes.replaced(variables):
        model_graph.run([call], values, training=True)
    return measured[key]


class _CompiledCall:
    """A layer call as a compiled function, as in a step."""

    def __init__(self, call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> None:
        self._inputs = [values[value] for value in call.inputs]
        self._weights = [tensor for _, tensor in variables]
        trained = [tensor for variable, tensor in variables if variable.trainable]
        self._sources = [dense_part(tensor) for tensor in [*self._inputs, *trained] if tensor.dtype.is_floating]
        masks = [keras_model.mask_of(tensor) for tensor in self._inputs]

        def forward(inputs: Sequence[Any], weights: Sequence[tf.Tensor]) -> list[Any]:
            masked = map(keras_model.with_mask, inputs, masks)
            tensors = dict(zip(call.inputs, masked, strict=True))
            pairs = [(variable, weight) for (variable, _), weight in zip(variables, weights, strict=True)]
            with tf_tapes.replaced(pairs):
                model_graph.run([call], tensors, training=True)
            return [tensors[value] for value in call.outputs]

        self._forward = tf.function(forward, autograph=False)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of the forward and backward pass, including the overhead of a call."""
        return _shortest(functools.partial(self._forward, self._inputs, self._weights), self._sources)

    def flops(self) -> float:
        """Return the floating-point operations of the forward pass."""
        graph = self._forward.get_concrete_function(self._inputs, self._weights).graph
        return tf_graph.num_float_operations(graph)


def _empty_seconds() -> tuple[float, float]:
    """Return the overhead of a call and of its gradient, measured with a function without operations."""
    scalar, identity = tf.zeros([]), tf.function(tf.identity, autograph=False)
    return _shortest(lambda: [identity(scalar)], [scalar])


def _shortest(run: Callable[[], Sequence[Any]], sources: Sequence[tf.Tensor]) -> tuple[float, float]:
    """Return the minimum seconds of a function and of its gradient, without the first run, which compiles both."""
    runs = [_timed(run, sources) for _ in range(_REPEATS + 1)][1:]
    return min(forward for forward, _ in runs), min(backward for _, backward in runs)


def _timed(run: Callable[[], Sequence[Any]], sources: Sequence[tf.Tensor]) -> tuple[float, float]:
    start = time.perf_counter()
    with tf.GradientTape() as tape:
        tape.watch(sources)
        outputs = run()
    wait_for_gpus()
    forward_end = time.perf_counter()
    tape.gradient([dense_part(output) for output in outputs if output.dtype.is_floating], sources)
    wait_for_gpus()
    return forward_end - start, time.perf_counter() - forward_end


def wait_for_gpus() -> None:
    """Wait until the operations on GPUs, which run asynchronously, have ended.

    Example:
        >>> wait_for_gpus()
    """
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def _cost_key(call: Call, values: dict[Value, Any]) -> Any:
    """Return a key that is equal for layer calls of equal cost."""
    shapes = [(tuple(values[value].shape), values[value].dtype.name) for value in call.inputs]
    constants = [leaf for leaf in keras.tree.flatten((call.args, dict(call.kwargs))) if not isinstance(leaf, Value)]
    return operation_settings(call.operation), repr(shapes), repr(constants)


def _call_cost(call: Call, measured: tuple[float, float, float], microbatch_size: int, seen: set[int]) -> CallCost:
    first_used = [variable for variable in call.variables if id(variable) not in seen]
    seen.update(map(id, first_used))
    sizes = [(variable, num_bytes(variable)) for variable in first_used]
    return CallCost(
        *measured,
        parameters=sum(math.prod(variable.shape) for variable in first_used),
        weight_bytes=sum(size for _, size in sizes),
        trainable_bytes=sum(size for variable, size in sizes if variable.trainable),
        activation_bytes=microbatch_size * sum(bytes_per_example(value) for value in call.outputs),
    )


def update_trainable_bytes(graph: Graph, costs: Sequence[CallCost]) -> list[CallCost]:
    """Update the costs of a model after a change of its trainable weights, without measuring again.

    Args:
        graph: The model.
        costs: The result of `measure`.

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


def _repeated_to_size(tensor: Any, num_examples: int) -> Any:
    """Repeat the examples of a tensor until there are `num_examples`."""
    if isinstance(tensor, tf.SparseTensor):
        repeated = [tensor] * -(-num_examples // int(data.num_rows(tensor)))
        return data.take_rows(data.join_batches(repeated), 0, num_examples)
    tensor = tensor if isinstance(tensor, tf.RaggedTensor) else tf.convert_to_tensor(tensor)
    return tf.gather(tensor, tf.range(num_examples, dtype=tf.int64) % data.num_rows(tensor))
