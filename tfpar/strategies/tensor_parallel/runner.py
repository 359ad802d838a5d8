"""A run of a model whose layer calls are divided over devices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.ir import Call, Graph, Value, run_call
from tfpar.strategies.batch_parts import split_into_parts
from tfpar.strategies.tensor_parallel.layout import Layout, Way
from tfpar.strategies.tensor_parallel.replicas import discarding_changes, joined
from tfpar.strategies.tensor_parallel.shards import Placed, WholeValues
from tfpar.strategies.tensor_parallel.table_copies import TableCopies
from tfpar.strategies.tensor_parallel.wide_inputs import CutInputs, in_pieces


class DividedModel(NamedTuple):
    """A model with a layout.

    Args:
        model: A built model; its divided weights are in pieces, each weight on the devices of one replica.
        graph: Its layer calls.
        layout: The way of each layer call.
        replicas: The device of each shard, for each replica; the first of a replica runs what is not divided.
    """

    model: keras.Model
    graph: Graph
    layout: Layout
    replicas: Sequence[Sequence[str]]

    @property
    def devices(self) -> Sequence[str]:
        """The device of each shard of the first replica."""
        return self.replicas[0]

    def call(self, inputs: Any, training: bool, copies: TableCopies | None = None) -> Any:
        """Return the outputs of the model as whole tensors on the first device, `[batch, ...]` each.

        Args:
            inputs: The inputs of the model, `[batch, ...]` each, or as `wide_inputs` cuts them.
            training: Whether the model trains.
            copies: Copies tables in training.
        """
        if isinstance(inputs, CutInputs):
            return self._outputs(in_pieces(inputs), self.devices, training)
        with tf.device(self.devices[0]):
            given = model_graph.standardize(self.model, inputs)
        first = copies.read_on(self.devices[0], self.devices[0]) if copies else contextlib.nullcontext()
        if len(self.replicas) == 1:
            with first:
                return self._outputs(given, self.devices, training)
        parts, _, _, num_examples = split_into_parts(given, data.num_rows(given), len(self.replicas), slice(None))
        with first:
            outputs = [self._outputs(_on(self.devices[0], parts[0]), self.devices, training)]
        homes = [devices[0] for devices in self.replicas]
        for number, devices in enumerate(self.replicas[1:], 1):
            with discarding_changes(self.model, number, homes, copies):
                outputs.append(self._outputs(_on(devices[0], parts[number]), devices, training))
        return joined(outputs, homes, num_examples)

    def _outputs(self, given: Sequence[Any], devices: Sequence[str], training: bool) -> Any:
        """Run all layer calls on the devices of a replica; return the outputs for its part of the batch."""
        placed = Placed(dict(zip(self.graph.inputs, given, strict=True)), devices)
        run_calls(self.graph.calls, self.layout.ways, placed, training)
        return keras.tree.map_structure(lambda leaf: _output(leaf, placed), self.graph.outputs)


def run_calls(calls: Sequence[Call], ways: Sequence[Way | None], placed: Placed, training: bool) -> None:
    """Run layer calls, each in its way.

    Args:
        calls: Layer calls in their order.
        ways: The way of each; None for one that runs on the first device alone.
        placed: Their inputs, to which their outputs are added.
        training: Whether the model trains.
    """
    way_of = {id(call): way for call, way in zip(calls, ways, strict=True)}

    def run_one(call: Call, tensors: dict[Value, Any], training: bool) -> Any:
        way = way_of[id(call)]
        if way is not None and way.run is not None:
            return way.run(placed, call, training)
        with tf.device(placed.devices[0]):
            results = run_call(call, WholeValues(placed), training)
        for value in call.inputs:
            if placed.mask(value) is not None and keras_model.mask_of(placed.whole(value)) is None:
                placed.remove_mask(value)
        return results

    model_graph.run(calls, placed.tensors, training, run_one)


def _output(leaf: Any, placed: Placed) -> Any:
    return placed.whole(leaf) if isinstance(leaf, Value) else leaf


def _on(device: str, values: Sequence[Any]) -> list[Any]:
    with tf.device(device):
        return [tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in values]
