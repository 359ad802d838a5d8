"""What the trainer classes share: the optimizer, the penalty and the precision that a run asks for."""

from __future__ import annotations

import keras

from tfpar import config


def build_optimizer(run: config.Run) -> keras.optimizers.Optimizer:
    """Build the optimizer of a run: any Keras optimizer by name and settings, with clipping, accumulation and EMA.

    Args:
        run: The run; its `optimizer` and `training` sections are read.

    Raises:
        ValueError: If Keras knows no such optimizer, or the optimizer no such setting.

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
    try:
        return keras.optimizers.get(
            {
                "class_name": run.optimizer.name,
                "config": {"learning_rate": run.optimizer.learning_rate, **settings},
            }
        )
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"optimizer.name and optimizer.settings must be those of a Keras optimizer, received "
            f"{run.optimizer.name!r} with {settings}. Keras says: {str(error).splitlines()[0]}"
        ) from error


def build_penalty(settings: config.Model) -> keras.regularizers.Regularizer | None:
    """Return the L1 and L2 penalty on kernels, None without one."""
    return keras.regularizers.L1L2(settings.l1, settings.l2) if settings.l1 or settings.l2 else None


def set_precision(precision: str) -> None:
    """Let the models built from now on compute in `precision`, a Keras dtype policy."""
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)
