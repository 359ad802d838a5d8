"""The layers whose activations are recomputed: all of a model, or those with some names or of some classes."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

import keras

from tfpar._compat.models.keras_model import all_layers
from tfpar.messages.suggestions import did_you_mean

Recompute = bool | Sequence[str | type[keras.Layer]]


def check(recompute: Recompute) -> Recompute:
    """Return the argument `recompute` of a strategy: a bool, or a tuple of names and classes.

    Raises:
        TypeError: If it is neither.

    Example:
        >>> check(["block_*", keras.layers.MultiHeadAttention])
        ('block_*', <class 'keras.src.layers.attention.multi_head_attention.MultiHeadAttention'>)
    """
    if isinstance(recompute, bool):
        return recompute
    entries = recompute if isinstance(recompute, list | tuple) else [None]
    if not all(isinstance(entry, str) or _is_class(entry) for entry in entries):
        raise TypeError(
            "recompute must be True, False, or a list of layer names, patterns and classes such as "
            f"['block_*', keras.layers.MultiHeadAttention], received {recompute!r}."
        )
    return tuple(recompute)


def chosen(model: keras.Model, recompute: Recompute) -> list[keras.Layer]:
    """Return the layers of a model to recompute; nested models stand for their layers.

    Args:
        model: A model.
        recompute: A value that `check` has returned.

    Raises:
        ValueError: If an entry of the list is no layer of the model.
    """
    if isinstance(recompute, bool):
        return list(_outermost(model)) if recompute else []
    layers = all_layers(model)[1:]
    for entry in recompute:
        if not any(_matches(layer, entry) for layer in layers):
            name = entry if isinstance(entry, str) else entry.__name__
            names = dict.fromkeys(layer.name if isinstance(entry, str) else type(layer).__name__ for layer in layers)
            raise ValueError(
                f"recompute names a layer by its name or class, received {name!r}, which is none of the model "
                f"{model.name!r}.{did_you_mean(name, names)} Its layers are in model.summary(expand_nested=True)."
            )
    named = [layer for layer in layers if any(_matches(layer, entry) for entry in recompute)]
    opened = [_outermost(layer) if isinstance(layer, keras.Model) else [layer] for layer in named]
    return list({id(layer): layer for layers in opened for layer in layers}.values())


def _outermost(model: keras.Model) -> Iterator[keras.Layer]:
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _outermost(layer)
        else:
            yield layer


def _matches(layer: keras.Layer, entry: str | type[keras.Layer]) -> bool:
    return fnmatch.fnmatchcase(layer.name, entry) if isinstance(entry, str) else isinstance(layer, entry)


def _is_class(entry: object) -> bool:
    return isinstance(entry, type) and issubclass(entry, keras.Layer)
