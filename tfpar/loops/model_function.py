"""The first argument of a trainer: a model function, or a model."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfpar import process_lock, xla_choice
from tfpar._compat.models import keras_functions, keras_model, keras_remat
from tfpar.engines import model_checks
from tfpar.loops import model_methods
from tfpar.strategies import Strategy, model_scopes

ModelOrFunction: TypeAlias = keras.Model | Callable[[], keras.Model]


def make_model(build_model: ModelOrFunction, strategy: Strategy, seed: int | None) -> keras.Model:
    """Build a model in the scope of a strategy, or move a built model into it.

    Args:
        build_model: The model function, or a model.
        strategy: The strategy that places the variables of the model.
        seed: The seed to set before the model function runs. None sets no seed.

    Raises:
        TypeError: If `build_model` does not return a compiled model.
        ValueError: If the model overrides a step of Keras' trainer or cannot be moved, or the model function fails on
            another worker.
    """
    keras_functions.trace_again_after_moves()
    keras_remat.leave_to_tfpar()
    name = None if isinstance(build_model, keras.Model) else "The model function"
    with process_lock.ProcessLock(kept=True), strategy.job.vote(name):
        model = build_model if isinstance(build_model, keras.Model) else _called(build_model, strategy, seed)
        strategy.engine.move_model(model)
    if model_scopes.noted_strategy(model) is not None:
        model_scopes.note_strategy(model, strategy)
    keras_model.resolve_jit_compile(model, xla_choice.resolver(strategy.engine))
    return model


def _called(build_model: Callable[[], keras.Model], strategy: Strategy, seed: int | None) -> keras.Model:
    if seed is not None:
        keras.utils.set_random_seed(seed)
    refused = model_methods.refused_in_model_function(strategy)
    resolving = keras_model.resolving_jit_compile(xla_choice.resolver(strategy.engine))
    with strategy.engine.creation_scope(), resolving, refused, keras_remat.called_once():
        model = build_model()
    model_checks.check_model(model)
    for method in ("fit", "evaluate", "predict"):
        model_checks.check_steps(model, method, runs_own_steps=strategy.engine.runs_own_steps)
    if isinstance(build_model, type) and not model.compiled:
        raise _returns_uncompiled(build_model)
    return model


def check_arguments(build_model: Any, strategy: Any, seed: Any, fused: Any = True) -> None:
    """Check the arguments of a trainer before the model is built.

    Raises:
        TypeError: If an argument has the wrong type, or the model function needs arguments.
        ValueError: If the seed is out of range.
    """
    if isinstance(build_model, Strategy | tf.distribute.Strategy):
        raise TypeError(
            f"The model function comes first and the strategy second, received {type(build_model).__name__} first. "
            "Write tfpar.Trainer(build_model, strategy)."
        )
    if not callable(build_model):
        raise TypeError(
            f"tfpar.Trainer takes a function that returns a compiled keras.Model, or such a model, received "
            f"{build_model!r:.100}. Write tfpar.Trainer(build_model, strategy)."
        )
    if not isinstance(build_model, keras.Model):
        _check_parameters(build_model)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
        raise TypeError(f"seed must be a whole number, or None to set nothing, received {seed!r}.")
    if seed is not None and not 0 <= int(seed) < 2**32:
        raise ValueError(f"seed must be at least 0 and below 2**32, received {seed}.")
    if not isinstance(fused, bool):
        raise TypeError(f"fused must be True, or False for Keras' own operations alone, received {fused!r}.")


def _check_parameters(build_model: Any) -> None:
    # The signature of a model class itself is Keras' `__new__`, which takes any arguments.
    is_class = isinstance(build_model, type)
    function = build_model.__init__ if is_class else build_model
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in C
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic and name != "self"
    ]
    if required and is_class:
        raise _returns_uncompiled(build_model)
    if required:
        name = getattr(build_model, "__name__", "build_model")
        arguments = ", ".join(f"{parameter}=..." for parameter in required)
        raise TypeError(
            f"A model function is called without arguments, and {name} requires {', '.join(required)}. "
            f"Write tfpar.Trainer(lambda: {name}({arguments}), strategy)."
        )


def _returns_uncompiled(kind: type) -> TypeError:
    return TypeError(
        f"A model function must return a compiled model, received the class {kind.__name__}. Write a function that "
        f"creates {kind.__name__}(...), compiles and returns it."
    )
