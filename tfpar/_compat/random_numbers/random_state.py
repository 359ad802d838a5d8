"""The global random states: Keras' generator of no layer, Python's, NumPy's and TensorFlow's eager ones.

Written for Keras 3.15 and TensorFlow 2.21. Trials of a model before the first step must not change them: layers that
are created later would otherwise start with other weights than after Keras' own `fit`.
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
    """Return the state of Keras 3.15's global generator, which draws for `keras.random` without a seed.

    Keras makes the generator when something draws from it for the first time, with a seed from Python's `random`.
    """
    return global_seed_generator().state


def states_of_no_layer() -> list[Any]:
    """Return that state in a list, which is empty as long as Keras has not made the generator."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return [] if generator is None else [generator.state]


def seeded(states: Iterable[Any], seed: int) -> list[tuple[Any, tf.Tensor]]:
    """Seed Python's, NumPy's and TensorFlow's random states; return values for the states of Keras' seed generators.

    So a study finds the same in every process. `preserved_random_state` restores the random states.

    Args:
        states: Of seed generators; each draws numbers of its own.
        seed: A small number.
    """
    random.seed(seed)
    np.random.seed(seed)
    tf.random.set_seed(seed)
    return [(state, tf.cast([seed, number], state.dtype)) for number, state in enumerate(states)]


def global_seed() -> int | None:
    """Return the seed of `tf.random.set_seed`, None where it was not called (TensorFlow 2.21)."""
    seed: int | None = context.global_seed()
    return seed


def draws_from_no_layer(scope: keras.StatelessScope, known: Iterable[Any]) -> bool:
    """Return whether Keras' global generator was used inside a scope.

    Args:
        scope: The scope, which holds the changed state.
        known: States whose new values are already read from the scope.
    """
    return any(
        scope.get_current_value(state) is not None and not any(state is other for other in known)
        for state in states_of_no_layer()
    )


@contextlib.contextmanager
def stand_in_generator() -> Iterator[None]:
    """Preserve Keras' global generator: after this context it has the same state, or does not exist yet.

    Inside there is one, made without a number from Python's `random`.
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
    """Return a generator, the same one for all uses of a thread outside of a `tf.distribute` strategy.

    TensorFlow 2.21 traces a function again if its first trace created a variable, also in `tf.init_scope`, and refuses
    a variable that a later trace creates (`_call` in tensorflow/python/eager/polymorphic_function/
    polymorphic_function.py). The functions of a pipeline are compiled in the trace of its first step.
    """
    generator: keras.random.SeedGenerator | None = global_state.get_global_attribute(_STAND_IN)
    if generator is None or tf.distribute.has_strategy():
        generator = keras.random.SeedGenerator(0, name="stand_in")
        if not tf.distribute.has_strategy():
            global_state.set_global_attribute(_STAND_IN, generator)
    return generator


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore every global random state after this context, even if it is seeded inside."""
    python, of_numpy = random.getstate(), np.random.get_state()
    of_tensorflow = context.context()
    versions.require_mentioned(context.Context._internal_operation_seed, "_rng")
    seed, generator = of_tensorflow._seed, getattr(of_tensorflow, "_rng", None)  # none before the first seed
    state = generator and generator.getstate()
    of_keras = global_state.get_global_attribute(GLOBAL_RANDOM_SEED)
    try:
        with stand_in_generator():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)
        of_tensorflow._seed = seed
        if generator is not None:
            of_tensorflow._rng = generator
            generator.setstate(state)
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, of_keras)


class GeneratorOnReplicas:
    """Keras' global generator with a state on every replica.

    Keras 3.15 creates the generator at its first use: outside of a strategy's scope, or while a step is traced.
    Replicas can assign to neither ("singleton tf.Variables", "created on the first call"). This generator replaces it
    when a replica draws, and continues from its state.

    Args:
        strategy: The strategy in whose scope the state is created.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        found = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        self._makes = found is None
        self._generator = found
        if found is None or not strategy.extended.variable_created_in_scope(found.state.value):
            python = random.getstate()
            seed = make_default_seed()
            random.setstate(python)  # nothing may ever draw
            with strategy.scope():
                self._generator = keras.random.SeedGenerator(seed, name="global_seed_generator")
            if found is not None:
                self._generator.state.assign(found.state)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use this generator for all draws without a seed inside this context."""
        with mock.patch.object(seed_generator_module, "global_seed_generator", self._draws):
            yield

    def _draws(self) -> keras.random.SeedGenerator:
        if global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not self._generator:
            if self._makes:
                make_default_seed()
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self._generator)
        return self._generator


@contextlib.contextmanager
def replica_seeds(replica_id: Callable[[], int]) -> Iterator[None]:
    """Draw different random numbers on every replica inside this context; the first draws those of one device.

    A Keras 3.15 `SeedGenerator` has the same state on all replicas, so that Dropout would drop the same units for the
    first example of each part, the second, and so on. The number of the replica is mixed into the drawn seed.
    """

    def draw(generator: Any, ordered: bool = True) -> tf.Tensor:
        seed = original(generator, ordered)
        # The golden ratio's 32 bits: neighbouring seeds do not meet those of neighbouring replicas.
        return seed + tf.cast([replica_id() * 2654435769 % 2**31, 0], seed.dtype)

    original = keras.random.SeedGenerator.next
    with mock.patch.object(keras.random.SeedGenerator, "next", draw):
        yield
