"""Symbolic build of a model for its first batch (Keras 3.15, TensorFlow 2.21)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src import backend

from tfpar._compat import versions
from tfpar._compat.models import keras_model, keras_remat
from tfpar._compat.variables import tf_variable_names


def symbolic_build(model: keras.Model, batch: Any, training: bool) -> None:
    """Create the weights and metrics for the first batch, as `fit` does, but not the slots of the optimizer.

    On one device, Keras 3.15 does not use its own symbolic build (`_maybe_symbolic_build` in
    keras/src/backend/tensorflow/trainer.py), which differs from a first step: it also builds the optimizer for
    evaluation, runs the model and `compute_loss` as in evaluation, passes `training` to a `call` without that argument,
    and replaces ragged and sparse tensors with dense ones. This function corrects all four.

    Args:
        model: A compiled model.
        batch: A global batch, `(inputs, targets, sample_weight)` or fewer.
        training: The argument `training` of the model's call and of `compute_loss`.
    """

    def compute(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return original(model, *args, **{**kwargs, "training": training})

    def spec(function: Any, *args: Any, **kwargs: Any) -> Any:
        def call(symbolic: Any, **options: Any) -> Any:
            others = {name: value for name, value in options.items() if name != "training"} | training_argument
            return model(keras.tree.map_structure(_with_same_type, inputs, symbolic), **others)

        return original_spec(call if function is model else function, *args, **kwargs)

    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    training_argument = keras_model.training_argument(model, training)
    original, original_spec, optimizer = keras.Model._compute_loss, backend.compute_output_spec, model.optimizer
    was_built = optimizer is None or optimizer.built
    if not was_built:
        optimizer.built = True
    try:
        with (
            mock.patch.object(keras.Model, "_compute_loss", compute),
            mock.patch.object(backend, "compute_output_spec", spec),
            tf_variable_names.as_without_outer_scope(),
            keras_remat.called_once(),
        ):
            model._symbolic_build(data_batch=batch)
            if _loss_has_unbuilt_layers(model):
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(_symbolic, batch))
                outputs = backend.compute_output_spec(model, x)
                backend.compute_output_spec(model._compute_loss, x, y, outputs, sample_weight=sample_weight)
    finally:
        if not was_built:
            optimizer.built = False


def _loss_has_unbuilt_layers(model: keras.Model) -> bool:
    """Return whether a custom `compute_loss` has layers to build; Keras only calls it if `compile` has losses."""
    without_losses = versions.private(model, "_compile_loss") is None
    is_built = all(layer.built for layer in keras_model.all_layers(model))
    return without_losses and not is_built and keras_model.overridden(model, "compute_loss")


def _symbolic(tensor: Any) -> Any:
    return None if tensor is None else keras.KerasTensor(tensor.shape, keras.backend.standardize_dtype(tensor.dtype))


def _with_same_type(tensor: Any, symbolic: Any) -> Any:
    """Return a placeholder for a ragged or sparse tensor, and Keras' symbolic tensor for a dense one."""
    if not isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return symbolic
    spec = tf.type_spec_from_value(tensor)
    return tf.nest.map_structure(
        lambda component: tf.compat.v1.placeholder(component.dtype, component.shape), spec, expand_composites=True
    )
