"""The choice of XLA for `jit_compile="auto"`: on GPUs, as in Keras, if all layers and operations allow it.

    compile(jit_compile="auto") ─► on GPUs CHOSEN ─► first step ─► compiled
                                                         └─ an operation that XLA cannot compile ─► False, and a warning

With `jit_compile=True`, the error of XLA is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfpar._compat import tf_determinism
from tfpar._compat.models import keras_model
from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.job import Job
from tfpar.messages import user_warnings
from tfpar.messages.received import excerpt

_UNSUPPORTED = re.compile(r"Detected unsupported operations .*?: (\w+) \(", re.DOTALL)


class NotCompiledError(Exception):
    """XLA cannot compile the passes of a model as a whole; the message gives the reason as a clause."""


# Raised by the first call of a function that XLA cannot compile.
ERRORS = (NotCompiledError, tf.errors.OpError)


class _Engine(Protocol):
    chooses_xla: bool

    @property
    def job(self) -> Job: ...

    @property
    def device_names(self) -> list[str]: ...

    def assign(self, variable: keras.Variable, value: Any) -> None: ...


def is_default(devices: Sequence[str]) -> bool:
    """Return whether `jit_compile="auto"` means True on devices: not on CPUs, where XLA is slower.

    Example:
        >>> is_default(["GPU:0", "GPU:1"]), is_default(["CPU:0"])
        (True, False)
    """
    return all(name.startswith("GPU") for name in devices)


def resolver(engine: _Engine) -> Callable[[keras.Model], int]:
    """Return a function that resolves `jit_compile="auto"` of a model for the devices of an engine.

    XLA is not chosen in a job of several workers, which could not fall back in the same step.
    """

    def resolve(model: keras.Model) -> int:
        if not (engine.chooses_xla and engine.job.num_workers == 1 and is_default(engine.device_names)):
            return False
        return keras_model.CHOSEN if _is_possible(model) else False

    return resolve


def check(model: keras.Model) -> None:
    """Revoke the choice of XLA if a layer that was built since then does not support it."""
    if keras_model.is_chosen(model) and not _is_possible(model):
        model.jit_compile = False


def _is_possible(model: keras.Model) -> bool:
    if (layer := keras_model.layer_without_xla(model)) is not None:
        _warn(model, f"layer {layer.name!r} ({type(layer).__name__}) does not support it")
    elif tf_determinism.is_enabled():
        _warn(model, "operations are deterministic, which XLA does not support for all of them")
    else:
        return True
    return False


def _warn(model: keras.Model, reason: str) -> None:
    user_warnings.warn(
        f"Steps of {model.name!r} are not compiled with XLA: {reason}. Write compile(jit_compile=False) to silence "
        "this warning."
    )


class Fallback:
    """The fallback from XLA if the first step of a model cannot be compiled.

    A failed step updates no weight, as updates need the results of the passes. It may have advanced counters and random
    state, which are restored.

    Args:
        model: A model for which XLA is chosen.
        engine: The engine that runs its steps.
    """

    def __init__(self, model: keras.Model, engine: _Engine) -> None:
        self._model, self._engine = model, engine
        slots = [] if model.optimizer is None else [slot for slot in model.optimizer.variables if len(slot.shape)]
        updated = {id(variable) for variable in (*model.trainable_variables, *slots)}
        self._values = [
            (variable, variable.numpy())
            for variable in keras_variables.state(model)
            if id(variable) not in updated
            and keras_variables.is_allocated(variable)
            and not sharded_memory.is_remote(variable)
        ]

    def leave_xla(self) -> None:
        """Restore what the failed step has changed, and trace without XLA from now on."""
        for variable, value in self._values:
            self._engine.assign(variable, value)
        self._model.jit_compile = False

    def explain(self, error: Exception) -> None:
        """Warn why XLA is not used, given the error of the first step, after a step without XLA has run."""
        operation = _UNSUPPORTED.search(str(error))
        if isinstance(error, NotCompiledError):
            reason = str(error)
        else:
            reason = f"it cannot compile {operation[1]}" if operation else excerpt(str(error).strip(), 200)
        _warn(self._model, reason)
