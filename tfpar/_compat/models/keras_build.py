"""How Keras builds a model for its first batch, without running it. Written for Keras 3.15 and TensorFlow 2.21."""

from __future__ import annotations

from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src import backend

from tfpar._compat import versions
from tfpar._compat.models import keras_model
from tfpar._compat.variables import tf_variable_names


def symbolic_build(model: keras.Model, batch: Any, training: bool) -> None:
    """Create the weights and metrics that the first batch calls for, as `fit` does; not the optimizer's slots.

    Keras 3.15's method builds the optimizer too, also for an evaluation, runs the model and `compute_loss` as in an
    evaluation, also for a training, gives `training` also to a `call` without this argument, and calls the model on
    dense tensors in place of ragged and sparse ones; on one device Keras does without the method
    (`_maybe_symbolic_build` in keras/src/backend/tensorflow/trainer.py).

    Args:
        model: A compiled model.
        batch: A global batch, `(inputs, targets, sample_weight)` as far as given.
        training: The argument `training` of the model's call and of `compute_loss`.
    """

    def compute(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return original(model, *args, **{**kwargs, "training": training})

    def spec(function: Any, *args: Any, **kwargs: Any) -> Any:
        def call(symbolic: Any, **options: Any) -> Any:
            others = {name: value for name, value in options.items() if name != "training"} | training_argument
            return model(keras.tree.map_structure(_of_same_kind, inputs, symbolic), **others)

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
        ):
            model._symbolic_build(data_batch=batch)
            if _has_layers_of_its_loss(model):
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tf.nest.map_structure(_symbolic, batch))
                outputs = backend.compute_output_spec(model, x)
                backend.compute_output_spec(model._compute_loss, x, y, outputs, sample_weight=sample_weight)
    finally:
        if not was_built:
            optimizer.built = False


def _has_layers_of_its_loss(model: keras.Model) -> bool:
    """Return whether `compute_loss` has layers to build that `call` has not: Keras runs it for losses of `compile`."""
    without_losses = versions.private(model, "_compile_loss") is None
    is_built = all(layer.built for layer in keras_model.all_layers(model))
    return without_losses and not is_built and keras_model.overridden(model, "compute_loss")


def _symbolic(given: Any) -> Any:
    return None if given is None else keras.KerasTensor(given.shape, keras.backend.standardize_dtype(given.dtype))


def _of_same_kind(given: Any, symbolic: Any) -> Any:
    """Return a placeholder for a ragged or sparse tensor; for another the symbolic tensor that Keras has made."""
    if not isinstance(given, tf.RaggedTensor | tf.SparseTensor):
        return symbolic
    spec = tf.type_spec_from_value(given)
    return tf.nest.map_structure(
        lambda part: tf.compat.v1.placeholder(part.dtype, part.shape), spec, expand_composites=True
    )
