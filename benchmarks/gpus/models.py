"""The Keras models of the experiments on GPUs; `benchmarks.gpus.torch_peer` has the same in PyTorch."""

from __future__ import annotations

import keras

from benchmarks.gpus.examples import (
    CONTEXT,
    IMAGE_SHAPE,
    LEARNING_RATE,
    NUM_BLOCKS,
    NUM_CLASSES,
    NUM_HEADS,
    TINY_WIDTH,
    WIDTH,
)


def resnet50_model() -> keras.Model:
    """Return Keras' ResNet50 without pretrained weights: `[batch, 224, 224, 3]` -> `[batch, 1000]`."""
    arguments = {"weights": None, "input_shape": IMAGE_SHAPE, "classes": NUM_CLASSES, "classifier_activation": None}
    return keras.applications.ResNet50(**arguments)


def transformer_model() -> keras.Model:
    """Return 12 pre-norm blocks of width 768 with 12 heads: `[batch, 512, 768]` -> `[batch, 512, 768]`."""
    inputs = tokens = keras.Input((CONTEXT, WIDTH))
    layers = keras.layers
    for _ in range(NUM_BLOCKS):
        normalized = layers.LayerNormalization(epsilon=1e-5)(tokens)
        attended = layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS)(normalized, normalized)
        tokens = layers.Add()([tokens, attended])
        normalized = layers.LayerNormalization(epsilon=1e-5)(tokens)
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(normalized)
        tokens = layers.Add()([tokens, layers.Dense(WIDTH)(hidden)])
    return keras.Model(inputs, tokens)


def tiny_model() -> keras.Model:
    """Return 4 x Dense(8), for tests of the benchmark: `[batch, 8]` -> `[batch, 8]`."""
    return keras.Sequential([keras.Input((TINY_WIDTH,)), *(keras.layers.Dense(TINY_WIDTH) for _ in range(4))])


_LAYERS = {"resnet50": resnet50_model, "transformer": transformer_model, "tiny": tiny_model}


def build_model(workload: str, jit_compile: bool) -> keras.Model:
    """Return the compiled model of a workload.

    Args:
        workload: Its name.
        jit_compile: Whether XLA compiles its steps.
    """
    model = _LAYERS[workload]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True) if workload == "resnet50" else "mse"
    model.compile(keras.optimizers.SGD(LEARNING_RATE, momentum=0.9), loss, jit_compile=jit_compile)
    return model
