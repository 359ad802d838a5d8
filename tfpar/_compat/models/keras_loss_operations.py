"""Losses computed in a model's `call`, as operations of its graph.

Keras 3.15 records neither `add_loss` calls in subclasses nor the reduction of loss objects.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src import backend
from keras.src.losses import loss as loss_module


class AddedLoss(keras.Operation):
    """A call of `add_loss` in a model's `call`."""

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
    """The reduction of a loss object that is called in a model's `call`."""

    def __init__(self, reduction: str | None, dtype: Any) -> None:
        super().__init__(name="loss")
        self.reduction, self.dtype = reduction, dtype

    def call(self, values: Any, sample_weight: Any = None, mask: Any = None) -> Any:
        """Reduce the values of a loss as Keras does."""
        return loss_module.reduce_weighted_values(values, sample_weight, mask, self.reduction, self.dtype)

    def compute_output_spec(self, values: Any, sample_weight: Any = None, mask: Any = None) -> keras.KerasTensor:
        """Return a symbolic scalar, or symbolic values without a reduction."""
        shape = values.shape if self.reduction in (None, "none") else ()
        return keras.KerasTensor(shape, backend.standardize_dtype(self.dtype or values.dtype))
