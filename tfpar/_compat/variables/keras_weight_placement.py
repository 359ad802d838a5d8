"""Deferred allocation and placement of weights. Private API of Keras 3.15 and TensorFlow 2.21."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfpar._compat import versions
from tfpar._compat.variables import keras_variables, keras_weight_keys, sharded_memory, tf_variable_names

_deferring = False


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Defer the allocation of layer weights inside this context until `place` is called.

    Keras 3.15 allocates a weight when its layer is built, before layers are assigned to devices, so a model larger than
    the first device could not be built. A weight without memory reads as its initial value, like Keras' variables in a
    stateless scope. A weight is allocated on the host earlier if it is assigned or optimized, if its initializer is not
    reproducible, or if the model function calls `fit` or `train_on_batch`.
    """
    global _deferring
    if _deferring:  # inside of a scope of the user
        yield
        return
    making = trained = False
    keras_weight_keys.give_keys_without_memory()
    versions.require_mentioned(Variable._deferred_initialize, "_value")

    def add_weight(layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        nonlocal making
        if trained:
            return original_add(layer, *args, **kwargs)
        making, before = True, making
        try:
            variable = original_add(layer, *args, **kwargs)
        finally:
            making = before
        variable._tfpar_deferred = True
        return variable

    def initialize(variable: Any, initializer: Any) -> None:
        if not making:
            original_initialize(variable, initializer)
        elif _is_pure(initializer):
            variable._value = None
            tf_variable_names.note_scope(variable)
            keras_variables.note_watched(variable)
            versions.replace(variable, "_initializer", initializer)
        else:
            with tf.device("CPU:0"):
                original_initialize(variable, initializer)

    def initialize_late(variable: Any) -> None:
        if getattr(variable, "_tfpar_deferred", False):
            tf_variable_names.note_scope(variable)
            keras_variables.note_watched(variable)
        else:
            original_late(variable)

    def assign(variable: Any, value: Any) -> None:
        if variable._value is None:
            place(variable, "CPU:0")
        original_assign(variable, value)

    def build(optimizer: Any, variables: Sequence[Any]) -> None:
        for variable in variables:
            if variable._value is None:
                place(variable, "CPU:0")
        original_build(optimizer, variables)

    def training(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
            nonlocal trained
            for variable in model.variables:
                if variable._value is None:
                    place(variable, "CPU:0")
            trained, before = True, trained
            try:
                return original(model, *args, **kwargs)
            finally:
                trained = before

        return train

    original_build = BaseOptimizer.build
    original_add, original_initialize = keras.Layer.add_weight, Variable._initialize_with_initializer
    original_late, original_assign = Variable._deferred_initialize, Variable._direct_assign
    with (
        mock.patch.object(keras.Layer, "add_weight", add_weight),
        mock.patch.object(Variable, "_initialize_with_initializer", initialize),
        mock.patch.object(Variable, "_deferred_initialize", initialize_late),
        mock.patch.object(Variable, "_direct_assign", assign),
        mock.patch.object(BaseOptimizer, "build", build),
        mock.patch.object(keras.Model, "fit", training(keras.Model.fit)),
        mock.patch.object(keras.Model, "train_on_batch", training(keras.Model.train_on_batch)),
    ):
        _deferring = True
        try:
            yield
        finally:
            _deferring = False


def _is_pure(initializer: Any) -> bool:
    """Return whether an initializer is reproducible: one of Keras' own, without a seed generator."""
    known = isinstance(initializer, keras.initializers.Initializer) and type(initializer).__module__.startswith(
        "keras."
    )
    return known and not isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)


def place(variable: Any, device: str) -> bool:
    """Allocate a variable on a device, or move it there.

    Args:
        variable: A Keras variable.
        device: Such as `"GPU:1"`.

    Returns:
        False if the variable was on the device already.
    """
    if keras_variables.is_on(variable, device):
        return False
    current = variable._value
    with tf.init_scope(), tf.device(device):
        keras_variables.re_create(variable, None if current is None else tf.identity(current))
    return True


def place_as(variable: Any, weight: Any) -> None:
    """Place a variable on the device of a weight, and shard it like the weight if it has the same shape.

    Args:
        variable: A Keras variable, such as an optimizer slot.
        weight: An allocated Keras variable.
    """
    if sharded_memory.is_sharded(weight) and variable.shape == weight.shape:
        sharded_memory.place_shards(variable, *weight._value.layout)
    else:
        place(variable, weight._value.device)


@contextlib.contextmanager
def on_default_device(variables: Sequence[Any]) -> Iterator[None]:
    """Let each variable be a `tf.Variable` of TensorFlow's default device inside this context, with the same value.

    A SavedModel cannot hold sharded memory, and the graph of an export names the device of each weight that it reads.

    Args:
        variables: Keras variables, which nothing may change inside this context.
    """
    with tf.init_scope():
        memories = [
            (variable, tf.Variable(tf.convert_to_tensor(variable.value), trainable=variable.trainable))
            for variable in variables
        ]
    with sharded_memory.replaced(memories):
        yield


def place_rest(model: keras.Model) -> None:
    """Place the remaining weights on the device of the last placed one: those of layers that only `compute_loss` calls.

    Args:
        model: A model whose other weights are placed.
    """
    placed = [weight for weight in model.weights if keras_variables.is_allocated(weight)]
    for weight in model.weights:
        if not keras_variables.is_allocated(weight):
            place(weight, str(placed[-1].value.device) if placed else "CPU:0")
