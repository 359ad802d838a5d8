"""A model's own steps on one device, and what every engine prepares for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.graphs.tf_graph import after_all
from tfpar._compat.models import keras_model
from tfpar._compat.optimizers import keras_own_updates
from tfpar._compat.optimizers.keras_optimizer import one_device_optimizer
from tfpar.reduction import own_step
from tfpar.study.own_steps import rehearse


def prepare(model: keras.Model, kind: str, batch: Any) -> bool:
    """Run an own step once outside of the strategy's scope, so that the variables exist which it creates.

    Returns:
        Whether it ran: after each compilation of the model, and not for a step of Keras.
    """
    step = own_step.step_of(model, kind)
    is_known = step is not None and step.compilation is keras_model.compilation(model)
    if is_known or not own_step.overrides(model, kind):
        return False
    own_step.note(model, kind, rehearse(model, kind, batch))
    return True


def build(
    model: keras.Model,
    kind: str,
    creating_slots: Callable[[keras.Model], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Create the slots of optimizers and the variables for log entries of an own step, inside the strategy's scope."""
    step = own_step.step_of(model, kind)
    if step is None:
        return
    step.logs |= {name: own_step.LastValue(value, name) for name, value in step.values.items() if name not in step.logs}
    for optimizer, variables in step.updates:
        if not optimizer.built:
            with creating_slots(model):
                optimizer.build(variables)


def run(model: keras.Model, kind: str, batch: Any) -> tf.Tensor:
    """Run the own step of a model on a whole batch; return its log entry "loss", a scalar, or zero without one."""

    def update(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        with keras_own_updates.applying():
            optimizer.apply(after_all(gradients), variables)

    with keras_own_updates.updates_through(update), one_device_optimizer():
        logs = own_step.flat_logs(own_step.call(model, kind, batch))
    for name, metric in own_step.last_values(model, kind).items():
        metric.update_state(logs[name])
    return loss_of(logs)


def loss_of(logs: dict[str, Any]) -> tf.Tensor:
    """Return the log entry "loss", a scalar, or zero without one."""
    loss = tf.convert_to_tensor(logs.get("loss", 0.0))
    return loss if loss.shape.rank == 0 else tf.zeros([])
