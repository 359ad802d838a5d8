"""Layers of Keras that are batch-independent by their class, and layer calls that use statistics of the batch."""

from __future__ import annotations

from collections.abc import Iterable

import keras
from keras import layers

from tfpar._compat import keras_model
from tfpar.pipeline.graph.ir import Call

# Layers that are batch-independent for all their settings, if the examples are the first axis.
_BATCH_INDEPENDENT = {
    *(layers.Dense, layers.Embedding, layers.Identity, layers.Masking, layers.ActivityRegularization),
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
}
# Layers that are batch-independent if their axis is not that of the examples.
_BATCH_INDEPENDENT_BY_AXIS = {layers.Concatenate, layers.LayerNormalization, layers.RMSNormalization, layers.Softmax}

# Layers that augment images and mix the examples of a batch, or draw from Python.
_AUGMENTING = (layers.MixUp, layers.CutMix, layers.AugMix, layers.RandAugment)


def in_dataset(found: Iterable[keras.Layer]) -> str:
    """Return the advice to move layers that augment images into the dataset, with a comma after it.

    Args:
        found: Layers that a strategy refuses.

    Example:
        >>> in_dataset([layers.MixUp(name="mix_up"), layers.Dense(2)])
        "call 'mix_up' in dataset.map, "
    """
    names = dict.fromkeys(repr(layer.name) for layer in found if isinstance(layer, _AUGMENTING))
    return f"call {', '.join(names)} in dataset.map, " if names else ""


def is_batch_independent(call: Call, training: bool) -> bool:
    """Return whether a layer call is batch-independent, whatever its weights are.

    Args:
        call: The layer call.
        training: Whether the model trains.
    """
    kind = type(call.operation)
    if kind is layers.BatchNormalization:
        return training or not uses_batch_statistics(call, training)
    if kind in (layers.LSTM, layers.GRU, layers.SimpleRNN):
        return not call.operation.stateful
    rank = len(call.inputs[0].shape) if call.inputs else 0
    if kind in _BATCH_INDEPENDENT_BY_AXIS and rank:
        return all(axis % rank for axis in keras.tree.flatten(call.operation.axis))
    if kind is layers.MultiHeadAttention:
        return 0 not in (call.operation.attention_axes or ())  # once the layer is built, none of them is negative
    return kind in _BATCH_INDEPENDENT


def uses_batch_statistics(call: Call, training: bool) -> bool:
    """Return whether a layer contains a BatchNormalization that uses statistics of the batch.

    Args:
        call: The layer call.
        training: Whether the model trains.
    """
    return bool(call.training_in(training)) and any(
        isinstance(layer, layers.BatchNormalization) and layer.trainable for layer in layers_of(call)
    )


def layers_of(call: Call) -> list[keras.Layer]:
    """Return the layer of a call and the layers inside of it."""
    return keras_model.all_layers(call.operation) if isinstance(call.operation, keras.Layer) else []
