"""Random numbers that layers draw from NumPy and Python, which are constants of a traced step.

    keras.random, tf.random      an operation of the graph: other numbers in every step
    numpy.random, random         drawn by the Python code of `call`: once for each trace, on every replica

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
    """Note the draws from NumPy or Python inside this context, in the thread that enters it.

    A generator that is made without a seed inside gets one from Python's global generator, so that a study that seeds
    this one has the same result in every process. NumPy 2 gets the seed of such a generator from `randbits`.

    Args:
        layers: Layers whose attributes may be generators of NumPy or Python.
        place: Returns the path of the layer that runs.

    Yields:
        The paths of layers that draw; after the context also the names of those whose generators have drawn.
    """
    found: list[str] = []
    thread, draw_bits = threading.get_ident(), random.getrandbits

    def noting(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:  # others may augment the data of the first steps
                return original(*args, **kwargs)
            found.append(place())
            return function(*args, **kwargs)

        return draw

    generators = _generators(layers)
    before = [_state(generator) for _, generator in generators]
    with contextlib.ExitStack() as stack:
        # Keras 3.15 draws the seed of a layer that has none from Python's global generator.
        stack.enter_context(mock.patch.object(seed_generator, "python_random", random.Random(0)))
        bits = noting(draw_bits, getattr(bit_generator, _BITS))
        stack.enter_context(mock.patch.object(bit_generator, _BITS, bits))
        for module in (random, np.random):
            for name, function in _global_functions(module).items():
                stack.enter_context(mock.patch.object(module, name, noting(function, function)))
        yield found
    found += [layer.name for (layer, one), state in zip(generators, before, strict=True) if _state(one) != state]


def refusal(names: Sequence[str], way_out: str, way_of_layers: str = "") -> ValueError:
    """Return the error for layers and losses that draw from NumPy or Python.

    Args:
        names: The names of the layers or of the model.
        way_out: How to keep these draws.
        way_of_layers: What to do with layers that Keras has written, with a comma after it.
    """
    return ValueError(
        "Layers and losses must draw random numbers with keras.random or tf.random, received "
        f"{', '.join(map(repr, names))}, which draws from NumPy or Python: TensorFlow does so once for each trace, and "
        "on every replica again, but not in every step. Use keras.random with a keras.random.SeedGenerator, draw in "
        f"the constructor, {way_of_layers}or {way_out}."
    )


def _global_functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module that draw from its global generator: they are bound methods of it."""
    generator = module.random.__self__
    functions = {name: function for name, function in vars(module).items() if name not in _STATE_FUNCTIONS}
    return {name: one for name, one in functions.items() if getattr(one, "__self__", None) is generator}


def _generators(layers: Iterable[keras.Layer]) -> list[tuple[keras.Layer, Any]]:
    kinds = np.random.Generator | np.random.RandomState | random.Random
    return [(layer, value) for layer in layers for value in vars(layer).values() if isinstance(value, kinds)]


def _state(generator: Any) -> bytes:
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())
