"""Detection of NumPy and Python random numbers in layers, which become constants of a traced step.

    keras.random, tf.random      ops of the graph: new numbers in every step
    numpy.random, random         Python code in `call`: new numbers in every trace, on every replica

Written for NumPy 2 and Keras 3.15.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras.src.random import seed_generator
from numpy.random import bit_generator

_BITS = "randbits"
_STATE_FUNCTIONS = ("seed", "getstate", "setstate", "get_state", "set_state")


@contextlib.contextmanager
def noted(layers: Iterable[keras.Layer], place: Callable[[], str]) -> Iterator[list[str]]:
    """Record uses of NumPy's and Python's generators in this context, in the calling thread.

    Generators created without a seed get one from Python's global generator, so that a study, which seeds that one, has
    the same result in every process. NumPy 2 takes such seeds from `randbits`.

    Args:
        layers: Layers whose attributes may be generators.
        place: Returns the path of the running layer.

    Yields:
        The paths of layers that use a global generator; after the context, also the names of layers that have used
        their own.
    """
    paths: list[str] = []
    thread, random_bits = threading.get_ident(), random.getrandbits

    def noting(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:  # other threads may augment data
                return original(*args, **kwargs)
            paths.append(place())
            return function(*args, **kwargs)

        return call

    generators = _generators(layers)
    before = [_state(generator) for _, generator in generators]
    with contextlib.ExitStack() as stack:
        # Keras 3.15 takes the seeds of layers without one from Python's global generator.
        stack.enter_context(mock.patch.object(seed_generator, "python_random", random.Random(0)))
        bits = noting(random_bits, getattr(bit_generator, _BITS))
        stack.enter_context(mock.patch.object(bit_generator, _BITS, bits))
        for module in (random, np.random):
            for name, function in _global_functions(module).items():
                stack.enter_context(mock.patch.object(module, name, noting(function, function)))
        yield paths
    after = [_state(generator) for _, generator in generators]
    paths += [layer.name for (layer, _), old, new in zip(generators, before, after, strict=True) if old != new]


def refusal(names: Sequence[str], way_out: str, way_of_layers: str = "") -> ValueError:
    """Return the error for layers and losses that use NumPy's or Python's random numbers.

    Args:
        names: The names of the layers or the model.
        way_out: How to keep using them.
        way_of_layers: What to do about layers of Keras, followed by a comma.
    """
    return ValueError(
        "Layers and losses must draw random numbers with keras.random or tf.random, received "
        f"{', '.join(map(repr, names))}, which draws from NumPy or Python: TensorFlow does so once for each trace, and "
        "on every replica again, but not in every step. Use keras.random with a keras.random.SeedGenerator, draw in "
        f"the constructor, {way_of_layers}or {way_out}."
    )


def _global_functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module that use its global generator: the bound methods of the generator."""
    generator = module.random.__self__
    return {
        name: function
        for name, function in vars(module).items()
        if name not in _STATE_FUNCTIONS and getattr(function, "__self__", None) is generator
    }


def _generators(layers: Iterable[keras.Layer]) -> list[tuple[keras.Layer, Any]]:
    kinds = np.random.Generator | np.random.RandomState | random.Random
    return [(layer, value) for layer in layers for value in vars(layer).values() if isinstance(value, kinds)]


def _state(generator: Any) -> bytes:
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())
