"""Place weights, their optimizer state and the operations on them on devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_graph, tf_tapes
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.variables import keras_variables, keras_weight_placement, sharded_memory

_MANY = 2**62


def place_weights(
    model: keras.Model,
    devices_of: Callable[[Any], Sequence[str]],
    sharded: Mapping[Any, tuple[int, Sequence[int]]] = MappingProxyType({}),
) -> None:
    """Place sharded weights on the devices of their shards, and each other weight on its device.

    A weight without memory is allocated there, so that a model can be larger than any single device.

    Args:
        model: A model with built layers.
        devices_of: Returns the devices of the shards of a variable, by their full names; a variable that is not sharded
            is placed on the first.
        sharded: The axis of each sharded weight and the sizes of its shards, by the weight's `id`.

    Example:
        >>> layer = keras.layers.Dense(4)
        >>> model = keras.Sequential([keras.Input((4,)), layer])
        >>> place_weights(model, lambda weight: ["CPU:1"])
        >>> layer.kernel.value.device[-5:]
        'CPU:1'
    """
    moves = keras_variables.num_moves(model.variables)
    for variable in model.variables:
        if id(variable) in sharded:
            sharded_memory.place_shards(variable, *sharded[id(variable)], devices_of(variable))
        else:
            keras_weight_placement.place(variable, devices_of(variable)[0])
    optimizer = keras_variables.optimizer_of(model)
    if keras_variables.num_moves(model.variables) != moves and optimizer is not None and optimizer.built:
        keras_optimizer.move_slots(optimizer)


@contextlib.contextmanager
def copied_to(device: str, variables: Iterable[keras.Variable]) -> Iterator[list[tf.Tensor]]:
    """Run the operations of this context on one device, on copies of weights that are on other devices.

    Operations compiled with XLA, such as grouped convolutions on a CPU, can only read weights of their own device.

    Args:
        device: The device, such as `"/device:GPU:0"`.
        variables: The weights and states that the operations read. Changes to copies are discarded.

    Yields:
        A list that receives, at the end, the losses that layers added and did not store.

    Example:
        >>> weight = keras.Variable([1.0, 2.0])
        >>> with copied_to("/device:CPU:0", [weight]):
        ...     total = float(tf.reduce_sum(weight.value))
        >>> total
        3.0
    """
    losses: list[tf.Tensor] = []
    with tf.device(device):
        remote = [variable for variable in variables if not keras_variables.is_on(variable, device)]
        copies = [(variable, tf.identity(variable.value)) for variable in remote]
        if not copies:
            yield losses
            return
        with tf_tapes.replaced(copies, collect_losses=True) as scope:
            yield losses
        losses += scope.losses


@contextlib.contextmanager
def follow_data() -> Iterator[None]:
    """Place every operation of this context on the device of its largest input.

    Keras' optimizers do not place their operations, so all gradients and weights would be copied to the first device.
    In this context a weight is clipped, averaged and updated on its own device, and only norms are transferred.

    Example:
        >>> with tf.device("CPU:0"):
        ...     weight = tf.Variable(tf.ones([4]))
        >>> def update():
        ...     with follow_data():
        ...         return weight.assign_add(tf.ones([4]))
        >>> tf.function(update)().numpy()
        array([2., 2., 2., 2.], dtype=float32)
    """
    if tf.executing_eagerly():
        yield
        return
    captured: dict[int, Any] = {}

    def device_of(tensor: Any) -> str:
        """Return the device of a tensor; of a captured tensor, the device outside the function.

        The placeholder of a captured tensor may have the device of a context around the function, and variables are
        read on the device of their handle.
        """
        while hasattr(tensor, "op"):
            if tensor.op.type == "ReadVariableOp" and not tensor.device:
                tensor = tensor.op.inputs[0]
                continue
            if tensor.op.type != "Placeholder":
                break
            if id(tensor) not in captured:
                captured.update((id(inner), outer) for outer, inner in tensor.graph.captures)
            if captured.setdefault(id(tensor), None) is None:  # an argument of the function
                return ""
            tensor = captured[id(tensor)]
        return str(tensor.device)

    def device_of_largest_input(op: tf.Operation) -> str:
        largest, device_of_largest = -1.0, ""
        for tensor in op.inputs:
            device = device_of(tensor)
            # A resource handle counts as a variable, an unknown number of rows as many.
            num_elements = tensor.shape.num_elements()
            size = float("inf") if tensor.dtype == tf.resource else _MANY if num_elements is None else num_elements
            if device and size > largest:
                largest, device_of_largest = size, device
        device = op.device or device_of_largest
        if device:
            tf_graph.place_constants(op, device)
        return device

    with tf.compat.v1.get_default_graph().device(device_of_largest_input):
        yield
