"""Blocks: layers of users and of KerasHub that compute with inner layers, read by `keras_tracing` as a model is.

Written for Keras 3.15. A block may read the size of its batch, for the shape of a mask or of heads. Symbolic tensors
have None there, which Keras passes on to TensorFlow; a block that is read has the size as a symbolic scalar:

    ops.shape(x)[0]  ──► Size ──► KerasFunction("broadcast_to"), which takes it among its arguments

A block also hangs a mask on its outputs when its `call` has ended; `WithMask` is that as an operation.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import keras.src.ops
import tensorflow as tf
from keras.src import backend

from tfpar._compat import versions
from tfpar._compat.models import keras_model

# Functions of keras.ops that take sizes.
_SIZED = ("arange", "broadcast_to", "full", "ones", "reshape", "tile", "zeros")
_MODULES = (keras.ops, keras.src.ops)
# Of a class that computes as its base, in which a user only sets arguments.
_HARMLESS = {"__init__", "get_config"}


def is_block(layer: keras.Layer) -> bool:
    """Return whether a layer computes with inner layers in a `call` that is not Keras' own, and ends with its outputs.

    Args:
        layer: A built layer.
    """
    is_read = not isinstance(layer, keras.Model) and not keras_model.is_of_keras(type(layer).call)
    is_known = keras_model.is_of_keras(class_of(layer))
    ends = layer.activity_regularizer is None and versions.private(layer, "_remat_mode") is None
    return is_read and not is_known and ends and any(one.weights for one in keras_model.all_layers(layer)[1:])


def class_of(layer: keras.Operation) -> Any:
    """Return the class of Keras as which a layer computes, or its own class.

    The CachedMultiHeadAttention of KerasHub 0.32 is a MultiHeadAttention where it has no cache, and does not use the
    Keras masks of its inputs.

    Args:
        layer: A layer, or an operation of `keras.ops`.
    """
    classes = type(layer).__mro__
    if classes[0].__name__ == "CachedMultiHeadAttention" and classes[0].__module__.startswith("keras_hub."):
        return keras.layers.MultiHeadAttention
    base = next(one for one in classes if keras_model.is_of_keras(one) or _has_methods(one))
    return base if keras_model.is_of_keras(base) else classes[0]


def _has_methods(found: type) -> bool:
    own = {name for name, value in vars(found).items() if callable(value) or isinstance(value, property)}
    return bool(own - _HARMLESS)


class Size(keras.Operation):
    """The size of an axis of a tensor, such as the number of examples of a batch."""

    def __init__(self, axis: int) -> None:
        super().__init__(name="size")
        self.axis = axis

    def call(self, inputs: Any) -> tf.Tensor:
        """Return the size, a scalar."""
        return tf.shape(inputs)[self.axis]

    def compute_output_spec(self, inputs: Any) -> keras.KerasTensor:
        """Return a symbolic scalar."""
        return keras.KerasTensor((), "int32")


class KerasFunction(keras.Operation):
    """A function of `keras.ops` with tensors among the sizes that it takes."""

    def __init__(self, function: str) -> None:
        super().__init__(name=function)
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return getattr(keras.ops, self.function)(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Return a symbolic tensor, with None for sizes that are tensors."""
        return backend.compute_output_spec(self.call, *args, **kwargs)


class WithMask(keras.Operation):
    """A tensor with a Keras mask that a layer hangs on its output."""

    def __init__(self) -> None:
        super().__init__(name="mask")

    def call(self, inputs: Any, mask: Any) -> tf.Tensor:
        """Return the tensor with the mask."""
        return keras_model.with_mask(inputs, mask)

    def compute_output_spec(self, inputs: Any, mask: Any) -> keras.KerasTensor:
        """Return a symbolic tensor with the mask."""
        output = keras.KerasTensor(inputs.shape, inputs.dtype)
        backend.set_keras_mask(output, mask)
        return output


def change_masks(layer: keras.Layer, args: Any, kwargs: Any, output: Any) -> None:
    """Change the masks of symbolic tensors as the `call` of a layer of Keras 3.15 does, which symbolic outputs do not.

    A ReversibleEmbedding hangs a mask on its output, and a MultiHeadAttention removes those of its inputs.

    Args:
        layer: Any layer.
        args: The positional arguments of its call.
        kwargs: The keyword arguments.
        output: Its symbolic output.
    """
    if type(layer).call is keras.layers.MultiHeadAttention.call:
        for value in (*args[:3], *map(kwargs.get, ("query", "value", "key"))):
            backend.set_keras_mask(value, None)
    elif type(layer).call is keras.layers.ReversibleEmbedding.call and layer.mask_zero:
        arguments = inspect.signature(layer.call).bind(*args, **kwargs).arguments
        if not arguments.get("reverse"):
            backend.set_keras_mask(output, keras.layers.Embedding.compute_mask(layer, arguments["inputs"]))


@contextlib.contextmanager
def recording_sizes(is_read: Callable[[], bool], operate: Callable[..., Any]) -> Iterator[None]:
    """Record the sizes that a block reads, and the functions that take them.

    Args:
        is_read: Whether the `call` of a block runs.
        operate: Takes an operation and its arguments, and returns its symbolic outputs.
    """
    shape = keras.ops.shape

    def symbolic_shape(inputs: Any) -> Any:
        sizes = shape(inputs)
        if not is_read() or not isinstance(inputs, keras.KerasTensor):
            return sizes
        return tuple(operate(Size(axis), inputs) if size is None else size for axis, size in enumerate(sizes))

    def sized(name: str) -> Callable[..., Any]:
        function = getattr(keras.ops, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = keras.tree.flatten((args, kwargs))
            takes_size = any(isinstance(leaf, keras.KerasTensor) and leaf.shape == () for leaf in leaves)
            return (
                operate(KerasFunction(name), *args, **kwargs) if is_read() and takes_size else function(*args, **kwargs)
            )

        return call

    replaced = {"shape": symbolic_shape, **{name: sized(name) for name in _SIZED}}
    with contextlib.ExitStack() as stack:
        for module, (name, function) in itertools.product(_MODULES, replaced.items()):
            stack.enter_context(mock.patch.object(module, name, function))
        yield
