"""Private parts of Keras' models and trainers, each with the version, the reason and the link.

Written for Keras 3.15 and TensorFlow 2.21.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.trainers.trainer import Trainer

from tfpar._compat import versions
from tfpar._compat.models import keras_losses_in_call


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers at every depth; `model.layers` holds the outermost only (Keras 3.15)."""
    return list(model._flatten_layers())


def trainable_settings(model: keras.Model) -> list[bool]:
    """Return `trainable` of each layer and weight, as a trace of a train step reads them."""
    return [bool(one.trainable) for one in (*all_layers(model), *model.variables)]


def recomputes(model: keras.Model) -> bool:
    """Return whether a layer was built in a `keras.RematScope`, and so reads its weights in the backward pass too."""
    return bool(recomputed_layers(model))


def recomputed_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers at every depth that were built in a `keras.RematScope` (Keras 3.15)."""
    return [layer for layer in all_layers(model) if versions.private(layer, "_remat_mode") is not None]


def call_model(model: keras.Model, inputs: Any, training: bool) -> Any:
    """Call a model as Keras' own step does: `training` only where its `call` takes it (Keras 3.15)."""
    with keras_losses_in_call.in_call():
        return model(inputs, **training_argument(model, training))


def training_argument(model: keras.Model, training: bool) -> dict[str, bool]:
    """Return the argument `training` of a call by Keras' own step, empty for a `call` without it.

    Keras 3.15 leaves it out there (keras/src/backend/tensorflow/trainer.py), so that layers that such a `call`
    gives no `training` run as in inference: a Dropout drops nothing, also in `fit`.
    """
    return {"training": training} if versions.private(model, "_call_has_training_arg") else {}


def has_own_output_shapes(layer: keras.Layer) -> bool:
    """Return whether a user's layer says the shapes of its outputs, so that a symbolic run does not call it."""
    methods = ("compute_output_shape", "compute_output_spec")
    is_called = all(getattr(type(layer), name) is getattr(keras.Layer, name) for name in methods)
    return not is_called and not is_of_keras(type(layer))


def leave_training_of(layer: keras.Layer, args: Any, kwargs: Any) -> None:
    """Leave the `training` for the next layer that the call of a layer leaves, where symbolic outputs need no call.

    Keras 3.15 keeps the `training` of the last layer that was called, also inside of a layer, for later layers that are
    called without one (`_resolve_and_populate_arg` in keras/src/layers/layer.py). A layer with its own
    `compute_output_shape` makes its symbolic outputs without a call.
    """
    if not has_own_output_shapes(layer) or len(all_layers(layer)) < 2:
        return
    with contextlib.suppress(Exception):  # a call that needs real tensors
        backend.compute_output_spec(layer.call, *args, **kwargs)


def compute_loss(model: keras.Model, inputs: Any, targets: Any, outputs: Any, weights: Any, training: bool) -> Any:
    """Compute the loss as Keras' own step does, also where a subclass overrides `compute_loss` (Keras 3.15)."""
    return model._compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=training)


def is_of_keras(value: Any) -> bool:
    """Return whether a function, or the class of an object, is Keras' own; of Keras 3.15 all are in `keras.src`."""
    return str(getattr(value, "__module__", "")).startswith("keras.src.")


def reduces_last_axis(settings: dict[str, Any]) -> bool:
    """Return whether the arguments of a loss or metric function of Keras let it reduce the last axis, its default."""
    return bool(settings.get("axis", -1) == -1)


def computes_in_half(model: keras.Model) -> bool:
    """Return whether a layer of a model computes in 16 bits."""
    return any("16" in str(layer.compute_dtype) for layer in all_layers(model))


def overridden(model: keras.Model, method: str) -> bool:
    """Return whether the user's model, or its class, replaces a method of Keras' own trainer."""
    return method in vars(model) or getattr(type(model), method) is not getattr(keras.Model, method)


def replaces_loop(model: keras.Model, method: str) -> bool:
    """Return whether a model's class replaces `fit` or `evaluate`.

    Models of KerasHub 0.32 do, only to apply their preprocessor to the data.
    """
    own = getattr(type(model), method)
    is_of_keras_hub = own.__module__.startswith("keras_hub.") and getattr(model, "preprocessor", None) is None
    return own is not getattr(keras.Model, method) and not is_of_keras_hub


def compilation(model: keras.Model) -> Any:
    """Return an object that `compile` creates each time it is called, None before (Keras 3.15)."""
    return versions.private(model, "_compile_config") if model.compiled else None


