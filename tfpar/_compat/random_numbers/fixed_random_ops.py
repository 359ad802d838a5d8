"""Constants in place of random numbers, so that a study can compare a whole batch with parts of it.

    on four examples      dropout keeps every unit, uniform(0, 1) is 0.6 everywhere
    on two of them        the same numbers, for any order and shape of the random ops

Written for Keras 3.15, whose layers and `keras.random` all use the module `keras.src.backend.random`, and TensorFlow
2.21. In a study, traced functions stay random.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend import random as keras_random
from tensorflow.python.ops import random_ops

from tfpar._compat.graphs import tf_function

# Not the median, where noise would be zero and hide its factor.
TYPICAL = 0.6


@contextlib.contextmanager
def fixed(note_generator: Callable[[Any], None] = lambda generator: None) -> Iterator[set[str]]:
    """Replace random ops in this context with constants, if they run eagerly without a fixed seed.

    It applies to the calling thread only: other threads may augment data.

    Args:
        note_generator: Called with each seed generator that is passed to a random op.

    Returns:
        The names of the random ops called so far.
    """
    names: set[str] = set()

    def note(name: str, seed: Any) -> None:
        names.add(name)
        if isinstance(seed, keras.random.SeedGenerator):
            note_generator(seed)

    thread = threading.get_ident()
    with contextlib.ExitStack() as stack:
        stack.enter_context(tf_function.eager_functions())
        for module, functions in _FUNCTIONS:
            for name, typical in functions.items():
                function = typical and functools.partial(typical, TYPICAL)
                op = _patched(module, name, function, note, lambda: threading.get_ident() == thread)
                stack.enter_context(mock.patch.object(module, name, op))
        yield names


@contextlib.contextmanager
def all_fixed(note: Callable[[str], None]) -> Iterator[None]:
    """Replace random ops in this context with constants, in all threads and in traced functions.

    A shuffle keeps the order. Seeds that a layer takes from its generator directly stay random.

    Args:
        note: Called with the name of each layer, or the model, that calls a random op.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tf_function.own_traces(in_all_threads=True))
        for module, functions in _FUNCTIONS:
            for name, typical in functions.items():
                if name != "next":
                    function = functools.partial(typical or _in_order, TYPICAL)
                    op = _patched(module, name, function, lambda *_: note(_running_layer()), in_graphs=True)
                    stack.enter_context(mock.patch.object(module, name, op))
        yield


def _running_layer() -> str:
    """Return the name of the innermost running layer, or "the loss" if there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        layer = frame.f_locals.get("self")
        if isinstance(layer, keras.Layer):
            return str(layer.name)
        frame = frame.f_back
    return "the loss"


def seed_states(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    """Return the states of the layers' seed generators."""
    return [generator.state for layer in layers for generator in layer._seed_generators]


def _patched(
    module: Any,
    name: str,
    typical: Callable[..., Any] | None,
    note: Callable[[str, Any], None],
    applies: Callable[[], bool] = lambda: True,
    *,
    in_graphs: bool = False,
) -> Callable[..., Any]:
    original = getattr(module, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def random_op(*args: Any, **kwargs: Any) -> Any:
        if not applies():
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        if module is keras_random and isinstance(arguments.get("seed"), int):
            return original(*args, **kwargs)  # constants already
        note(name, arguments.get("seed"))
        if typical is None or not (in_graphs or tf.executing_eagerly()):
            return original(*args, **kwargs)
        return typical(**{name: value for name, value in arguments.items() if name not in _LEFT_OUT})

    return random_op


def _fill(value: Any, shape: Any, dtype: Any) -> tf.Tensor:
    dtype = tf.as_dtype(dtype or keras.config.floatx())
    return tf.broadcast_to(tf.cast(tf.floor(value) if dtype.is_integer else value, dtype), shape)


def _normal(quantile: float, shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None) -> tf.Tensor:
    deviations = statistics.NormalDist().inv_cdf(quantile)
    return _fill(_float64(mean) + deviations * _float64(stddev), shape, dtype)


def _uniform(quantile: float, shape: Any, minval: Any = 0.0, maxval: Any = 1.0, dtype: Any = None) -> tf.Tensor:
    low, high = _float64(minval), _float64(1.0 if maxval is None else maxval)
    return _fill(low + quantile * (high - low), shape, dtype)


def _categorical(quantile: float, logits: Any, num_samples: Any, dtype: Any = "int64") -> tf.Tensor:
    below = tf.cumsum(tf.nn.softmax(_float64(logits)), -1) < quantile
    return tf.cast(tf.repeat(tf.math.count_nonzero(below, -1)[:, None], num_samples, 1), dtype)


def _gamma(quantile: float, shape: Any, alpha: Any, dtype: Any = None) -> tf.Tensor:
    return _fill(2 * quantile * _float64(alpha), shape, dtype)


def _binomial(quantile: float, shape: Any, counts: Any, probabilities: Any, dtype: Any = None) -> tf.Tensor:
    counts, probabilities = _float64(counts), _float64(probabilities)
    some = tf.where(probabilities < 1, tf.round(quantile * counts), counts)
    return _fill(tf.where(probabilities > 0, some, tf.zeros_like(some)), shape, dtype)


def _beta(quantile: float, shape: Any, alpha: Any, beta: Any, dtype: Any = None) -> tf.Tensor:
    return _fill(quantile, shape, dtype)


def _dropout(quantile: float, inputs: Any = None, rate: Any = None, x: Any = None) -> tf.Tensor:
    return tf.convert_to_tensor(x if inputs is None else inputs)


def _in_order(quantile: float, x: Any = None, axis: int = 0, value: Any = None) -> tf.Tensor:
    return tf.convert_to_tensor(value if x is None else x)


def _float64(value: Any) -> tf.Tensor:
    return tf.cast(value, tf.float64)


_LEFT_OUT = ("self", "seed", "name", "noise_shape")

# None for functions that stay random: a shuffle gives each example other neighbours.
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
            "dropout": _dropout,
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
    (tf.nn, {"dropout": _dropout}),
    # Used by other functions of TensorFlow, such as those of tf.image.
    (
        random_ops,
        {
            "random_normal": functools.partial(_normal, dtype="float32"),
            "truncated_normal": functools.partial(_normal, dtype="float32"),
            "random_uniform": functools.partial(_uniform, dtype="float32"),
            "random_shuffle": None,
        },
    ),
    (
        tf.random.Generator,
        {
            "normal": functools.partial(_normal, dtype="float32"),
            "truncated_normal": functools.partial(_normal, dtype="float32"),
            "uniform": functools.partial(_uniform, dtype="float32"),
        },
    ),
    (keras.random.SeedGenerator, {"next": None}),
]
