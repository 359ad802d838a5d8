"""A model's own steps on one device, and what every engine prepares for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.graphs.tf_graph import after_all
from tfpar._compat.optimizers import keras_own_updates
from tfpar._compat.optimizers.keras_optimizer import one_device_optimizer
from tfpar.per_model import PerModel
from tfpar.reduction import own_step
from tfpar.study.own_steps import Rehearsal, rehearse


def prepare(model: keras.Model, kind: str, batch: Any) -> None:
    """Run an own step once outside of the strategy's scope, so that the variables exist which it creates."""
    if own_step.overrides(model, kind):
        _REHEARSALS[model] = rehearse(model, kind, batch)


def build(
    model: keras.Model,
    kind: str,
    creating_slots: Callable[[keras.Model], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Create the slots of optimizers and the variables for log entries of an own step, inside the strategy's scope."""
    rehearsal, before = _REHEARSALS[model], own_step.last_values(model, kind)
    values = {name: before.get(name) or own_step.LastValue(value, name) for name, value in rehearsal.values.items()}
    own_step.note(model, kind, own_step.OwnStep(rehearsal.updates, {**rehearsal.results, **values}))
    for optimizer, variables in rehearsal.updates:
        if not optimizer.built:
            with creating_slots(model):
                optimizer.build(variables)


_REHEARSALS: PerModel[Rehearsal] = PerModel()


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
