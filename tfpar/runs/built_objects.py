"""Descriptions of a model's precision and optimizer."""

from __future__ import annotations

from typing import Any

import keras


def describe_precision(model: keras.Model) -> str:
    """Return the dtype policies of the layers with weights, the most frequent first.

    Example:
        >>> describe_precision(keras.Sequential([keras.layers.Dense(1, dtype="mixed_bfloat16")]))
        'mixed_bfloat16'
    """
    names = [layer.dtype_policy.name for layer in layers(model) if layer.variables or not layer.built]
    counts = {name: names.count(name) for name in names}
    return " and ".join(sorted(counts, key=lambda name: -counts[name])) or model.dtype_policy.name


def layers(model: keras.Model) -> list[keras.Layer]:
    """Return the innermost layers, in the order of the model.

    Example:
        >>> [layer.name for layer in layers(keras.Sequential([keras.layers.Dense(1, name="scores")]))]
        ['scores']
    """
    innermost = [layer for child in model.layers for layer in (layers(child) if hasattr(child, "layers") else [child])]
    return innermost or [model]


def describe_optimizer(model: keras.Model) -> str:
    """Describe the optimizer of a compiled model, with its settings that change gradients.

    Example:
        >>> model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
        >>> describe_optimizer(model)
        'SGD, learning_rate 0.1, clipnorm 1'
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    settings = optimizer.get_config()
    words = [type(optimizer).__name__, f"learning_rate {_rate(settings.get('learning_rate'))}"]
    for key in ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps"):
        if settings.get(key):
            words.append(f"{key} {settings[key]:g}")
    if settings.get("use_ema"):
        words.append(f"ema_momentum {settings['ema_momentum']:g}")
    if optimizer is not model.optimizer:
        words.append("dynamic loss scaling")
    if model.jit_compile:
        words.append("XLA")
    return ", ".join(words)


def _rate(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else f"from {value['class_name']}"
