"""Image classification with a small CNN or any network of `keras.applications`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

import tfpar
from tfpar import config, data
from tfpar.messages.received import quoted
from tfpar.messages.suggestions import did_you_mean
from tfpar.trainers import recipe

_WAYS_TO_CLASSES = {
    "tfds": "Choose a dataset with classes.",
    "tfrecord": "Set data.num_classes.",
    "generated": "Read other data, or use tfpar.trainers.regression.Regression.",
    "table": "Read other data, or use tfpar.trainers.tabular.Tabular.",
    "python": "Set data.num_classes.",
    "python_source": "Read other data, or use tfpar.trainers.language_model.LanguageModel.",
}


class ImageClassification(tfpar.Trainer):
    """Train a classifier on the images of a run.

    Args:
        run: The run.
        strategy: The strategy.

    Raises:
        ValueError: If the data have no classes, or the network is unknown or does not take such images.

    Example:
        >>> trainer = ImageClassification(config.load("configs/digits.toml"), tfpar.SingleDevice())
        >>> trainer.fit(trainer.train_data, epochs=1, validation_data=trainer.validation_data)
    """

    reads = recipe.READS

    def __init__(self, run: config.Run, strategy: tfpar.Strategy) -> None:
        keras.utils.set_random_seed(run.seed)
        loaded = data.load(run.data, global_batch_size=run.training.global_batch_size, seed=run.seed)
        if loaded.num_classes is None:
            raise ValueError(
                "Image classification needs labels of a known number of classes, and data.source = "
                f'"{run.data.source}" gives none. {_WAYS_TO_CLASSES[run.data.source]}'
            )
        if len(loaded.input_shape) != 3:
            raise ValueError(
                f"Image classification takes images [height, width, channels], received inputs of shape "
                f"{loaded.input_shape}. Declare such a shape in data.features, or use another trainer."
            )
        self.train_data, self.validation_data = loaded.train, loaded.validation
        self.num_train_examples, self.sharding = loaded.num_train_examples, loaded.sharding
        self.class_names = loaded.class_names
        recipe.set_precision(run.training.precision)
        super().__init__(
            functools.partial(build_model, run, loaded.input_shape, loaded.num_classes),
            strategy,
            run.seed,
            fused=run.training.fused,
        )


def build_model(run: config.Run, image_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Build and compile the network of a run.

    Args:
        run: The run, whose `model`, `optimizer` and `training` sections are read.
        image_shape: Height, width and channels of an image.
        num_classes: Number of classes.

    Returns:
        A compiled model from images `[batch, *image_shape]` to logits `[batch, num_classes]`.

    Raises:
        ValueError: If the network is unknown or does not take such images.
    """
    features, images = _features(run, image_shape)
    if run.model.dropout:
        features = keras.layers.Dropout(run.model.dropout)(features)
    # Logits in float32: a softmax in half precision loses small probabilities.
    dtype = "float32" if run.training.precision.startswith("mixed_") else None
    penalty = recipe.build_penalty(run.model)
    logits = keras.layers.Dense(num_classes, kernel_regularizer=penalty, dtype=dtype, name="logits")(features)
    model = keras.Model(images, logits, name=run.model.name.lower())
    model.compile(
        recipe.build_optimizer(run),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=run.training.jit_compile,
    )
    return model


def _features(run: config.Run, image_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return features `[batch, features]` and the input images."""
    if run.model.name == "cnn":
        return _cnn(run.model, image_shape)
    # Replicas can normalize over the global batch; a pipeline computes one micro-batch after the other.
    return _application(run.model, image_shape, synchronized=run.strategy.kind not in ("pipeline", "hybrid"))


def _cnn(settings: config.Model, image_shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Build the network of Keras' and PyTorch's MNIST examples: two convolutions, pooling, a dense layer."""
    penalty = recipe.build_penalty(settings)
    images = keras.Input(image_shape, name="image")
    features = images
    for filters in (32, 64):
        features = keras.layers.Conv2D(
            filters, 3, padding="same", activation="relu", kernel_regularizer=penalty
        )(features)  # fmt: skip
    features = keras.layers.Flatten()(keras.layers.MaxPooling2D()(features))
    return keras.layers.Dense(128, activation="relu", kernel_regularizer=penalty)(features), images


def _application(settings: config.Model, image_shape: tuple[int, ...], *, synchronized: bool) -> tuple[Any, Any]:
    """Build a network of `keras.applications` with random weights."""
    names = [name for name in dir(keras.applications) if name[0].isupper()]
    build = getattr(keras.applications, settings.name) if settings.name in names else None
    if build is None:
        raise ValueError(
            f'model.name must be "cnn" or one of the {len(names)} networks of keras.applications, such as ResNet50, '
            f"received {quoted(settings.name)}.{did_you_mean(settings.name, names)} "
            "https://keras.io/api/applications lists them."
        )
    try:
        # The data are normalized already.
        takes = inspect.signature(build).parameters
        options = {"include_preprocessing": False} if "include_preprocessing" in takes else {}
        backbone = build(weights=None, include_top=False, input_shape=image_shape, pooling="avg", **options)
    except ValueError as error:
        raise ValueError(
            f"model.name={quoted(settings.name)} does not take images of shape {image_shape}: "
            f'{str(error).splitlines()[0]} Use larger images, or model.name="cnn".'
        ) from error
    penalty = recipe.build_penalty(settings)

    def with_settings(layer: keras.Layer) -> keras.Layer:
        layer_config = layer.get_config()
        for kind in ("kernel", "depthwise", "pointwise"):
            if penalty is not None and f"{kind}_regularizer" in layer_config:
                layer_config[f"{kind}_regularizer"] = penalty
        if isinstance(layer, keras.layers.Rescaling):  # the data are normalized already
            layer_config |= {"scale": 1.0, "offset": 0.0}
        if isinstance(layer, keras.layers.BatchNormalization):
            layer_config["synchronized"] = synchronized
        return type(layer).from_config(layer_config)

    backbone = keras.models.clone_model(backbone, clone_function=with_settings)
    return backbone.output, backbone.input
