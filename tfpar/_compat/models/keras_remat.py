"""Layers whose activations are recomputed: `keras.RematScope` without `tf.recompute_grad` (Keras 3.15).

Keras computes such a layer in `tf.recompute_grad`, which calls it again in the backward pass. On TensorFlow 2.21 this
draws new Dropout masks, updates BatchNormalization and metrics twice, drops the gradients of added losses, and fails
in a graph if the layer takes keyword arguments (`_graph_mode_decorator` in
tensorflow/python/ops/custom_gradient.py). So tfpar calls the layer once and copies its operations instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
from keras.src.backend.common import remat

from tfpar._compat import versions
from tfpar._compat.models import keras_model

Recorder = Callable[[Callable[..., Any]], Callable[..., Any]]

_WHOLE_LAYER = remat.RematMode("full", 0, [])
_own_remat: Recorder = remat.remat
_recorders: list[Recorder] = []


def _remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a layer calls in place of `function`, its `call` or its activation."""
    recorder = _recorders[-1] if _recorders else _own_remat
    return recorder(function)


def leave_to_tfpar() -> None:
    """From now on, `recorded` replaces what layers of a `keras.RematScope` call."""
    versions.replace(remat, "remat", _remat)


@contextlib.contextmanager
def recorded(recorder: Recorder, layers: Collection[keras.Layer] = ()) -> Iterator[None]:
    """Let a function record what layers compute that were built in a `keras.RematScope`, and other layers.

    The threads of replicas share this context.

    Args:
        recorder: Takes the `call` of a layer, or its activation, and returns the function to call in its place.
        layers: More layers to record, as in a scope of mode "full".
    """
    added = [layer for layer in layers if versions.private(layer, "_remat_mode") is None]
    _recorders.append(recorder)
    for layer in added:
        vars(layer)["_remat_mode"] = _WHOLE_LAYER  # not assigned: Keras would track the tuple
    try:
        yield
    finally:
        _recorders.pop()
        for layer in added:
            vars(layer)["_remat_mode"] = None


def called_once() -> contextlib.AbstractContextManager[None]:
    """Return a context in which layers of a `keras.RematScope` are computed like any other layer."""
    return recorded(lambda function: function)


def holds_any(operation: keras.Operation, layers: Collection[keras.Layer]) -> bool:
    """Return whether an operation is one of some layers, or holds one of them."""
    held = operation._flatten_layers() if isinstance(operation, keras.Layer) else []
    chosen = set(map(id, layers))
    return any(id(layer) in chosen for layer in held)


def recorded_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers of a model at every depth that `recorded` applies to."""
    return [layer for layer in keras_model.all_layers(model) if versions.private(layer, "_remat_mode") is not None]
