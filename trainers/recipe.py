"""What all trainer classes share: the optimizer, the weight penalty and the precision of a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from tfpar import config
from tfpar.messages.received import excerpt, quoted
from tfpar.messages.suggestions import did_you_mean

# Sections and keys of a run that all trainer classes read; each lists other keys of [model] itself.
READS = ("seed", "data", "training", "optimizer", "model.name", "model.l1", "model.l2", "model.dropout")


def build_optimizer(run: config.Run) -> keras.optimizers.Optimizer:
    """Build the Keras optimizer of a run, with clipping, gradient accumulation and EMA.

    Args:
        run: The run, whose `optimizer` and `training` sections are read.

    Raises:
        ValueError: If Keras has no such optimizer, or the optimizer no such setting.

    Example:
        >>> build_optimizer(config.load(None, ["optimizer.name=sgd", "optimizer.settings.momentum=0.9"])).momentum
        0.9
    """
    training, settings = run.training, dict(run.optimizer.settings)
    if training.gradient_accumulation_steps > 1:
        settings["gradient_accumulation_steps"] = training.gradient_accumulation_steps
    for name in ("clipnorm", "global_clipnorm", "clipvalue"):
        if getattr(training, name) is not None:
            settings[name] = getattr(training, name)
    if training.ema_momentum is not None:
        settings |= {"use_ema": True, "ema_momentum": training.ema_momentum}
        if training.ema_overwrite_frequency is not None:
            settings["ema_overwrite_frequency"] = training.ema_overwrite_frequency
    # Not keras.optimizers.get, which lacks Lamb in Keras 3.15.
    classes = {name.lower(): value for name, value in vars(keras.optimizers).items() if _is_optimizer(value)}
    if run.optimizer.name.lower() not in classes:
        raise ValueError(
            f"optimizer.name must be that of a Keras optimizer, received {quoted(run.optimizer.name)}."
            f"{did_you_mean(run.optimizer.name, classes)}"
        )
    try:
        optimizer = classes[run.optimizer.name.lower()](learning_rate=run.optimizer.learning_rate, **settings)
        _check_numbers(optimizer, run.optimizer.settings)
        return optimizer
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"optimizer.name and optimizer.settings must be those of a Keras optimizer, received "
            f"{quoted(run.optimizer.name)} with {quoted(settings)}. Keras says: {excerpt(str(error).splitlines()[0])}"
        ) from error


def _is_optimizer(value: Any) -> bool:
    """Return whether a value is the class of an optimizer, except the base class and wrappers of other optimizers."""
    base = keras.optimizers.Optimizer
    is_class = isinstance(value, type) and issubclass(value, base)
    return is_class and value.update_step is not base.update_step


def _check_numbers(optimizer: keras.optimizers.Optimizer, settings: Mapping[str, Any]) -> None:
    """Raise an error if a number is text, which Keras notices only during the first step."""
    for name, parameter in inspect.signature(type(optimizer)).parameters.items():
        if isinstance(parameter.default, int | float) and isinstance(settings.get(name), str):
            raise ValueError(f"{name} is a number such as {parameter.default}.")


def build_penalty(settings: config.Model) -> keras.regularizers.Regularizer | None:
    """Return the L1 and L2 penalty on kernels; None if both are 0."""
    return keras.regularizers.L1L2(settings.l1, settings.l2) if settings.l1 or settings.l2 else None


def set_precision(precision: str) -> None:
    """Build later models in `precision`, a Keras dtype policy."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
