"""A model's own `train_step`, `test_step` and `predict_step`, and how parts of a batch give what one computes.

    loss, gradients     whole = mean of the parts, weighted by their examples, or their sum
    a counter, an EMA   whole = each part
    a metric's state    whole = sum of what the parts add, or their mean, as for a loss

A study finds out which it is, before the first step (see `tfpar.study.own_steps`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar._compat.models import keras_losses_in_call, keras_model
from tfpar.per_model import PerModel
from tfpar.reduction.partial_sums import sums_of

Relation = Literal["equal", "mean", "sum"]
METHODS = {"train": "train_step", "evaluate": "test_step", "predict": "predict_step"}


@dataclasses.dataclass(frozen=True)
class PartsOfStep:
    """How the parts of a batch give what an own step computes for all of it.

    Args:
        updates: For each update, in the order of the step, the relation of each gradient; None for no gradient.
        states: The number of each variable of the model's state whose parts are not equal, with its relation.
        logs: The relation of each log entry that is no result of a metric, by its name.
    """

    updates: tuple[tuple[Relation | None, ...], ...] = ()
    states: tuple[tuple[int, Relation], ...] = ()
    logs: tuple[tuple[str, Relation], ...] = ()

    def to_json(self) -> str:
        """Return this as JSON, for the other workers.

        Example:
            >>> parts = PartsOfStep(updates=(("mean", None),), states=((3, "sum"),))
            >>> PartsOfStep.of_json(parts.to_json()) == parts
            True
        """
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_json(cls, text: str) -> PartsOfStep:
        """Return what another worker has found."""
        values = json.loads(text)
        return cls(
            tuple(map(tuple, values["updates"])),
            tuple((number, relation) for number, relation in values["states"]),
            tuple((name, relation) for name, relation in values["logs"]),
        )


def overrides(model: keras.Model, kind: str) -> bool:
    """Return whether a model runs a step of its own.

    Args:
        model: Any model. The objectives of a model replace its `train_step` and `test_step`.
        kind: "train", "evaluate" or "predict".
    """
    has_objectives = kind != "predict" and callable(getattr(model, "objectives", None))
    return not has_objectives and keras_model.overridden(model, METHODS[kind])


def call(model: keras.Model, kind: str, batch: Any) -> Any:
    """Run a model's own step on a batch, in the structure in which the data yields it."""
    return getattr(model, METHODS[kind])(batch)


def masked_loss(loss: Sequence[Any], sum_weights: Callable[[tf.Tensor], tf.Tensor], fraction: Any) -> Any:
    """Return a masked loss of a part, so that the mean over the parts by their examples is that of the batch.

    Its divisor is the number of examples that the mask keeps, in the whole batch.

    Args:
        loss: The arguments of Keras' reduction: values, sample weight, mask, reduction and dtype.
        sum_weights: Returns the sum of a divisor over all parts.
        fraction: The fraction of the batch that is in the part.
    """
    sums = None if loss[3] == "sum" else sums_of(loss)
    if sums is None:
        return keras_losses_in_call.reduce_of_these(*loss)
    total, weight = sums
    return tf.math.divide_no_nan(total, sum_weights(weight) * tf.cast(fraction, total.dtype))


class LastValue(keras.metrics.Metric):
    """The value of a log entry in the last step, as the sum of what each replica gives.

    Args:
        like: A tensor of its type and shape. Integers and booleans become floats, as in Keras' logs.
        name: Of the entry.
    """

    def __init__(self, like: tf.Tensor, name: str) -> None:
        super().__init__(name=name, dtype=like.dtype.name if like.dtype.is_floating else "float64")
        self._value = self.add_variable(tuple(like.shape), "zeros", self.dtype, name="value")

    def update_state(self, value: Any) -> None:
        """Set what the calling replica gives."""
        self._value.assign(tf.cast(value, self.dtype))

    def result(self) -> Any:
        """Return the value."""
        return tf.convert_to_tensor(self._value.value)


@dataclasses.dataclass
class OwnStep:
    """What one run of an own step has shown.

    Attributes:
        updates: The optimizers that the step runs, each with the weights that it updates.
        logs: The metric of each log entry by its name: one of the model, or a `LastValue`.
        values: The values of entries that no metric of the model has, for which `LastValue` metrics are created.
        compilation: The compilation of the model with which it ran.
    """

    updates: list[tuple[Any, list[keras.Variable]]]
    logs: dict[str, keras.Metric]
    values: dict[str, tf.Tensor]
    compilation: Any


_STEPS: PerModel[dict[str, OwnStep]] = PerModel()


def note(model: keras.Model, kind: str, step: OwnStep) -> None:
    """Note what a run of an own step has shown, for the steps of its kind."""
    _STEPS.setdefault(model, {})[kind] = step


def step_of(model: keras.Model, kind: str) -> OwnStep | None:
    """Return what `note` was given last; None for a step of Keras."""
    return (_STEPS.get(model) or {}).get(kind) if overrides(model, kind) else None


def updates_of(model: keras.Model) -> list[tuple[Any, list[keras.Variable]]]:
    """Return the optimizers that the own train step of a model runs, each with the weights that it updates."""
    step = step_of(model, "train")
    return [] if step is None else step.updates


def last_values(model: keras.Model, kind: str) -> dict[str, LastValue]:
    """Return the log entries of an own step that are no results of metrics, by name."""
    step = step_of(model, kind)
    metrics = {} if step is None else step.logs
    return {name: metric for name, metric in metrics.items() if isinstance(metric, LastValue)}


def all_last_values(model: keras.Model) -> list[LastValue]:
    """Return the log entries of all own steps of a model that are no results of metrics."""
    return [metric for kind in METHODS for metric in last_values(model, kind).values()]


def results(model: keras.Model, kind: str) -> dict[str, Any] | None:
    """Return the logs of the own steps of a kind; None for a step of Keras, or one that logs nothing."""
    step = step_of(model, kind)
    return None if step is None or not step.logs else {name: metric.result() for name, metric in step.logs.items()}


def flat_logs(logs: Any) -> dict[str, Any]:
    """Return the entries that a step returns, each under its name; none for a step that returns no dict."""
    if not isinstance(logs, dict):
        return {}
    entries: dict[str, Any] = {}
    for name, value in logs.items():
        entries |= flat_logs(value) if isinstance(value, dict) else {str(name): value}
    return entries
