"""Losses of a model's `call` as operations of its graph.

Written for Keras 3.15, which records neither a call of `add_loss` in a subclass nor the reduction of a loss object.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src import backend
from keras.src.losses import loss as loss_module


class AddedLoss(keras.Operation):
    """Adds a loss to a model, where its `call` did so."""

    def __init__(self, model: keras.Model) -> None:
        super().__init__(name="add_loss")
        self.model = model

    def call(self, loss: Any) -> tuple[()]:
        """Add a loss to the model."""
        self.model.add_loss(loss)
        return ()

    def compute_output_spec(self, loss: Any) -> tuple[()]:
        """Return nothing: the operation has no outputs."""
        return ()


class ReducedLoss(keras.Operation):
    """Makes a scalar of a loss's values where a model's `call` calls a loss object: one operation, as in Keras 3.15."""

    def __init__(self, reduction: str | None, dtype: Any) -> None:
        super().__init__(name="loss")
        self.reduction, self.dtype = reduction, dtype

    def call(self, values: Any, sample_weight: Any = None, mask: Any = None) -> Any:
        """Reduce the values of a loss, as Keras does in `call`."""
        return loss_module.reduce_weighted_values(values, sample_weight, mask, self.reduction, self.dtype)

    def compute_output_spec(self, values: Any, sample_weight: Any = None, mask: Any = None) -> keras.KerasTensor:
        """Return a symbolic scalar, or values where nothing is reduced."""
        shape = values.shape if self.reduction in (None, "none") else ()
        return keras.KerasTensor(shape, backend.standardize_dtype(self.dtype or values.dtype))
