"""XLA where `jit_compile="auto"` chooses it: on GPUs, as in Keras, if all layers and operations allow it.

    compile(jit_compile="auto") ─► on GPUs CHOSEN ─► first step ─► compiled
                                                         └─ an operation that XLA cannot compile ─► False, and one line

What a user asks for with `jit_compile=True` is never left out: then the error of XLA is raised.
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
    """XLA cannot compile the passes of a model as a whole; the message is a clause that says why."""


# What the first call of a compiled function raises where XLA cannot compile it.
ERRORS = (NotCompiledError, tf.errors.OpError)


class _Engine(Protocol):
    chooses_xla: bool

    @property
    def job(self) -> Job: ...

    @property
    def device_names(self) -> list[str]: ...

    def assign(self, variable: keras.Variable, value: Any) -> None: ...


def is_default(devices: Sequence[str]) -> bool:
    """Return whether `jit_compile="auto"` means True on some devices: steps on CPUs are slower with XLA.

    Args:
        devices: Short names.

    Example:
        >>> is_default(["GPU:0", "GPU:1"]), is_default(["CPU:0"])
        (True, False)
    """
    return all(name.startswith("GPU") for name in devices)


def resolver(engine: _Engine) -> Callable[[keras.Model], int]:
    """Return what `jit_compile="auto"` means for a model under a strategy, as a function of the model.

    Args:
        engine: Its devices decide, not those of the machine. Workers could not leave XLA out together in a step.
    """

    def resolve(model: keras.Model) -> int:
        if not (engine.chooses_xla and engine.job.num_workers == 1 and is_default(engine.device_names)):
            return False
        return keras_model.CHOSEN if _is_possible(model) else False

    return resolve


def check(model: keras.Model) -> None:
    """Leave XLA out where it was chosen and a layer that was built since does not support it.

    Args:
        model: A built model.
    """
    if keras_model.is_chosen(model) and not _is_possible(model):
        model.jit_compile = False


def _is_possible(model: keras.Model) -> bool:
    if (layer := keras_model.layer_without_xla(model)) is not None:
        _say(model, f"layer {layer.name!r} ({type(layer).__name__}) does not support it")
    elif tf_determinism.is_enabled():
        _say(model, "operations are deterministic, for which it has not all")
    else:
        return True
    return False


def _say(model: keras.Model, reason: str) -> None:
    user_warnings.warn(
        f"Steps of {model.name!r} are not compiled with XLA: {reason}. compile(jit_compile=False) leaves this line out."
    )


class Fallback:
    """The way back of a model from XLA, if its first step cannot be compiled.

    A failed step updates no weight, because every update needs the results of the passes. It may have counted itself,
    or have drawn random numbers; both are set back.

    Args:
        model: A model for which XLA is chosen.
        engine: Runs its steps.
    """

    def __init__(self, model: keras.Model, engine: _Engine) -> None:
        self._model, self._engine = model, engine
        slots = [] if model.optimizer is None else [one for one in model.optimizer.variables if len(one.shape)]
        updated = {id(variable) for variable in (*model.trainable_variables, *slots)}
        others = [variable for variable in keras_variables.state(model) if id(variable) not in updated]
        held = [one for one in others if keras_variables.is_allocated(one) and not sharded_memory.is_remote(one)]
        self._values = [(variable, variable.numpy()) for variable in held]

    def leave_xla(self) -> None:
        """Set back what the failed step has changed; the next trace is without XLA."""
        for variable, value in self._values:
            self._engine.assign(variable, value)
        self._model.jit_compile = False

    def explain(self, error: Exception) -> None:
        """Say in one line why XLA is left out, once a step without it has run.

        Args:
            error: Of the first step.
        """
        operation = _UNSUPPORTED.search(str(error))
        if isinstance(error, NotCompiledError):
            reason = str(error)
        else:
            reason = f"it cannot compile {operation[1]}" if operation else excerpt(str(error).strip(), 200)
        _say(self._model, reason)
