"""Compiled functions of a model's outputs, which may be sharded over several devices.

    device 0   shard ─► cross-entropy ─┐
                                       ├─► loss
    device 1   shard ─► cross-entropy ─┘

A function call has all arguments and results on one device. So functions of sharded outputs add their operations to the
calling graph instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar.pipeline.stages.shards import copy_argument, requested_device
from tfpar.pipeline.stages.subgraphs import Subgraph, extract_subgraphs


class OutputFunction:
    """A compiled function of a model's outputs.

    Args:
        concrete: A concrete function whose arguments include the outputs.
        outputs: A structure with the `ValueSpec` of each output.
        devices: The device of each shard of the outputs. The first runs unsharded operations.
    """

    def __init__(self, concrete: Any, outputs: Any, devices: Sequence[str]) -> None:
        self.concrete, self._devices = concrete, devices
        self._is_sharded = any(spec.is_sharded for spec in tf.nest.flatten(outputs))

    def __call__(self, *arguments: Any) -> Any:
        """Call the function. Control dependencies, not program order, determine the order of stateful operations."""
        if tf.executing_eagerly() or not self._is_sharded:
            return tf_function.unordered_call(self.concrete, *arguments)
        on_shards = [copy_argument(tensor, self._devices) for tensor in _flat(arguments) if tensor is not None]
        known = {inner.ref(): tensor for inner, tensor in zip(self._inputs, on_shards, strict=True)}
        self._subgraph(known)
        traced = self.concrete.structured_outputs
        results = [None if tensor is None else known[tensor.ref()] for tensor in _flat(traced)]
        for tensor, result in zip(_flat(traced), results, strict=True):
            if result is not None:
                result.set_shape(tensor.shape)
        return tf.nest.pack_sequence_as(traced, results, expand_composites=True)

    @functools.cached_property
    def _inputs(self) -> list[tf.Tensor]:
        captured = {inner.ref() for _, inner in self.concrete.graph.captures}
        return [tensor for tensor in self.concrete.inputs if tensor.ref() not in captured]

    @functools.cached_property
    def _subgraph(self) -> Subgraph:
        results = [tensor for tensor in _flat(self.concrete.structured_outputs) if tensor is not None]
        (subgraph,) = extract_subgraphs(self.concrete.graph, self._inputs, [results], self._devices)
        # TensorFlow returns each result through an Identity without a device.
        returned = {tensor.op.name: tensor.op.inputs[0].device for tensor in results if tensor.op.type == "Identity"}
        for node in subgraph.operations.node:
            if node.name in returned and not node.device:
                node.device = requested_device(returned[node.name], self._devices)
        return subgraph


def _flat(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure, expand_composites=True))
