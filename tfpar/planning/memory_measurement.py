"""The bytes of a model's training step, of its blocks, of TensorFlow itself, and of a device's memory.

    model_bytes(model, batch, device) -> MemoryCosts           weights, slots, working
    block_bytes(graph, inputs, num_examples, device) -> list[BlockBytes]    saved, shared, temporary of each layer call
    runtime_bytes(device) -> int

The step is run at two sizes, and the allocator of the device counts its bytes. Where it does not count them, the graph
of the step is read instead, as that of each layer call: a tensor lives until its last reader has run.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import random_state
from tfpar.cluster import process_memory
from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.planning.call_tracing import TracedCall, trace_calls
from tfpar.planning.costs import NO_BYTES, Bytes
from tfpar.planning.graph_reading import needed_operations, read_graph, tensor_bytes
from tfpar.planning.liveness import executor_order, live_bytes
from tfpar.reduction.weight_owners import num_bytes
from tfpar.strategies import SingleDevice

# Threads run the operations in another order each time, so that the peak differs: the largest of ten steps, or of those
# that fit into a second, but of at least three.
_MOST_STEPS, _LEAST_STEPS, _STEPS_SECONDS = 10, 3, 1.0


@dataclasses.dataclass(frozen=True)
class MemoryCosts:
    """The bytes of training a model on one device.

    Args:
        weight_bytes: Bytes of all weights.
        trainable_bytes: Bytes of the trainable weights.
        slot_bytes: Bytes of the optimizer's state.
        working: Bytes of a training step beyond weights and state, at the peak.
        scratch: Of these, the bytes of each example beyond the results of operations in one order: memory inside of
            operations, such as that of convolutions, and results of operations that threads run at once.
    """

    weight_bytes: int
    trainable_bytes: int
    slot_bytes: int
    working: Bytes
    scratch: Bytes = NO_BYTES


def model_bytes(model: keras.Model, batch: Any, device: str = "CPU:0") -> MemoryCosts:
    """Measure the bytes of training a model on one device.

    Args:
        model: A compiled model that is built, on the device, which is trained for some steps; the variables of its
            optimizer are created if they are missing.
        batch: Examples, `(inputs, targets, sample_weight)` as far as given, `[batch, ...]` each.
        device: The device.

    Returns:
        The bytes; the peak of a step as a line through two sizes: the batch, or the largest half of a half of it that
        fits, and half of that.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse")
        >>> model_bytes(model, (tf.zeros([4, 4]), tf.zeros([4, 8]))).weight_bytes
        160
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    sizes, found = _bytes_of_sizes(model, batch, int(data.num_rows(batch)), device)
    return MemoryCosts(
        weight_bytes=sum(map(num_bytes, model.variables)),
        trainable_bytes=sum(map(num_bytes, model.trainable_variables)),
        slot_bytes=sum(map(num_bytes, model.optimizer.variables)),
        working=_line(sizes, [one.counted for one in found]),
        # Those of no example are temporaries of the update.
        scratch=_line(sizes, [max(0, one.counted - one.read) for one in found])._replace(start_bytes=0.0),
    )


class _StepBytes(NamedTuple):
    """The bytes of a step at its peak, as the allocator counts them, and as read from its graph."""

    counted: int
    read: int


