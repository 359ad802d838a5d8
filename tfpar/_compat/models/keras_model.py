"""Private parts of Keras' models and trainers (Keras 3.15, TensorFlow 2.21)."""

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
    """Return the layers at every depth; `model.layers` has the outermost ones only."""
    return list(model._flatten_layers())


def trainable_settings(model: keras.Model) -> list[bool]:
    """Return `trainable` of each layer and weight, on which a trace of a train step depends."""
    return [bool(item.trainable) for item in (*all_layers(model), *model.variables)]


def call_model(model: keras.Model, inputs: Any, training: bool) -> Any:
    """Call a model as Keras' own step does: with `training` only if its `call` accepts it."""
    with keras_losses_in_call.in_call():
        return model(inputs, **training_argument(model, training))


def training_argument(model: keras.Model, training: bool) -> dict[str, bool]:
    """Return the argument `training` if the model's `call` accepts it, else nothing.

    Keras 3.15 omits it then (keras/src/backend/tensorflow/trainer.py), so that layers called without `training` run in
    inference mode: Dropout drops nothing, even in `fit`.
    """
    return {"training": training} if versions.private(model, "_call_has_training_arg") else {}


def has_own_output_shapes(layer: keras.Layer) -> bool:
    """Return whether a user's layer computes its output shapes itself, so that a symbolic run does not call it."""
    methods = ("compute_output_shape", "compute_output_spec")
    is_called = all(getattr(type(layer), name) is getattr(keras.Layer, name) for name in methods)
    return not is_called and not is_of_keras(type(layer))


def propagate_training(layer: keras.Layer, args: Any, kwargs: Any) -> None:
    """Update the `training` that later layers inherit as a call of the layer would, if its symbolic run needs no call.

    Layers called without `training` inherit that of the last layer called, even inside another layer
    (`_resolve_and_populate_arg` in keras/src/layers/layer.py). A layer with its own `compute_output_shape` makes
    symbolic outputs without a call.
    """
    if not has_own_output_shapes(layer) or len(all_layers(layer)) < 2:
        return
    with contextlib.suppress(Exception):  # a call that needs real tensors
        backend.compute_output_spec(layer.call, *args, **kwargs)


def compute_loss(model: keras.Model, inputs: Any, targets: Any, outputs: Any, weights: Any, training: bool) -> Any:
    """Compute the loss as Keras' own step does, including an overridden `compute_loss`."""
    return model._compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=training)


def is_of_keras(value: Any) -> bool:
    """Return whether a function, a class or an object's class is Keras' own."""
    return str(getattr(value, "__module__", "")).startswith("keras.src.")


def reduces_last_axis(settings: dict[str, Any]) -> bool:
    """Return whether a Keras loss or metric function with these arguments reduces the last axis, as by default."""
    return bool(settings.get("axis", -1) == -1)


def computes_in_half(model: keras.Model) -> bool:
    """Return whether any layer computes in a 16-bit type."""
    return any("16" in str(layer.compute_dtype) for layer in all_layers(model))


def overridden(model: keras.Model, method: str) -> bool:
    """Return whether a model or its class overrides a method of `keras.Model`."""
    return method in vars(model) or getattr(type(model), method) is not getattr(keras.Model, method)


def replaces_loop(model: keras.Model, method: str) -> bool:
    """Return whether a model's class overrides `fit` or `evaluate`.

    KerasHub 0.32 models override them to preprocess the data, which does not count without a preprocessor.
    """
    own = getattr(type(model), method)
    is_of_keras_hub = own.__module__.startswith("keras_hub.") and getattr(model, "preprocessor", None) is None
    return own is not getattr(keras.Model, method) and not is_of_keras_hub


def compilation(model: keras.Model) -> Any:
    """Return an object that identifies the last call of `compile`; None before the first."""
    return versions.private(model, "_compile_config") if model.compiled else None


class _Chosen(int):
    """A true value of `jit_compile` that tells "auto" from True: Keras 3.15 only keeps the resolved value."""


CHOSEN = _Chosen(True)


def is_chosen(model: keras.Model) -> bool:
    """Return whether `jit_compile` was resolved to true from "auto"."""
    return isinstance(model.jit_compile, _Chosen)


@contextlib.contextmanager
def resolving_jit_compile(resolve: Callable[[keras.Model], int]) -> Iterator[None]:
    """Resolve `jit_compile="auto"` with a function for models compiled in this context.

    Keras 3.15 resolves it to True on any machine with GPUs, whatever devices the model uses, and to False in the scope
    of a `tf.distribute` strategy.

    Args:
        resolve: Takes the model and returns False or `CHOSEN`.
    """
    versions.require(Trainer, "_resolve_auto_jit_compile")
    with mock.patch.object(Trainer, "_resolve_auto_jit_compile", lambda model: resolve(model)):
        yield


