"""Typical numbers in the place of random ones, so that a trial can compare runs on a batch and on parts of it.

    on four examples      dropout keeps every unit, uniform(0, 1) is 0.6 everywhere
    on two of them        the same numbers, whatever is drawn in which order and shape

Written for Keras 3.15, whose layers and `keras.random` all draw through one module, `keras.src.backend.random`, and
TensorFlow 2.21. What is traced draws as usual.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend import random as keras_random

from tfpar import _compat_tracing

# Not the middle, where noise would be zero and hide what it is multiplied with.
_QUANTILE, _DEVIATIONS = 0.6, 0.7


@contextlib.contextmanager
def typical_draws() -> Iterator[list[str]]:
    """Let random functions return typical numbers inside this context, where they run eagerly and have no fixed seed.

    Only in the thread that enters it: others may augment the data of the first steps.

    Returns:
        The names of the functions that were called, in a list that grows.
    """
    called: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compat_tracing.eager_functions())
        for module, functions in _FUNCTIONS:
            for name, typical in functions.items():
                stack.enter_context(mock.patch.object(module, name, _patched(module, name, typical, called)))
        yield called


def seed_states(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    """Return the states of the seed generators that layers hold, in attributes or in lists of them."""
    return [generator.state for layer in layers for generator in layer._seed_generators]


def _patched(module: Any, name: str, typical: Callable[..., Any] | None, called: list[str]) -> Callable[..., Any]:
    original, thread = getattr(module, name), threading.get_ident()
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if module is keras_random and isinstance(given.get("seed"), int):
            return original(*args, **kwargs)  # the same numbers each time: constants
        called.append(name)
        if typical is None or not tf.executing_eagerly():
            return original(*args, **kwargs)
        return typical(**{name: value for name, value in given.items() if name not in ("seed", "name", "noise_shape")})

    return draw


def _fill(value: Any, shape: Any, dtype: Any) -> tf.Tensor:
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    return tf.broadcast_to(tf.cast(tf.floor(value) if dtype.is_integer else value, dtype), shape)


def _normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None) -> tf.Tensor:
    return _fill(_float64(mean) + _DEVIATIONS * _float64(stddev), shape, dtype)


def _uniform(shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None) -> tf.Tensor:
    low, high = _float64(minval), _float64(1.0 if maxval is None else maxval)
    return _fill(low + _QUANTILE * (high - low), shape, dtype)


def _categorical(logits: Any, num_samples: Any, dtype: Any = "int64") -> tf.Tensor:
    return tf.cast(tf.repeat(tf.argmax(logits, -1)[:, None], num_samples, 1), dtype)


def _gamma(shape: Any, alpha: Any, dtype: Any = None) -> tf.Tensor:
    return _fill(alpha, shape, dtype)


def _binomial(shape: Any, counts: Any, probabilities: Any, dtype: Any = None) -> tf.Tensor:
    return _fill(tf.round(_float64(counts) * _float64(probabilities)), shape, dtype)


def _beta(shape: Any, alpha: Any, beta: Any, dtype: Any = None) -> tf.Tensor:
    return _fill(_float64(alpha) / (_float64(alpha) + _float64(beta)), shape, dtype)


def _float64(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


# None for what draws as usual: there a trial compares other neighbours.
_FUNCTIONS: list[tuple[Any, dict[str, Callable[..., Any] | None]]] = [
    (
        keras_random,
        {
            "normal": _normal,
            "truncated_normal": _normal,
            "uniform": _uniform,
            "randint": functools.partial(_uniform, dtype="int32"),
            "categorical": _categorical,
            "gamma": _gamma,
            "binomial": _binomial,
            "beta": _beta,
            "dropout": lambda inputs, rate: tf.convert_to_tensor(inputs),
            "shuffle": None,
        },
    ),
    (
        tf.random,
        {
            "normal": functools.partial(_normal, dtype="float32"),
            "truncated_normal": functools.partial(_normal, dtype="float32"),
            "uniform": functools.partial(_uniform, dtype="float32"),
            "shuffle": None,
        },
    ),
    (tf.nn, {"dropout": lambda x, rate: tf.convert_to_tensor(x)}),
]
