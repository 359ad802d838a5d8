"""The global random states of Keras, Python, NumPy and eager TensorFlow (Keras 3.15, TensorFlow 2.21).

Studying a model before the first step must not change them, or layers created later would start with other weights than
after Keras' own `fit`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator as seed_generator_module
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator, make_default_seed
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED
from tensorflow.python.eager import context

from tfpar._compat import versions

_STAND_IN = "tfpar_stand_in_generator"


def state_of_no_layer() -> Any:
    """Return the state of Keras' global generator, which `keras.random` uses without a seed.

    Keras creates the generator at its first use, with a seed from Python's `random`.
    """
    return global_seed_generator().state


def states_of_no_layer() -> list[Any]:
    """Return that state in a list, which is empty until Keras creates the generator."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


def seeded(states: Iterable[Any], seed: int) -> list[tuple[Any, tf.Tensor]]:
    """Seed Python, NumPy and TensorFlow, and return values for the states of Keras' seed generators.

    So a study has the same result in every process. `preserved_random_state` restores the states.

    Args:
        states: States of seed generators; each gets its own seed.
        seed: A small number.
    """
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)
    return [(state, tf.cast([seed, number], state.dtype)) for number, state in enumerate(states)]


def global_seed() -> int | None:
    """Return the seed set with `tf.random.set_seed`, if any."""
    seed: int | None = context.global_seed()
    return seed


def draws_from_no_layer(scope: keras.StatelessScope, known: Iterable[Any]) -> bool:
    """Return whether Keras' global generator was used in a scope.

    Args:
        scope: The scope with the changed state.
        known: States that are already accounted for.
    """
    return any(
        scope.get_current_value(state) is not None and not any(state is other for other in known)
        for state in states_of_no_layer()
    )


@contextlib.contextmanager
def stand_in_generator() -> Iterator[None]:
    """Restore Keras' global generator after this context, or remove it if it did not exist.

    In the context it exists, created without a number from Python's `random`.
    """
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    generator = before or _stand_in()
    value = generator.state.numpy()
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)
        generator.state.assign(value)


def _stand_in() -> keras.random.SeedGenerator:
    """Return a generator, which a thread reuses outside of a `tf.distribute` strategy.

    TensorFlow 2.21 retraces a function whose first trace creates a variable, even in `tf.init_scope`, and refuses
    variables created by later traces (`_call` in tensorflow/python/eager/polymorphic_function/
    polymorphic_function.py). The functions of a pipeline are compiled while its first step is traced.
    """
    generator: keras.random.SeedGenerator | None = global_state.get_global_attribute(_STAND_IN)
    if generator is None or tf.distribute.has_strategy():
        generator = keras.random.SeedGenerator(0, name="stand_in")
        if not tf.distribute.has_strategy():
            global_state.set_global_attribute(_STAND_IN, generator)
    return generator


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore every global random state after this context, even if it is seeded in it."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    tf_context = context.context()
    versions.require_mentioned(context.Context._internal_operation_seed, "_rng")
    seed, generator = tf_context._seed, getattr(tf_context, "_rng", None)  # missing before the first seed
    state = generator and generator.getstate()
    keras_seed = global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    try:
        with stand_in_generator():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        tf_context._seed = seed
        if generator is not None:
            tf_context._rng = generator
            generator.setstate(state)
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, keras_seed)


class GeneratorOnReplicas:
    """Keras' global generator, with a state on every replica.

    Keras 3.15 creates the generator at its first use: outside the strategy's scope, or while a step is traced. Replicas
    can assign to neither ("singleton tf.Variables", "created on the first call"). This generator takes over its state
    and replaces it when a replica uses it.

    Args:
        strategy: The strategy in whose scope the state is created.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        existing = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        self._is_first = existing is None
        self._generator = existing
        if existing is None or not strategy.extended.variable_created_in_scope(existing.state.value):
            python_state = random.getstate()
            seed = make_default_seed()
            random.setstate(python_state)  # the generator may never be used
            with strategy.scope():
                self._generator = keras.random.SeedGenerator(seed, name="global_seed_generator")
            if existing is not None:
                self._generator.state.assign(existing.state)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use this generator for all random ops without a seed in this context."""
        with mock.patch.object(seed_generator_module, "global_seed_generator", self._get):
            yield

    def _get(self) -> keras.random.SeedGenerator:
        if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not self._generator:
            if self._is_first:
                make_default_seed()  # as Keras does at the first use
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self._generator)
        return self._generator


@contextlib.contextmanager
def replica_seeds(replica_id: Callable[[], int]) -> Iterator[None]:
    """Give each replica its own random numbers in this context; the first one has those of a single device.

    A Keras 3.15 `SeedGenerator` has the same state on all replicas, so that Dropout would apply the same mask to every
    per-replica batch. The replica index is mixed into each seed.
    """

    def next_seed(generator: Any, ordered: bool = True) -> tf.Tensor:
        seed = original(generator, ordered)
        # 32 bits of the golden ratio: seeds of neighbouring replicas do not collide with neighbouring seeds.
        return seed + tf.cast([replica_id() * 2654435769 % 2**31, 0], seed.dtype)

    original = keras.random.SeedGenerator.next
    with mock.patch.object(keras.random.SeedGenerator, "next", next_seed):
        yield
