"""The Keras models of the pipeline experiments; `benchmarks.pipelines.torch_peer` has the same in PyTorch."""

from __future__ import annotations

import keras

from benchmarks.pipelines.examples import (
    CONTEXT,
    HIDDEN_WIDTH,
    IMAGE_SHAPE,
    LEARNING_RATE,
    MLP_WIDTH,
    NARROW_WIDTH,
    NUM_BLOCKS,
    NUM_CLASSES,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_WIDE_LAYERS,
    WIDE_WIDTH,
    WIDTH,
)


def mlp_model() -> keras.Model:
    """Return 8 x Dense(512, gelu): `[batch, 512]` -> `[batch, 512]`."""
    layers = [keras.layers.Dense(MLP_WIDTH, activation="gelu") for _ in range(NUM_LAYERS)]
    return _compiled(keras.Sequential([keras.Input((MLP_WIDTH,)), *layers]))


def transformer_model() -> keras.Model:
    """Return 8 blocks of width 256 with 4 heads: `[batch, 128, 256]` -> `[batch, 128, 256]`."""
    inputs = keras.Input((CONTEXT, WIDTH))
    tokens = inputs
    for _ in range(NUM_BLOCKS):
        tokens = _block(tokens)
    return _compiled(keras.Model(inputs, tokens))


def _block(tokens: keras.KerasTensor) -> keras.KerasTensor:
    layers = keras.layers
    normalized = layers.LayerNormalization(epsilon=1e-5)(tokens)
    attended = layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS)(normalized, normalized)
    tokens = layers.Add()([tokens, attended])
    normalized = layers.LayerNormalization(epsilon=1e-5)(tokens)
    hidden = layers.Dense(HIDDEN_WIDTH, activation="gelu")(normalized)
    return layers.Add()([tokens, layers.Dense(WIDTH)(hidden)])


def wide_model() -> keras.Model:
    """Return 16 x (Dense(2048, gelu), Dense(16)): `[batch, 16]` -> `[batch, 16]`."""
    pairs = [
        layer
        for _ in range(NUM_WIDE_LAYERS)
        for layer in (keras.layers.Dense(WIDE_WIDTH, activation="gelu"), keras.layers.Dense(NARROW_WIDTH))
    ]
    return _compiled(keras.Sequential([keras.Input((NARROW_WIDTH,)), *pairs]))


def resnet50_model() -> keras.Model:
    """Return Keras' ResNet50 without pretrained weights: `[batch, 64, 64, 3]` -> `[batch, 1000]`."""
    model = keras.applications.ResNet50(weights=None, input_shape=IMAGE_SHAPE, classes=NUM_CLASSES)
    return _compiled(model, "sparse_categorical_crossentropy")


def _compiled(model: keras.Model, loss: str = "mse") -> keras.Model:
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
    return model


BUILD_MODEL = {
    "mlp": mlp_model,
    "transformer": transformer_model,
    "wide": wide_model,
    "resnet50": resnet50_model,
}
