"""Inputs of many features, of which each device receives its columns only.

    host   x [batch, 10,000,000] ─┬─ columns of shard 0 ──► device 0   · kernel[rows of shard 0] ─┐
                                  └─ columns of shard 1 ──► device 1   · kernel[rows of shard 1] ─┴─ sum

The host cuts the columns of the next batch while a step runs, with the rest of the input pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.pipeline.graph.ir import Graph, Value
from tfpar.pipeline.stages.bundles import is_copied
from tfpar.strategies.batches_ahead import HOST
from tfpar.strategies.tensor_parallel.layout import Layout
from tfpar.strategies.tensor_parallel.pieces import Pieces, columns_of


class CutInputs(NamedTuple):
    """The inputs of a model for one batch.

    Args:
        values: The inputs of the graph, in its order; a list of pieces for one that is cut.
    """

    values: list[Any]


def cut_sizes(graph: Graph, layout: Layout) -> Mapping[Value, tuple[int, ...]]:
    """Return the numbers of columns of each input of the graph that every reader takes by these columns.

    Args:
        graph: The layer calls of a model.
        layout: Its layout.
    """
    found: dict[Value, tuple[int, ...]] = {}
    for value in graph.inputs:
        readers = [
            way for call, way in zip(graph.calls, layout.ways, strict=True) for one in call.inputs if one == value
        ]
        sizes = {
            layout.weights[key].sizes if way.takes == -1 else None
            for way in readers
            if way is not None
            for key in way.cuts
        }
        is_output = value in tf.nest.flatten(graph.outputs)
        (only,) = sizes if len(sizes) == 1 and None not in readers and not is_output else (None,)
        if only is not None and len(value.shape) > 1 and sum(only) == value.shape[-1]:
            found[value] = only
    return found


def cut_inputs(
    graph: Graph, cuts: Mapping[Value, tuple[int, ...]], values: Sequence[Any], devices: Sequence[str]
) -> tuple[CutInputs, list[str]]:
    """Cut inputs into columns, on the host; return them with the device that reads each flat tensor.

    Args:
        graph: The layer calls of a model.
        cuts: The numbers of columns of the inputs to cut.
        values: The inputs of the graph for one batch, in its order.
        devices: The device of each shard.
    """
    parts: list[Any] = []
    readers: list[str] = []
    with tf.device(HOST):
        for value, tensor in zip(graph.inputs, values, strict=True):
            if value in cuts:
                parts.append(columns_of(tensor, cuts[value]))
                readers += devices
            else:
                parts.append(tensor)
                readers.append(devices[0])
    return CutInputs(parts), readers


def sent_inputs(inputs: CutInputs, devices: Sequence[str]) -> CutInputs:
    """Return inputs with each tensor on its device; those that no device copies stay on the host.

    Args:
        inputs: Inputs on the host.
        devices: The device that reads each flat tensor.
    """
    found = []
    for tensor, device in zip(tf.nest.flatten(inputs), devices, strict=True):
        with tf.device(device):
            found.append(tf.identity(tensor) if is_copied(tensor) else tensor)
    packed: CutInputs = tf.nest.pack_sequence_as(inputs, found)
    return packed


def in_pieces(inputs: CutInputs) -> list[Any]:
    """Return the inputs of the graph, those that are cut as `Pieces`.

    Args:
        inputs: Inputs whose tensors are on their devices.
    """
    return [Pieces(tuple(one), -1) if isinstance(one, list) else one for one in inputs.values]
