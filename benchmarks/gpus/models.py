"""The Keras models of the experiments on GPUs; `benchmarks.gpus.torch_peer` has the same in PyTorch."""

from __future__ import annotations

from typing import Any

import keras

from benchmarks.gpus.examples import IMAGE_SHAPE, LEARNING_RATE, NUM_CLASSES, TRANSFORMERS, Transformer


def resnet50_model() -> keras.Model:
    """Return Keras' ResNet50 without pretrained weights: `[batch, 224, 224, 3]` -> `[batch, 1000]`."""
    arguments = {"weights": None, "input_shape": IMAGE_SHAPE, "classes": NUM_CLASSES, "classifier_activation": None}
    return keras.applications.ResNet50(**arguments)


def transformer_model(size: Transformer) -> keras.Model:
    """Return pre-norm blocks: `[batch, context, width]` -> `[batch, context, width]`.

    Args:
        size: Of the blocks.
    """
    inputs = tokens = keras.Input((size.context, size.width))
    layers = keras.layers
    for _ in range(size.num_blocks):
        normalized = layers.LayerNormalization(epsilon=1e-5)(tokens)
        attended = layers.MultiHeadAttention(size.num_heads, size.width // size.num_heads)(normalized, normalized)
        tokens = layers.Add()([tokens, attended])
        normalized = layers.LayerNormalization(epsilon=1e-5)(tokens)
        hidden = layers.Dense(4 * size.width, activation="gelu")(normalized)
        tokens = layers.Add()([tokens, layers.Dense(size.width)(hidden)])
    return keras.Model(inputs, tokens)


def build_model(workload: str, jit_compile: Any) -> keras.Model:
    """Return the compiled model of a workload.

    Args:
        workload: Its name.
        jit_compile: For `compile`.
    """
    if workload == "resnet50":
        model, loss = resnet50_model(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        model, loss = transformer_model(TRANSFORMERS[workload]), "mse"
    model.compile(keras.optimizers.SGD(LEARNING_RATE, momentum=0.9), loss, jit_compile=jit_compile)
    return model
