"""Unbuilt copies of optimizers, even of those without `get_config`. Written for Keras 3.15."""

from __future__ import annotations

from typing import Any

import keras


def optimizer_of_weight(optimizer: keras.Optimizer, weight: keras.Variable) -> keras.Optimizer:
    """Return the optimizer that updates a weight: one of a `MultiOptimizer`, otherwise the optimizer itself.

    Copying a `MultiOptimizer` is no alternative: the copy shares the optimizers that its function returns, and building
    it would build them for other weights (`build` in keras/src/optimizers/multi_optimizer.py).

    Args:
        optimizer: An optimizer, built or not.
        weight: A weight of the model. The function may choose by its path.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return optimizer._optimizer_map(weight)
    return optimizer


def unbuilt_copy(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Return an optimizer with the settings of another and without slots. Its learning rate may differ.

    `get_config` is not always available: a custom optimizer may lack it, and Keras raises NotImplementedError for a
    learning-rate schedule without it (`serialize` in keras/src/optimizers/schedules/learning_rate_schedule.py).

    Args:
        optimizer: An optimizer, built or not.
    """
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except Exception:  # from user code, or for missing constructor arguments
        return _copied(optimizer)


def _copied(optimizer: keras.Optimizer) -> keras.Optimizer:
    copy = object.__new__(type(optimizer))
    keras.Optimizer.__init__(copy, learning_rate=0.001, name=optimizer.name)
    # The base class has public settings and private state, except `built`; the copy has a state of its own.
    own_state = {name for name in vars(copy) if name.startswith("_")} | {"built"}
    for name, value in vars(optimizer).items():
        if name not in own_state:
            vars(copy)[name] = _without_slots(value)
    return copy


def _without_slots(value: Any) -> Any:
    """Copy lists and inner optimizers, which `build` of a copy would change for both; leave out slots in lists."""
    if isinstance(value, keras.Optimizer):
        return unbuilt_copy(value)
    if isinstance(value, list):
        return [_without_slots(item) for item in value if not isinstance(item, keras.Variable)]
    if isinstance(value, dict):
        return {key: _without_slots(item) for key, item in value.items() if not isinstance(item, keras.Variable)}
    return value
