"""A model as a sequence of stages, run as a whole on one batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.placement.weight_devices import copied_to


@dataclasses.dataclass(frozen=True, eq=False)
class StagedModel:
    """A model as a sequence of stages.

    Args:
        model: A built model.
        graph: Its layer calls.
        stages: Its stages.
        devices: The device of each stage.
    """

    model: keras.Model
    graph: Graph
    stages: Sequence[Stage]
    devices: Sequence[str]

    def flat_inputs(self, inputs: Any) -> dict[Value, tf.Tensor]:
        """Return the tensor of each graph input, `[batch, ...]`, for inputs of the model."""
        return dict(zip(self.graph.inputs, model_graph.standardize(self.model, inputs), strict=True))

    def call(self, inputs: Any, training: bool) -> Any:
        """Call the model stage by stage, which adds losses of layers in this order; return its outputs."""
        tensors: dict[Value, Any] = self.flat_inputs(inputs)
        for stage, device in zip(self.stages, self.devices, strict=True):
            with copied_to(device, stage.variables) as losses:
                model_graph.run(stage.calls, tensors, training)
            layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
            for loss in losses:
                (layers or [self.model])[0].add_loss(loss)
        return keras.tree.map_structure(lambda value: tensors[value], self.graph.outputs)

    def packed_outputs(self, outputs: Sequence[Any]) -> Any:
        """Pack flat outputs into the structure of the model's outputs."""
        return keras.tree.pack_sequence_as(self.graph.outputs, outputs)
