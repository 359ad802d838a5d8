"""The memory of divided weights and of their optimizer state, and the update of each piece on its device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras

from tfpar._compat.optimizers import keras_divided_optimizer, keras_optimizer
from tfpar._compat.variables import keras_variables, keras_weight_placement, sharded_memory
from tfpar.placement.weight_devices import follow_data
from tfpar.sharding.model_sharding import Division


def place(model: keras.Model, divisions: Mapping[Hashable, Division], homes: Callable[[Any], Sequence[str]]) -> None:
    """Place the pieces of divided weights on their devices, and each other weight on the first of its devices.

    Existing optimizer state moves with its weight.

    Args:
        model: A model with built layers.
        divisions: The division of each divided weight, by its `id`.
        homes: Returns the full name of the device of each shard for a variable.
    """
    before = keras_variables.num_moves(model.variables)
    for variable in model.variables:
        division, devices = divisions.get(id(variable)), homes(variable)
        if division is None:
            keras_weight_placement.place(variable, devices[0])
        elif not sharded_memory.is_divided_as(variable, *division, devices):
            sharded_memory.divide(variable, *division, devices)
    if keras_variables.num_moves(model.variables) != before:
        place_slots(model)


def place_slots(model: keras.Model) -> None:
    """Divide existing optimizer state as its weights: `optimizer.build` outside of a strategy creates it whole.

    Args:
        model: A model with divided weights.
    """
    optimizer = keras_variables.optimizer_of(model)
    if optimizer is not None and optimizer.built:
        keras_divided_optimizer.divide_slots(optimizer, model.trainable_variables)


def check_optimizer(model: keras.Model, strategy: str) -> None:
    """Refuse an optimizer that needs whole weights.

    Args:
        model: A compiled model with divided weights.
        strategy: The strategy, for the message.

    Raises:
        ValueError: If its optimizer is not known to update each element of a weight separately.
    """
    if not keras_divided_optimizer.is_elementwise(model.optimizer):
        name = type(keras_variables.innermost(model.optimizer)).__name__
        raise ValueError(
            f"{strategy} updates each piece of a weight on its own device, so the optimizer must update each "
            f"element separately, as Adam and SGD do, received {name}. Choose such an optimizer of Keras, or train "
            "with Mirrored(shard='optimizer'), where each weight is whole."
        )


def apply(model: keras.Model, found: Sequence[Any]) -> None:
    """Update the trained weights.

    Args:
        model: The model.
        found: The gradient of each piece of the trained weights, on its device; None for none.
    """
    pieces = [(piece, number) for number, one in enumerate(model.trainable_variables) for piece in _pieces(one)]
    owners = [number for (_, number), gradient in zip(pieces, found, strict=True) if gradient is not None]
    with (
        keras_optimizer.one_device_optimizer(),
        keras_divided_optimizer.of_pieces(model.optimizer, owners),
        follow_data(),
    ):
        keras_optimizer.apply(model.optimizer, found, [piece for piece, _ in pieces])


def finalize(model: keras.Model) -> None:
    """Overwrite the weights with their moving averages, if the optimizer has them."""
    with keras_optimizer.one_device_optimizer(), keras_divided_optimizer.of_pieces(model.optimizer, []):
        model.optimizer.finalize_variable_values(
            [one for weight in model.trainable_variables for one in _pieces(weight)]
        )


def _pieces(weight: Any) -> list[Any]:
    return sharded_memory.pieces_of(weight)