class _Chosen(int):
    """A value of `jit_compile` that is true, and no user's: Keras 3.15 keeps the resolved value of "auto" alone."""


CHOSEN = _Chosen(True)


def is_chosen(model: keras.Model) -> bool:
    """Return whether `jit_compile` is true because "auto" was resolved so."""
    return isinstance(model.jit_compile, _Chosen)


@contextlib.contextmanager
def resolving_jit_compile(resolve: Callable[[keras.Model], int]) -> Iterator[None]:
    """Let a function resolve `jit_compile="auto"` for models that are compiled inside this context.

    Keras 3.15 resolves it to True on each machine with GPUs, whatever the devices of the model are, and to False under
    a `tf.distribute` strategy.

    Args:
        resolve: Takes the model, and returns False or `CHOSEN`.
    """
    versions.require(Trainer, "_resolve_auto_jit_compile")
    with mock.patch.object(Trainer, "_resolve_auto_jit_compile", lambda model: resolve(model)):
        yield


def resolve_jit_compile(model: keras.Model, resolve: Callable[[keras.Model], int]) -> None:
    """Let a function resolve it for later compilations of a model, and now if "auto" was resolved to True."""
    reference = weakref.ref(model)

    def resolved() -> int:
        found = reference()
        return False if found is None else resolve(found)

    versions.replace(model, "_resolve_auto_jit_compile", resolved)
    if model.compiled and is_chosen(model):
        model.jit_compile = resolved()


def layer_without_xla(model: keras.Model) -> keras.Layer | None:
    """Return the first layer that XLA cannot compile, as it says itself (`supports_jit` in Keras 3.15)."""
    return next((layer for layer in all_layers(model) if not layer.supports_jit), None)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of a model's `compile` as they were given, `jit_compile` as it was resolved (Keras 3.15)."""
    compiled = compilation(model)
    given: dict[str, Any] = {} if compiled is None else dict(compiled.config)
    return {**given, "jit_compile": bool(model.jit_compile)}


def is_in_scope(model: keras.Model) -> bool:
    """Return whether Keras runs the model's own methods under a `tf.distribute` strategy (Keras 3.15)."""
    strategy = versions.private(model, "_distribute_strategy")
    return isinstance(strategy, tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy)


@contextlib.contextmanager
def new_models(note: Callable[[keras.Model], None]) -> Iterator[None]:
    """Call a function with each model that is created inside this context (Keras 3.15).

    Args:
        note: Takes a model that has no layers yet.
    """
    original = TensorFlowTrainer.__init__

    def create(model: Any) -> None:
        original(model)
        note(model)

    with mock.patch.object(TensorFlowTrainer, "__init__", create):
        yield


@contextlib.contextmanager
def out_of_scope(model: keras.Model, predict_function: Any) -> Iterator[None]:
    """Let Keras' own methods read the first copy of the weights, as if the model had been built in no scope.

    Keras 3.15 predicts a single batch on every replica and concatenates all outputs, and cannot gather the outputs of
    several workers (keras/src/backend/tensorflow/trainer.py).

    Args:
        model: A built model.
        predict_function: From `predict_function`; None for a new one.
    """
    versions.require(model, "_distribute_strategy", "predict_function")
    with mock.patch.multiple(model, _distribute_strategy=None, predict_function=predict_function):
        yield


def predict_function(model: keras.Model) -> Any:
    """Return a function for `out_of_scope`, which is traced there."""
    with out_of_scope(model, None):
        model.make_predict_function()
        return model.predict_function


def restored_epoch(model: keras.Model) -> int:
    """Return the epoch at which `keras.callbacks.BackupAndRestore` resumes, 0 for none (Keras 3.15)."""
    return int(model._initial_epoch or 0)


def mask_of(tensor: Any) -> Any:
    """Return the Keras mask of a tensor, None for none (Keras 3.15); in a graph a constant one is an operation too."""
    mask = backend.get_keras_mask(tensor)
    if mask is None or tf.is_symbolic_tensor(mask) or tf.executing_eagerly():
        return mask
    return tf.identity(tf.constant(np.asarray(mask)))


def with_mask(tensor: tf.Tensor, mask: Any) -> tf.Tensor:
    """Return a tensor with this Keras mask, in place of any mask that it had (Keras 3.15).

    Probabilities keep the logits from which Keras computes their cross-entropy (keras/src/activations/activations.py).
    """
    copied = tf.identity(tensor)
    if mask is not None:
        backend.set_keras_mask(copied, mask)
    if hasattr(tensor, "_keras_logits"):
        copied._keras_logits = tensor._keras_logits
    return copied
