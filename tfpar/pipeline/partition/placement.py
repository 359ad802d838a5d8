"""Which device holds which weight, and how arithmetic on weights stays with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_pipeline, keras_variables
from tfpar.pipeline.partition.stages import Stage, owner_of


def place_weights(model: keras.Model, stages: Sequence[Stage], devices: Sequence[str]) -> None:
    """Let every weight live where its stage runs; one that several stages use, where the first of them runs.

    A weight that has no memory yet gets it there, so that a model larger than any one device can be built. Optimizer
    state that exists already moves with its weight.

    Args:
        model: A model whose layers are built.
        stages: Its stages.
        devices: One a stage.
    """
    owners = owner_of(stages, model.variables)
    moved = [keras_pipeline.place(variable, devices[owners[id(variable)]]) for variable in model.variables]
    optimizer = keras_variables.optimizer_of(model)
    if any(moved) and optimizer is not None and optimizer.built:
        keras_pipeline.move_optimizer(optimizer, model.trainable_variables)


@contextlib.contextmanager
def copied_to(device: str, variables: Iterable[keras.Variable]) -> Iterator[list[tf.Tensor]]:
    """Run everything inside this context on one device, with copies of the weights that live on others.

    What XLA compiles, as Keras' grouped convolutions on CPUs, cannot read a weight of another device.

    Args:
        device: Such as `"/device:GPU:0"`.
        variables: The weights and states that are read; those of other devices do not change.

    Yields:
        A list that holds, after the context, losses that layers added and that are not in the layers.
    """
    losses: list[tf.Tensor] = []
    with tf.device(device):
        foreign = [variable for variable in variables if not keras_variables.is_on(variable, device)]
        copies = [(variable, tf.identity(variable.value)) for variable in foreign]
        if not copies:
            yield losses
            return
        with keras.StatelessScope(copies, collect_losses=True) as scope:
            yield losses
        losses += scope.losses


@contextlib.contextmanager
def follow_data() -> Iterator[None]:
    """Let every operation inside this context run where the largest of its inputs is.

    An optimizer, written for one device, would otherwise pull all gradients and weights to the first one: clipping,
    moving averages and updates now stay on each weight's own device, and only norms travel.
    """
    if tf.executing_eagerly():
        yield
        return
    captured: dict[int, Any] = {}

    def device_of(tensor: Any) -> str:
        """Return where a tensor is; that of a captured one is known outside of its graph."""
        while not tensor.device and hasattr(tensor, "op") and tensor.op.type == "Placeholder":
            if id(tensor) not in captured:
                captured.update((id(inner), outer) for outer, inner in tensor.graph.captures)
            if captured.setdefault(id(tensor), None) is None:  # an argument, not captured
                return ""
            tensor = captured[id(tensor)]
        return str(tensor.device)

    def device_of_largest_input(op: tf.Operation) -> str:
        largest, where = -1.0, ""
        for tensor in op.inputs:
            device = device_of(tensor)
            # A handle stands for all of its variable.
            size = float("inf") if tensor.dtype == tf.resource else tensor.shape.num_elements() or 0
            if device and size > largest:
                largest, where = size, device
        return op.device or where

    with tf.compat.v1.get_default_graph().device(device_of_largest_input):
        yield
