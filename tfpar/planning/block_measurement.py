"""The layer calls of a model as blocks, with their measured costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import random_state
from tfpar.full_precision import full_precision
from tfpar.messages.reasons import message_of
from tfpar.pipeline.graph import tracing
from tfpar.pipeline.graph.batch_dependence import ADVICE_OF_PIPELINES, check_batch_independence, check_synchronized
from tfpar.pipeline.partition.layer_profile import CallCost, measure
from tfpar.pipeline.partition.stages import bytes_per_example, cut_values
from tfpar.planning.costs import BlockCost, Bytes, fitted
from tfpar.planning.memory_measurement import block_bytes
from tfpar.reduction.weight_owners import num_bytes
from tfpar.strategies.tensor_parallel.ways import layout_of

SHARDS_OF_TRIAL = 2


class Traced(NamedTuple):
    """The graph of a model, or why there is none.

    Args:
        graph: The layer calls; None where the model cannot be cut into stages.
        inputs: The flat inputs of the model, `[batch, ...]` each.
        reason: Why there is no graph, a sentence; empty otherwise.
        normalizing: Layers with the statistics of a micro-batch.
    """

    graph: tracing.Graph | None
    inputs: Sequence[Any] = ()
    reason: str = ""
    normalizing: tuple[str, ...] = ()


def trace_model(model: keras.Model, device: str, batch: Any) -> Traced:
    """Trace a model, and check that its layers compute each example alone.

    Args:
        model: A compiled model that is built.
        device: Its device.
        batch: Examples, `[batch, ...]` each.
    """
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    try:
        with random_state.stand_in_generator():
            graph = tracing.trace(model, inputs)
            flat = tracing.standardize(model, inputs)
        with tf.device(device), full_precision():
            check_synchronized(graph)
            found = check_batch_independence(graph, flat, training=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        return Traced(None, (), ADVICE_OF_PIPELINES.sub("", message_of(error).splitlines()[0]))
    return Traced(graph, flat, "", found.batch_normalizations)


class Blocks(NamedTuple):
    """The layer calls of a model.

    Args:
        costs: Their costs, in the order of the graph; empty where the model cannot be cut.
        divides_loss: Whether tensor parallelism leaves the outputs of the model in pieces.
    """

    costs: tuple[BlockCost, ...] = ()
    divides_loss: bool = False


def measure_blocks(model: keras.Model, traced: Traced, device: str, sizes: Sequence[int]) -> Blocks:
    """Measure the forward and backward pass of each layer call at several numbers of examples.

    Args:
        model: The model.
        traced: Its graph; without one there are no blocks.
        device: The device of the measurement.
        sizes: Numbers of examples.
    """
    graph = traced.graph
    if graph is None:
        return Blocks()
    profiles = [measure(graph, traced.inputs, size, device, times=True, flops=False) for size in sizes]
    cuts = [*(Bytes(0, sum(map(bytes_per_example, values))) for values in cut_values(graph)), Bytes()]
    rows = zip(graph.calls, zip(*profiles, strict=True), cuts, _variable_bytes(graph), strict=True)
    blocks = [_block(call.name, sizes, of_sizes, cut, weights) for call, of_sizes, cut, weights in rows]
    return _divided(model, graph, blocks)


def with_bytes(blocks: Sequence[BlockCost], traced: Traced, num_examples: int, device: str) -> tuple[BlockCost, ...]:
    """Return the costs of blocks with the bytes of their saved tensors and temporaries.

    Args:
        blocks: Those of `measure_blocks`.
        traced: The graph of the model.
        num_examples: The largest number of examples.
        device: The device.
    """
    if traced.graph is None:
        return tuple(blocks)
    found = block_bytes(traced.graph, traced.inputs, num_examples, device)
    return tuple(dataclasses.replace(block, **one._asdict()) for block, one in zip(blocks, found, strict=True))


def _variable_bytes(graph: tracing.Graph) -> list[tuple[int, ...]]:
    """Return the bytes of each trainable weight of each layer call, those of shared weights at the first one."""
    first = {id(one): call for call in reversed(graph.calls) for one in call.variables}
    return [
        tuple(num_bytes(one) for one in call.variables if one.trainable and first[id(one)] is call)
        for call in graph.calls
    ]


def _block(
    name: str, sizes: Sequence[int], costs: Sequence[CallCost], cut: Bytes, variable_bytes: tuple[int, ...]
) -> BlockCost:
    return BlockCost(
        name=name,
        forward=fitted(sizes, [cost.forward_seconds for cost in costs]),
        backward=fitted(sizes, [cost.backward_seconds for cost in costs]),
        weight_bytes=costs[0].weight_bytes,
        trainable_bytes=costs[0].trainable_bytes,
        output=Bytes(0, costs[0].activation_bytes / sizes[0]),
        cut=cut,
        variable_bytes=variable_bytes,
    )


def _divided(model: keras.Model, graph: tracing.Graph, blocks: Sequence[BlockCost]) -> Blocks:
    """Return the blocks with what tensor parallelism divides; as they are where it cannot divide the model."""
    try:
        layout = layout_of(model, graph, SHARDS_OF_TRIAL, None)
    except (ValueError, TypeError):
        return Blocks(tuple(blocks))
    found: list[BlockCost] = []
    counted: set[int] = set()
    for call, way, block in zip(graph.calls, layout.ways, blocks, strict=True):
        if way is None:
            found.append(block)
            continue
        own = [one for one in call.variables if id(one) in layout.weights and id(one) not in counted]
        counted.update(map(id, own))
        outputs = sum(map(bytes_per_example, call.outputs)) if way.cuts and way.gives is None else 0
        inputs = sum(map(bytes_per_example, call.inputs)) if way.cuts and way.takes is None else 0
        found.append(
            dataclasses.replace(
                block,
                is_divided=True,
                divided_bytes=sum(map(num_bytes, own)),
                summed=Bytes(0, outputs + inputs),
            )
        )
    results = [leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, tracing.Value)]
    return Blocks(tuple(found), bool(results) and all(value in layout.values for value in results))
