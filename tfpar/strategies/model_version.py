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
        self._plain_settings, self._is_traced = _plain_settings(model), False

    def is_moved(self, model: keras.Model) -> bool:
        """Return whether weights have moved since."""
        return self._memories != self._memories_of(model)

    def is_current(self, model: keras.Model) -> bool:
        """Return whether the model was not compiled since, no weight has moved, and no step lacks changed settings."""
        if keras_model.compilation(model) is not self._compilation or self.is_moved(model):
            return False
        return self._is_traced or self._plain_settings == _plain_settings(model)

    def has_other_settings(self, model: keras.Model) -> bool:
        """Return whether the model was compiled since, with other settings of its layers than before."""
        compilation = keras_model.compilation(model)
        if compilation is self._compilation:
            return False
        before, self._compilation, self._settings = self._settings, compilation, _settings(model)
        self._plain_settings, self._is_traced = _plain_settings(model), False
        return before != self._settings

    def check_settings(self, model: keras.Model) -> None:
        """Refuse a trace of a step of the model if settings of its layers have changed without `compile`.

        Keras traces the steps of `fit`, `evaluate` and `predict` each at its first call, with the settings of that
        moment. All steps here have the layers of one trace.

        Raises:
            ValueError: If a layer has changed.
        """
        self._is_traced = True
        for name, settings in _plain_settings(model).items():
            if settings != self._plain_settings.get(name):
                raise ValueError(
                    f"Changed settings of a layer take effect with compile() here, and the layer {name!r} of "
                    f"{model.name!r} has changed since. Call compile() after such a change."
                )

    def _memories_of(self, model: keras.Model) -> tuple[int, int]:
        num_moves = keras_variables.num_moves(model.variables)
        return num_moves, len(model.variables) if self._counts_variables else 0


def _plain_settings(model: keras.Model) -> dict[str, Hashable]:
    """Return the settings of the layers of Keras, and the activity regularizers of all, by the path of the layer.

    Attributes of a layer of the user's may change in its own call, as a counter does.
    """
    layers = [layer for layer in keras_model.all_layers(model) if not isinstance(layer, keras.Model)]
    return {
        layer.path or layer.name: (
            settings_of(layer, with_trainable=False) if keras_model.is_of_keras(type(layer)) else None,
            repr(keras.regularizers.serialize(layer.activity_regularizer)),
        )
        for layer in layers
    }


def _settings(model: keras.Model) -> list[Hashable]:
    """Return the settings of a model, without `trainable`: gradients are computed for each compilation."""
    others = [layer for layer in keras_model.all_layers(model) if layer is not model]
    return [settings_of_model(model), *(settings_of(layer, with_trainable=False) for layer in others)]