def _bytes_of_sizes(
    model: keras.Model, batch: Any, num_examples: int, device: str
) -> tuple[list[int], list[_StepBytes]]:
    """Return two numbers of examples with the bytes of a step; smaller ones where the memory does not suffice."""
    sizes = sorted({max(1, num_examples // 2), num_examples})
    try:
        return sizes, [_step_bytes(model, batch, size, device) for size in sizes]
    except tf.errors.ResourceExhaustedError:
        if num_examples == 1:
            raise
        return _bytes_of_sizes(model, batch, num_examples // 2, device)


def _line(sizes: Sequence[int], found: Sequence[int]) -> Bytes:
    """Return the line through the last of some sizes, and through the first where it is another."""
    if len(sizes) == 1:
        return Bytes(0.0, found[0] / sizes[0])
    slope = max(0.0, (found[-1] - found[0]) / (sizes[-1] - sizes[0]))
    start = found[-1] - slope * sizes[-1]
    return Bytes(start, slope) if start >= 0 else Bytes(0.0, found[-1] / sizes[-1])


@random_state.preserved_random_state()
def _step_bytes(model: keras.Model, batch: Any, num_examples: int, device: str) -> _StepBytes:
    strategy = SingleDevice(device)
    repeats = -(-num_examples // int(data.num_rows(batch)))
    given = data.take_rows(batch if repeats == 1 else data.join_batches([batch] * repeats), 0, num_examples)
    with tf.device(device):
        given = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.identity(leaf), given)
    specs = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), given)
    step = tf.function(lambda examples: strategy.train_step(model, examples), autograph=False)
    function = step.get_concrete_function(specs)
    graph = function.graph
    read = _most_bytes(needed_operations(graph.get_operations(), graph.outputs), num_examples, device)
    return _StepBytes(_most_counted_bytes(lambda: step(given), device) if counts_bytes(device) else read, read)


def counts_bytes(device: str) -> bool:
    """Return whether the allocator of a device counts its bytes; its peak is then that from now on.

    Args:
        device: The name of the device.

    Example:
        >>> counts_bytes("CPU:0")
        True
    """
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError:
        return False
    return True


def _most_counted_bytes(run: Callable[[], Any], device: str) -> int:
    """Return the largest peak of several runs."""
    begin, found = time.perf_counter(), list[int]()
    while len(found) < _LEAST_STEPS or (len(found) < _MOST_STEPS and time.perf_counter() - begin < _STEPS_SECONDS):
        found.append(_counted_bytes(run, device))
    return max(found)


def _counted_bytes(run: Callable[[], Any], device: str) -> int:
    """Return the bytes that are allocated at the peak of a run, beyond those before it."""
    before_bytes = tf.config.experimental.get_memory_info(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    run()
    return int(tf.config.experimental.get_memory_info(device)["peak"] - before_bytes)


class BlockBytes(NamedTuple):
    """The bytes of one layer call.

    Args:
        saved: Bytes that its backward pass needs and no earlier call saves.
        shared: Bytes of inputs that its backward pass needs, and that an earlier call saves.
        temporary: The largest of its temporaries in the backward pass, the gradient of its outputs included; of a call
            without a backward pass in the forward pass, its inputs and outputs included.
    """

    saved: Bytes = NO_BYTES
    shared: Bytes = NO_BYTES
    temporary: Bytes = NO_BYTES


def block_bytes(graph: Graph, inputs: Sequence[Any], num_examples: int, device: str = "CPU:0") -> list[BlockBytes]:
    """Measure the bytes of each layer call of a model.

    Args:
        graph: The model.
        inputs: The flat inputs of the model, `[examples, ...]` each.
        num_examples: The largest number of examples; half of it is the other size.
        device: The device.

    Returns:
        The bytes of each layer call, in the order of the graph.

    Example:
        >>> from tfpar.pipeline.graph import tracing
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
        >>> [one.saved.of(10) for one in block_bytes(tracing.trace(model), [tf.zeros([10, 4])], 10)]
        [160, 320]
    """
    sizes = sorted({max(1, num_examples // 2), num_examples})
    found = []
    for size in sizes:
        read = functools.partial(_of_call, kept=set[Value](), device=device)
        found.append(trace_calls(graph, inputs, size, device, read))
    return [
        BlockBytes(*(_line(sizes, values) for values in zip(*of_sizes, strict=True)))
        for of_sizes in zip(*found, strict=True)
    ]


def _of_call(traced: TracedCall, kept: set[Value], device: str) -> tuple[int, int, int]:
    """Return the three numbers of bytes of a layer call; add to `kept` the values that it saves."""
    size, inner = traced.size, set(traced.forward)
    backward = needed_operations(traced.backward, _tensors(traced.gradients))
    used = {_owner(tensor, inner).ref() for op in backward for tensor in op.inputs if tensor.op in inner}
    parts = {value: _tensors([tensor]) for value, tensor in traced.given.items()}
    input_bytes = {value: sum(tensor_bytes(part, size) for part in of_value) for value, of_value in parts.items()}
    of_inputs = {part.ref(): value for value, of_value in parts.items() for part in of_value}
    direct = {tensor.ref() for op in backward for tensor in op.inputs} & set(of_inputs)
    needed = {value for ref, value in of_inputs.items() if ref in used | direct}
    own = [ref.deref() for ref in used if ref.deref().op in inner]
    saved = sum(tensor_bytes(one, size) for one in own) + sum(input_bytes[one] for one in needed - kept)
    shared = sum(input_bytes[one] for one in needed & kept)
    kept |= needed | {
        value
        for value, one in zip(traced.call.outputs, traced.outputs, strict=True)
        if any(_owner(part, inner).ref() in used for part in _tensors([one]))
    }
    if traced.gradients:
        temporary = _most_bytes(backward, size, device)
    else:
        temporary = _most_bytes(needed_operations(traced.forward, _tensors(traced.outputs)), size, device)
        temporary += sum(input_bytes.values())
    return saved, shared, temporary


def _most_bytes(operations: Sequence[tf.Operation], size: int, device: str) -> int:
    """Return the bytes of the results of operations at the peak."""
    nodes = read_graph(operations, "GPU" in device, size)
    return max(live_bytes(nodes, executor_order(nodes)), default=0)


def _tensors(given: Sequence[Any]) -> list[tf.Tensor]:
    """Return the tensors of which some tensors are made: a ragged or sparse one, or a gradient by rows, of several."""
    return [part for one in given for part in tf.nest.flatten(one, expand_composites=True)]


_VIEWS = ("Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient")


def _owner(tensor: tf.Tensor, inner: set[tf.Operation]) -> tf.Tensor:
    """Return the tensor whose memory a view shares, as far as a call has made it."""
    while tensor.op in inner and tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[0]
    return tensor


@functools.cache
def runtime_bytes(device: str) -> int:
    """Measure what TensorFlow itself takes of a device's memory.

    Of a GPU it is what a trivial step allocates: the memory of the context is not part of what TensorFlow can give to
    tensors. Of a CPU it is the memory of the process, so call it before a model is built.

    Args:
        device: The device.

    Returns:
        Bytes.

    Example:
        >>> runtime_bytes("CPU:0") > 0
        True
    """
    with tf.device(device):
        tf.function(lambda one: one + 1.0)(tf.zeros([])).numpy()
    if "GPU" in device:
        return int(tf.config.experimental.get_memory_info(device)["current"])
    return process_memory.resident_bytes()
