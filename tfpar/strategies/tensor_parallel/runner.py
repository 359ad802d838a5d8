"""A run of a model whose layer calls are divided over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.ir import Call, Graph, Value, run_call
from tfpar.strategies.tensor_parallel.layout import Layout
from tfpar.strategies.tensor_parallel.shards import Placed, WholeValues
from tfpar.strategies.tensor_parallel.wide_inputs import CutInputs, in_pieces


class DividedModel(NamedTuple):
    """A model with a layout.

    Args:
        model: A built model; its divided weights are in pieces.
        graph: Its layer calls.
        layout: The way of each layer call.
        devices: The device of each shard; the first runs what is not divided.
    """

    model: keras.Model
    graph: Graph
    layout: Layout
    devices: Sequence[str]

    def call(self, inputs: Any, training: bool) -> Any:
        """Return the outputs of the model as whole tensors on the first device, `[batch, ...]` each."""
        placed = self.placed(inputs, training)
        return keras.tree.map_structure(lambda leaf: _output(leaf, placed), self.graph.outputs)

    def placed(self, inputs: Any, training: bool) -> Placed:
        """Run all layer calls; return all values, whole or in pieces.

        Args:
            inputs: The inputs of the model, `[batch, ...]` each, or as `wide_inputs` cuts them.
            training: Whether the model trains.
        """
        if isinstance(inputs, CutInputs):
            values = in_pieces(inputs)
        else:
            with tf.device(self.devices[0]):
                values = model_graph.standardize(self.model, inputs)
        tensors = dict(zip(self.graph.inputs, values, strict=True))
        placed = Placed(tensors, self.devices)
        ways = {id(call): way for call, way in zip(self.graph.calls, self.layout.ways, strict=True)}

        def run_one(call: Call, tensors: dict[Value, Any], training: bool) -> Any:
            way = ways[id(call)]
            if way is not None and way.run is not None:
                return way.run(placed, call, training)
            with tf.device(self.devices[0]):
                return run_call(call, WholeValues(placed), training)

        model_graph.run(self.graph.calls, tensors, training, run_one)
        return placed


def _output(leaf: Any, placed: Placed) -> Any:
    return placed.whole(leaf) if isinstance(leaf, Value) else leaf
