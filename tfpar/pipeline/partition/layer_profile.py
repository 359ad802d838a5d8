"""What each operation of a model costs: seconds forward and backward, floating-point operations, parameters, bytes."""

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
    """What one operation costs for one micro-batch.

    Args:
        forward_seconds: Its forward pass; 0 where no time was measured.
        backward_seconds: Its backward pass.
        flops: Floating-point operations of its forward pass; 0 where they were not counted.
        parameters: Weights that it is the first to use.
        weight_bytes: Their bytes.
        trainable_bytes: The bytes of those that are trained.
        activation_bytes: What it makes.
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
    """Return what each operation of a model costs.

    Operations alike (same class, settings and shapes) are measured once. Weights are read where they are, or as they
    will be, so a model without memory yet can be measured, one operation at a time.

    Args:
        graph: The model.
        inputs: Its flat inputs, `[examples, ...]` each, at least one example.
        microbatch_size: Examples of a micro-batch.
        device: On which device to measure.
        times: Whether to measure seconds, the least of three runs.
        flops: Whether to count floating-point operations.
    """
    costs: list[CallCost] = []
    seen: set[int] = set()
    known: dict[Any, tuple[float, float, float]] = {}
    values: dict[Value, Any] = {}
    if times or flops:
        values = {value: _of_size(tensor, microbatch_size) for value, tensor in zip(graph.inputs, inputs, strict=True)}
    last_use = {value: index for index, call in enumerate(graph.calls) for value in call.inputs}
    for index, call in enumerate(graph.calls):
        found = 0.0, 0.0, 0.0
        if values:
            with tf.device(device):
                found = _measured(call, values, known, times=times, flops=flops)
            values = {value: tensor for value, tensor in values.items() if last_use.get(value, -1) > index}
        costs.append(_cost(call, found, microbatch_size, seen))
    return costs


def _measured(
    call: Call, values: dict[Value, Any], known: dict[Any, tuple[float, float, float]], *, times: bool, flops: bool
) -> tuple[float, float, float]:
    """Run a call on real values, add what it makes to them, and return its seconds and operations."""
    variables = [(variable, tf.identity(variable.value)) for variable in call.variables]
    key = _kind(call, values)
    if key in known:
        _forward(call, values, variables)
        return known[key]
    with tf_function.own_traces():  # traced in the first run, which does not count
        seconds = [_timed(call, values, variables) for _ in range(_REPEATS + 1)][1:] if times else [(0.0, 0.0)]
    operations = _count_flops(call, values, variables) if flops else 0.0
    if not times:
        _forward(call, values, variables)
    known[key] = min(forward for forward, _ in seconds), min(backward for _, backward in seconds), operations
    return known[key]


def _forward(call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> None:
    with keras.StatelessScope(variables):
        model_graph.run([call], values, training=True)


def _timed(call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> tuple[float, float]:
    """Run a call forward and backward, add what it makes to the values, and return the seconds of both."""
    trainable = [tensor for variable, tensor in variables if variable.trainable]
    sources = [*(values[value] for value in call.inputs), *trainable]
    sources = [dense_part(tensor) for tensor in sources if tensor.dtype.is_floating]
    made = dict(values)
    began = time.perf_counter()
    with tf.GradientTape() as tape:
        tape.watch(sources)
        _forward(call, made, variables)
    _wait()
    forward_ended = time.perf_counter()
    outputs = [dense_part(made[value]) for value in call.outputs if made[value].dtype.is_floating]
    tape.gradient(outputs, sources)
    _wait()
    ended = time.perf_counter()
    values |= {value: made[value] for value in call.outputs}
    return forward_ended - began, ended - forward_ended


def _wait() -> None:
    """Wait for GPUs, which run behind Python."""
    if tf.config.list_logical_devices("GPU"):
        tf.test.experimental.sync_devices()


def _count_flops(call: Call, values: dict[Value, Any], variables: Sequence[tuple[Any, tf.Tensor]]) -> float:
    def forward() -> list[tf.Tensor]:
        made = dict(values)
        _forward(call, made, variables)
        return [made[value] for value in call.outputs]

    graph = tf.function(forward, autograph=False).get_concrete_function().graph
    options = tf.compat.v1.profiler.ProfileOptionBuilder(tf.compat.v1.profiler.ProfileOptionBuilder.float_operation())
    counted = tf.compat.v1.profiler.profile(graph, options=options.with_empty_output().build())
    return float(counted.total_float_ops)


def _kind(call: Call, values: dict[Value, Any]) -> Any:
    """Return a key that is the same for calls that cost the same."""
    settings: dict[str, Any] = {}
    if isinstance(call.operation, keras.Layer):
        try:
            settings = call.operation.get_config()
        except NotImplementedError:  # a layer of the user's own, without settings to compare
            return id(call.operation), call
        settings.pop("name", None)
    shapes = [(tuple(values[value].shape), values[value].dtype.name) for value in call.inputs]
    constants = [leaf for leaf in keras.tree.flatten((call.args, dict(call.kwargs))) if not isinstance(leaf, Value)]
    own = {name: value for name, value in vars(call.operation).items() if isinstance(value, int | float | str | tuple)}
    own.pop("name", None)
    return type(call.operation), repr(settings), repr(own) if not settings else "", repr(shapes), repr(constants)


def _cost(call: Call, found: tuple[float, float, float], microbatch_size: int, seen: set[int]) -> CallCost:
    fresh = [variable for variable in call.variables if id(variable) not in seen]
    seen.update(map(id, fresh))
    sizes = [(variable, _size(variable.shape) * tf.as_dtype(variable.dtype).size) for variable in fresh]
    return CallCost(
        *found,
        parameters=sum(_size(variable.shape) for variable in fresh),
        weight_bytes=sum(size for _, size in sizes),
        trainable_bytes=sum(size for variable, size in sizes if variable.trainable),
        activation_bytes=microbatch_size * sum(bytes_per_example(value) for value in call.outputs),
    )


def retrained(graph: Graph, costs: Sequence[CallCost]) -> list[CallCost]:
    """Return the costs of a model that trains other weights than when they were measured.

    Args:
        graph: The model.
        costs: Of its operations, as `measure` returned them.
    """
    seen: set[int] = set()
    fresh = [_cost(call, (0.0, 0.0, 0.0), 1, seen) for call in graph.calls]
    return [
        dataclasses.replace(cost, trainable_bytes=now.trainable_bytes) for cost, now in zip(costs, fresh, strict=True)
    ]


def _size(shape: Sequence[int | None]) -> int:
    return math.prod(size or 1 for size in shape)


def _of_size(tensor: Any, num_examples: int) -> Any:
    """Return as many examples as asked for, the given ones again and again."""
    if isinstance(tensor, tf.SparseTensor):
        repeated = [tensor] * -(-num_examples // int(data.num_rows(tensor)))
        return data.take_rows(data.join_batches(repeated), 0, num_examples)
    tensor = tensor if isinstance(tensor, tf.RaggedTensor) else tf.convert_to_tensor(tensor)
    return tf.gather(tensor, tf.range(num_examples, dtype=tf.int64) % data.num_rows(tensor))