def resolve_jit_compile(model: keras.Model, resolve: Callable[[keras.Model], int]) -> None:
    """Resolve `jit_compile="auto"` with a function whenever the model is compiled, and now if it was resolved to true.

    Args:
        model: The model.
        resolve: As in `resolving_jit_compile`.
    """
    reference = weakref.ref(model)

    def resolved() -> int:
        existing = reference()
        return False if existing is None else resolve(existing)

    versions.replace(model, "_resolve_auto_jit_compile", resolved)
    if model.compiled and is_chosen(model):
        model.jit_compile = resolved()


def layer_without_xla(model: keras.Model) -> keras.Layer | None:
    """Return the first layer that declares that XLA cannot compile it (`supports_jit`)."""
    return next((layer for layer in all_layers(model) if not layer.supports_jit), None)


def compile_arguments(model: keras.Model) -> dict[str, Any]:
    """Return the arguments of `compile`, with the resolved value of `jit_compile`."""
    compiled = compilation(model)
    arguments: dict[str, Any] = {} if compiled is None else dict(compiled.config)
    return {**arguments, "jit_compile": bool(model.jit_compile)}


def is_in_scope(model: keras.Model) -> bool:
    """Return whether Keras runs the model's methods under a `tf.distribute` strategy."""
    strategy = versions.private(model, "_distribute_strategy")
    return isinstance(strategy, tf.distribute.MirroredStrategy | tf.distribute.MultiWorkerMirroredStrategy)


@contextlib.contextmanager
def new_models(note: Callable[[keras.Model], None]) -> Iterator[None]:
    """Call a function with each model created in this context, before it has layers."""
    original = TensorFlowTrainer.__init__

    def create(model: Any) -> None:
        original(model)
        note(model)

    with mock.patch.object(TensorFlowTrainer, "__init__", create):
        yield


@contextlib.contextmanager
def out_of_scope(model: keras.Model, predict_function: Any) -> Iterator[None]:
    """Let Keras' own methods use the first copy of the weights in this context, as if there were no strategy.

    Otherwise Keras 3.15 predicts a single batch on every replica and concatenates all outputs, and cannot gather the
    outputs of several workers (keras/src/backend/tensorflow/trainer.py).

    Args:
        model: A built model.
        predict_function: The result of `predict_function`; None for a new one.
    """
    versions.require(model, "_distribute_strategy", "predict_function")
    with mock.patch.multiple(model, _distribute_strategy=None, predict_function=predict_function):
        yield


def predict_function(model: keras.Model) -> Any:
    """Return a predict function for `out_of_scope`."""
    with out_of_scope(model, None):
        model.make_predict_function()
        return model.predict_function


def restored_epoch(model: keras.Model) -> int:
    """Return the epoch at which `keras.callbacks.BackupAndRestore` resumes, or 0."""
    return int(model._initial_epoch or 0)


def mask_of(tensor: Any) -> Any:
    """Return the Keras mask of a tensor, if any; in a graph, always as a symbolic tensor."""
    mask = backend.get_keras_mask(tensor)
    if mask is None or tf.is_symbolic_tensor(mask) or tf.executing_eagerly():
        return mask
    return tf.identity(tf.constant(np.asarray(mask)))


def with_mask(tensor: tf.Tensor, mask: Any) -> tf.Tensor:
    """Return a copy of a tensor with the given Keras mask.

    Probabilities keep their logits, from which Keras computes the cross-entropy (keras/src/activations/activations.py).
    """
    copied = tf.identity(tensor)
    _copy_logits(tensor, copied)
    if mask is not None:
        backend.set_keras_mask(copied, mask)
    return copied


def copy_annotations(tensor: tf.Tensor, copied: tf.Tensor) -> None:
    """Give a copy of a tensor the Keras mask and the logits of the tensor, if it has any."""
    _copy_logits(tensor, copied)
    if (mask := backend.get_keras_mask(tensor)) is not None:
        backend.set_keras_mask(copied, mask)


def logits_of(tensor: Any) -> Any:
    """Return the logits that Keras has attached to probabilities; None for another tensor."""
    return getattr(tensor, "_keras_logits", None)


def _copy_logits(tensor: tf.Tensor, copied: tf.Tensor) -> None:
    if (logits := logits_of(tensor)) is not None:
        copied._keras_logits = logits
