"""Blocks: custom layers with inner layers, which `keras_tracing` reads like models (Keras 3.15).

A block may use the batch size, for example in the shape of a mask. In symbolic tensors it is None, which Keras passes
on to TensorFlow. So while a block is traced, sizes are symbolic scalars:

    ops.shape(x)[0]  ──► Size ──► KerasFunction("broadcast_to"), with the size among its arguments

A block may also set a mask on its outputs after its `call`, which becomes the operation `WithMask`.
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

# Functions of keras.ops with sizes among their arguments.
_SIZED = ("arange", "broadcast_to", "full", "ones", "reshape", "tile", "zeros")
_MODULES = (keras.ops, keras.src.ops)
# Methods that a user's class may override and still compute like its base.
_HARMLESS = {"__init__", "get_config"}


def is_block(layer: keras.Layer) -> bool:
    """Return whether a built layer calls inner layers in a custom `call`, and Keras adds nothing to its outputs."""
    is_read = not isinstance(layer, keras.Model) and not keras_model.is_of_keras(type(layer).call)
    is_known = keras_model.is_of_keras(class_of(layer))
    ends = layer.activity_regularizer is None and versions.private(layer, "_remat_mode") is None
    return is_read and not is_known and ends and any(inner.weights for inner in keras_model.all_layers(layer)[1:])


def class_of(layer: keras.Operation) -> Any:
    """Return the Keras class that a layer computes like, or its own class.

    KerasHub 0.32's CachedMultiHeadAttention without a cache is a MultiHeadAttention that ignores the masks of its
    inputs.

    Args:
        layer: A layer, or an operation of `keras.ops`.
    """
    classes = type(layer).__mro__
    if classes[0].__name__ == "CachedMultiHeadAttention" and classes[0].__module__.startswith("keras_hub."):
        return keras.layers.MultiHeadAttention
    base = next(kind for kind in classes if keras_model.is_of_keras(kind) or _has_methods(kind))
    return base if keras_model.is_of_keras(base) else classes[0]


def _has_methods(kind: type) -> bool:
    own = {name for name, value in vars(kind).items() if callable(value) or isinstance(value, property)}
    return bool(own - _HARMLESS)


class Size(keras.Operation):
    """The size of an axis of a tensor, such as the batch size."""

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
    """A function of `keras.ops` with tensors among its size arguments."""

    def __init__(self, function: str) -> None:
        super().__init__(name=function)
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return getattr(keras.ops, self.function)(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Return a symbolic tensor, with None for sizes given as tensors."""
        return backend.compute_output_spec(self.call, *args, **kwargs)


class WithMask(keras.Operation):
    """A tensor with a Keras mask that a layer has set on it."""

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
    """Change masks as the `call` of Keras 3.15 layers does, which computing symbolic outputs does not run.

    ReversibleEmbedding sets a mask on its output, and MultiHeadAttention removes the masks of its inputs.

    Args:
        layer: Any layer.
        args: The positional arguments of its call.
        kwargs: The keyword arguments of its call.
        output: The symbolic output of its call.
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
    """Record the sizes that a block reads, and the functions called with them, in this context.

    Args:
        is_read: Returns whether a block is being traced.
        operate: Applies an operation to its arguments and returns symbolic outputs.
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
