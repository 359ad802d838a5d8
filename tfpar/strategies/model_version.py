"""The version of a model that a trace of its layers is of: where its weights are, and the settings of its layers."""

from __future__ import annotations

from collections.abc import Hashable

import keras

from tfpar._compat import keras_model, keras_variables
from tfpar.pipeline.partition.layer_settings import settings_of, settings_of_model


class ModelVersion:
    """The present version of a model.

    As in Keras, changed settings of a layer, such as its activation, take effect with the next `compile`.

    Args:
        model: A model.
        counts_variables: Whether a change of their number is a move (LoRA adds some).
    """

    def __init__(self, model: keras.Model, counts_variables: bool) -> None:
        self._counts_variables = counts_variables
        self._memories = self._memories_of(model)
        self._compilation, self._settings = keras_model.compilation(model), _settings(model)

    def is_moved(self, model: keras.Model) -> bool:
        """Return whether weights have moved since."""
        return self._memories != self._memories_of(model)

    def has_other_settings(self, model: keras.Model) -> bool:
        """Return whether the model was compiled since, with other settings of its layers than before."""
        compilation = keras_model.compilation(model)
        if compilation is self._compilation:
            return False
        before, self._compilation, self._settings = self._settings, compilation, _settings(model)
        return before != self._settings

    def _memories_of(self, model: keras.Model) -> tuple[int, int]:
        num_moves = keras_variables.num_moves(model.variables)
        return num_moves, len(model.variables) if self._counts_variables else 0


def _settings(model: keras.Model) -> list[Hashable]:
    """Return the settings of a model, without `trainable`: gradients are computed for each compilation."""
    others = [layer for layer in keras_model.all_layers(model) if layer is not model]
    return [settings_of_model(model), *(settings_of(layer, with_trainable=False) for layer in others)]
