"""Keras layers that are known to compute each row of a batch alone, and those that cannot run on part of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras import layers

from tfpar._compat.models import keras_calls, keras_model, keras_tracing

# Compute each row alone with any settings.
_ALONE = {
    *(
        layers.InputLayer,
        layers.Dense,
        layers.Embedding,
        layers.Identity,
        layers.Masking,
        layers.ActivityRegularization,
    ),
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.PReLU, layers.ELU),
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D, layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
    *(layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D),
    *(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D),
    *(layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D),
    *(layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D),
    *(layers.Dropout, layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise),
    *(layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D),
    *(layers.Flatten, layers.Reshape, layers.Permute, layers.RepeatVector, layers.Rescaling),
    *(layers.UpSampling1D, layers.UpSampling2D, layers.UpSampling3D),
    *(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D),
    *(layers.Cropping1D, layers.Cropping2D, layers.Cropping3D),
    *(layers.Attention, layers.AdditiveAttention, layers.GroupQueryAttention),
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum),
    *(layers.LSTM, layers.GRU, layers.SimpleRNN),
}
# Compute each row alone unless `axis` is that of the rows.
_ALONE_BY_AXIS = {layers.Concatenate, layers.LayerNormalization, layers.RMSNormalization, layers.Softmax}
# Mix the images of a batch, or use Python's random numbers.
_AUGMENTING = (layers.MixUp, layers.CutMix, layers.AugMix, layers.RandAugment)


def computes_rows_alone(model: keras.Model, training: bool) -> bool:
    """Return whether a model is a graph of Keras layers that are known to compute each row of a batch alone.

    Args:
        model: A built model.
        training: Whether it trains. BatchNormalization, which then normalizes each part by design, counts as known.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> computes_rows_alone(model, training=True)
        True
    """
    return all(_is_alone(operation, training) for operation in _operations(model))


def _operations(model: keras.Layer) -> list[Any]:
    """Return the operations of a model and its inner models; a model with its own `call` is one operation."""
    if not isinstance(model, keras.Model):
        return [model]
    if keras_tracing.has_own_call(model) or keras_tracing.declared_inputs(model) is None:
        return [model]
    inner = model.layers if isinstance(model, keras.Sequential) else model.operations
    return [operation for layer in inner for operation in _operations(layer)]


def _is_alone(operation: Any, training: bool) -> bool:
    kind = type(operation)
    if kind is layers.BatchNormalization:
        return training or not keras_calls.is_called_in_training(operation)
    if kind in _ALONE_BY_AXIS:
        return all(axis > 0 or axis == -1 for axis in keras.tree.flatten(operation.axis))
    if kind is layers.MultiHeadAttention:
        return 0 not in (operation.attention_axes or ())
    return kind in _ALONE


def in_dataset(refused: Iterable[keras.Layer]) -> str:
    """Return the advice to call refused augmentation layers in the dataset, ending in a comma; empty without any.

    Example:
        >>> in_dataset([layers.MixUp(name="mix_up"), layers.Dense(2)])
        "call 'mix_up' in dataset.map, "
    """
    names = dict.fromkeys(repr(layer.name) for layer in refused if isinstance(layer, _AUGMENTING))
    return f"call {', '.join(names)} in dataset.map, " if names else ""


def check_parts(model: keras.Model, training: bool) -> None:
    """Refuse layers that depend on the position of a row in the batch, or on the size of the batch.

    Raises:
        ValueError: If a recurrent layer has `stateful=True`, or a `RandomElasticTransform` trains.
    """
    for layer in keras_model.all_layers(model):
        if isinstance(layer, layers.RNN | layers.Bidirectional) and layer.stateful:
            raise ValueError(
                "A stateful layer keeps a state for each position in the batch, which replicas and micro-batches "
                f"split, received {layer.name!r} with stateful=True. Remove stateful, or train on "
                "SingleDevice()."
            )
        if training and isinstance(layer, layers.RandomElasticTransform):
            raise ValueError(
                "Every layer must compute each example alone, or parts of a batch change the result, received "
                f"{layer.name!r}: RandomElasticTransform of Keras {keras.__version__} replaces all images by the "
                "distorted first one, where a step does not know the size of its batch. Call the layer in the dataset, "
                "with batches of a fixed size, or train on SingleDevice()."
            )


def check_synchronized(model: keras.Model, way_out: str) -> None:
    """Refuse synchronized BatchNormalization, for steps that have one part of the batch at a time.

    Args:
        model: A model.
        way_out: What the strategy advises, such as "train on SingleDevice()".

    Raises:
        ValueError: If a layer is `BatchNormalization(synchronized=True)`.
    """
    for layer in keras_model.all_layers(model):
        if isinstance(layer, layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                f"BatchNormalization(synchronized=True) uses the statistics of the global batch, and {layer.name!r} "
                "receives one part of it at a time. Remove synchronized to normalize each part by itself, or "
                f"{way_out}."
            )


def normalizing(model: keras.Model, training: bool) -> list[str]:
    """Return the names of the layers that normalize with statistics of the batch.

    Example:
        >>> normalizing(keras.Sequential([keras.Input((2,)), layers.BatchNormalization(name="norm")]), training=True)
        ['norm']
    """
    normalizations = [layer for layer in keras_model.all_layers(model) if isinstance(layer, layers.BatchNormalization)]
    trainable = [layer for layer in normalizations if layer.trainable]
    return [layer.name for layer in trainable if training or keras_calls.is_called_in_training(layer)]
