"""Snapshot of the model state a trace depends on: devices of weights and settings of layers."""

from __future__ import annotations

from collections.abc import Hashable

import keras

from tfpar._compat.models import keras_model
from tfpar._compat.variables import keras_variables
from tfpar.pipeline.partition.layer_settings import model_settings, operation_settings

_IN_TRAINING = (
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)


class ModelVersion:
    """Snapshot of the model state a trace of its layers depends on.

    As in Keras, a changed setting of a layer, such as its activation, takes effect with the next `compile`.

    Args:
        model: The model.
        counts_variables: Whether a changed number of variables counts as a move, as LoRA adds some.
    """

    def __init__(self, model: keras.Model, counts_variables: bool) -> None:
        self._counts_variables = counts_variables
        self._memories = self._memories_of(model)
        self._note(model)

    def _note(self, model: keras.Model) -> None:
        self._compilation, self._regularizers = keras_model.compilation(model), _regularizers(model)
        self._settings = _settings(model)
        self._traced: dict[bool, dict[str, Hashable]] = {}  # by whether the step trains

    def is_moved(self, model: keras.Model) -> bool:
        """Return True if weights have moved since the snapshot."""
        return self._memories != self._memories_of(model)

    def has_other_settings(self, model: keras.Model) -> bool:
        """Return True if the model was compiled again with other settings of its layers; updates the snapshot."""
        if keras_model.compilation(model) is self._compilation:
            return False
        before = self._settings
        self._note(model)
        return before != self._settings

    def check_settings(self, model: keras.Model, training: bool) -> None:
        """Refuse to trace a step with other settings than those of the traced layers.

        Keras traces `fit`, `evaluate` and `predict` at their first calls. Here `evaluate` and `predict` share the
        traces of layers, as do `fit` and a preview.

        Args:
            model: The model.
            training: Whether the step trains.

        Raises:
            ValueError: If a layer or an activity regularizer has changed.
        """
        if _regularizers(model) != self._regularizers:
            raise ValueError(
                f"An activity regularizer takes effect with compile(), and a layer of {model.name!r} has another one "
                "than at its last compile(). Call compile() after such a change."
            )
        settings = _settings_in_steps(model, training)
        before = self._traced.setdefault(training, settings)
        for name, setting in settings.items():
            if setting != before.get(name):
                steps = "fit() or preview()" if training else "evaluate() or predict()"
                raise ValueError(
                    f"A changed layer takes effect with compile(), and the layer {name!r} of {model.name!r} has other "
                    f"settings than in the last {steps}. Call compile() after such a change."
                )

    def _memories_of(self, model: keras.Model) -> tuple[int, int]:
        num_moves = keras_variables.num_moves(model.variables)
        return num_moves, len(model.variables) if self._counts_variables else 0


def _regularizers(model: keras.Model) -> set[int]:
    """Return the ids of layers with an activity regularizer; a first call may add layers without one."""
    return {id(layer) for layer in keras_model.all_layers(model) if layer.activity_regularizer is not None}


def _settings_in_steps(model: keras.Model, training: bool) -> dict[str, Hashable]:
    """Return the settings of Keras' layers that matter in a step, by path of the layer.

    Attributes of a custom layer may change in its own call, such as a counter.
    """
    return {
        layer.path or layer.name: operation_settings(layer, with_trainable=False)
        for layer in keras_model.all_layers(model)
        if keras_model.is_of_keras(type(layer))
        and not isinstance(layer, keras.Model)
        and (training or not isinstance(layer, _IN_TRAINING))
    }


def _settings(model: keras.Model) -> list[Hashable]:
    """Return the settings of a model without `trainable`, as gradients are traced again with every `compile`."""
    others = [layer for layer in keras_model.all_layers(model) if layer is not model]
    return [model_settings(model), *(operation_settings(layer, with_trainable=False) for layer in others)]
