"""Objectives: several losses, each of which trains some layers, as in a GAN or a contrastive model.

    batch ──► discriminator loss ──► all-reduce of gradients ──► its optimizer ──► generator loss ──► …

A model with a method `objectives` minimizes these losses instead of the loss of `compile`. In each step a strategy runs
them one after another: it computes the loss of the per-replica batch, reduces it and updates the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_metrics
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.random_numbers import random_state
from tfpar.reduction import own_step
from tfpar.reduction.gradients.update_order import after_reads
from tfpar.reduction.losses import BatchWeights, mean_of_sums, reduce_loss
from tfpar.reduction.restored_model import restored, unchanged
from tfpar.reduction.whole_batch import Recording

Loss = Callable[[Any, bool], Any]
_EXAMPLES = "one value per example, [batch, ...], or a pair (sum, weight) of scalars"


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """A loss, the layers that it trains and their optimizer.

    A model's method `objectives` returns a list of them, in place of an overridden `train_step`. Between the losses and
    the updates, the strategy reduces losses and gradients over the devices.

    Args:
        name: Name in the logs. A `keras.metrics.Mean` of the model with this name averages the loss. The log "loss" is
            the sum of all objectives.
        loss: Function `(batch, training)`; `batch` is what `keras.Model.train_step` takes. It returns one value per
            example, `[batch, ...]`, whose mean is minimized; or a pair of scalars `(sum, weight)`, and the sum over the
            batch divided by the weight is minimized. A loss that compares examples uses `tfpar.gather`.
        layers: The layer or layers to train; None for the whole model.
        optimizer: The optimizer of these layers; None for the optimizer of `compile`.

    Raises:
        TypeError: If an argument has the wrong type.

    Example:
        >>> class Autoencoder(keras.Model):
        ...     def objectives(self):
        ...         return [tfpar.Objective("loss", self.squared_errors)]
        ...
        ...     def squared_errors(self, images, training):
        ...         return keras.ops.square(self(images, training=training) - images)
    """

    name: str
    loss: Loss
    layers: keras.Layer | Sequence[keras.Layer] | None = None
    optimizer: keras.Optimizer | None = None

    def __post_init__(self) -> None:
        """Check the types of the arguments."""
        layers = [] if self.layers is None else _listed(self.layers)
        kinds = {
            "name": ("a string", isinstance(self.name, str)),
            "loss": ("a function of (batch, training)", callable(self.loss)),
            "layers": ("Keras layers", all(isinstance(layer, keras.Layer) for layer in layers)),
            "optimizer": ("a Keras optimizer", isinstance(self.optimizer, keras.Optimizer | None)),
        }
        for argument, (kind, is_right) in kinds.items():
            if not is_right:
                received = getattr(self, argument)
                raise TypeError(f"The {argument} of a tfpar.Objective must be {kind}, received {received!r}.")


def _listed(layers: Any) -> list[Any]:
    return list(layers) if isinstance(layers, list | tuple) else [layers]


def objectives_of(model: keras.Model) -> list[Objective]:
    """Return the objectives of a model; an empty list for a model without them.

    Raises:
        TypeError: If its method `objectives` does not return a list of `Objective`.
        ValueError: If the list is empty, or two objectives have the same name.
    """
    method = getattr(model, "objectives", None)
    if not callable(method):
        return []
    objectives = method()
    if not isinstance(objectives, list | tuple) or not all(isinstance(item, Objective) for item in objectives):
        raise TypeError(
            f"{type(model).__name__}.objectives must return a list of tfpar.Objective, received {objectives!r}."
        )
    names = [objective.name for objective in objectives]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{type(model).__name__}.objectives must return at least one objective, with different names, "
            f"received the names {names}."
        )
    return list(objectives)


def has_objectives(model: keras.Model) -> bool:
    """Return whether a model has objectives.

    Raises:
        ValueError: If each call of its method `objectives` creates new optimizers, which would lose their state.
    """
    pairs = zip(objectives_of(model), objectives_of(model), strict=True)
    for first, second in pairs:
        if first.optimizer is not second.optimizer:
            raise ValueError(
                f"{type(model).__name__}.objectives must return the same optimizers each time it is called, and that "
                f"of {first.name!r} is a new one. Create it in __init__ or in compile."
            )
    return bool(objectives_of(model))


def optimizer_of(model: keras.Model, objective: Objective) -> Any:
    """Return the optimizer of an objective."""
    return model.optimizer if objective.optimizer is None else objective.optimizer


def trained_by(model: keras.Model, objective: Objective) -> list[keras.Variable]:
    """Return the weights that an objective trains, each once."""
    layers = [model] if objective.layers is None else _listed(objective.layers)
    return list({id(weight): weight for layer in layers for weight in layer.trainable_variables}.values())


def updates_of(model: keras.Model) -> list[tuple[Any, list[keras.Variable]]]:
    """Return each optimizer of a model and the weights that it trains: in objectives, or in a train step of its own."""
    updates: dict[int, tuple[Any, dict[int, keras.Variable]]] = {}
    for objective in objectives_of(model):
        optimizer = optimizer_of(model, objective)
        _, weights = updates.setdefault(id(optimizer), (optimizer, {}))
        weights.update({id(weight): weight for weight in trained_by(model, objective)})
    if not updates:
        return own_step.updates_of(model) or [(model.optimizer, model.trainable_variables)]
    return [(optimizer, list(weights.values())) for optimizer, weights in updates.values()]


def count_step(model: keras.Model) -> None:
    """Count a step in the `iterations` of the optimizer of `compile`, if that trains no weights."""
    if all(optimizer is not model.optimizer for optimizer, _ in updates_of(model)):
        keras_optimizer.count_application(model.optimizer)


def build(
    model: keras.Model,
    batch: Any,
    creating_slots: Callable[[keras.Model], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Create weights, optimizer slots and a metric for each objective, inside the strategy's scope.

    Args:
        model: A compiled model with objectives.
        batch: A global batch.
        creating_slots: Context manager in which the optimizers create their slots.
    """
    objectives = objectives_of(model)
    with random_state.stand_in_generator(), restored(model):
        for objective in objectives:
            _values(objective, data.take_rows(batch, 0, 1), False)
    for optimizer, weights in updates_of(model):
        if not optimizer.built:
            with creating_slots(model):
                optimizer.build(weights)
    for objective in objectives:
        if objective.name != "loss" and tracker_of(model, objective) is None:
            keras_metrics.add_metric(model, keras.metrics.Mean(name=objective.name))


def tracker_of(model: keras.Model, objective: Objective) -> keras.metrics.Mean | None:
    """Return the metric that averages an objective's loss; None if there is none."""
    means = [metric for metric in keras_metrics.held_metrics(model) if isinstance(metric, keras.metrics.Mean)]
    return next((mean for mean in means if mean.name == objective.name), None)


def loss_of(objective: Objective, batch: Any, training: bool, counts: BatchWeights) -> tf.Tensor:
    """Compute an objective's loss over the global batch, a scalar with the gradient of the per-replica batch.

    Args:
        objective: The objective.
        batch: The per-replica batch.
        training: Whether the model trains.
        counts: The sizes of the per-replica and the global batch.

    Raises:
        ValueError: If the loss is a scalar without a weight.
    """
    values = _values(objective, batch, training)
    if isinstance(values, tuple):
        total, weight = values
        return mean_of_sums(total, weight, counts)
    return reduce_loss(values, None, None, "sum_over_batch_size", values.dtype, counts)


def forward_backward(
    model: keras.Model, objective: Objective, batch: Any, counts: BatchWeights
) -> tuple[tf.Tensor, list[Any]]:
    """Compute an objective's scalar loss and the gradient of each weight that it trains.

    Args:
        model: A built and compiled model.
        objective: One of its objectives.
        batch: The per-replica batch.
        counts: The sizes of the per-replica and the global batch.
    """
    loss, gradients = loss_and_gradients(model, objective, batch, counts)
    return loss, after_reads(gradients, loss)


def loss_and_gradients(
    model: keras.Model, objective: Objective, batch: Any, counts: BatchWeights
) -> tuple[tf.Tensor, list[Any]]:
    """Do the same as `forward_backward`, for a caller that reduces the gradients and then calls `after_reads`."""
    with tf.GradientTape() as tape:
        loss = loss_of(objective, batch, True, counts)
        scaled = optimizer_of(model, objective).scale_loss(loss)
    return loss, tape.gradient(scaled, [weight.value for weight in trained_by(model, objective)])


def count(model: keras.Model, losses: Sequence[tf.Tensor], num_examples: tf.Tensor) -> tf.Tensor:
    """Count the losses of a step in the metrics of the objectives; return their sum, the log "loss".

    Args:
        model: A built and compiled model with objectives.
        losses: The scalar loss of each objective over the global batch.
        num_examples: The weight of the losses in the metrics.
    """
    total = tf.add_n([tf.cast(loss, losses[0].dtype) for loss in losses])
    keras_metrics.loss_tracker(model).update_state(total, sample_weight=num_examples)
    for objective, loss in zip(objectives_of(model), losses, strict=True):
        tracker = tracker_of(model, objective)
        if tracker is not None:
            tracker.update_state(loss, sample_weight=num_examples)
    return total


def _values(objective: Objective, batch: Any, training: bool) -> Any:
    """Return the result of the loss function: one value per example, or a tuple (sum, weight)."""
    packed = keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(batch))
    values = objective.loss(packed, training)
    if isinstance(values, tuple | list) and len(values) == 2:
        total, weight = (tf.convert_to_tensor(value) for value in values)
        if total.shape.rank == weight.shape.rank == 0:
            return total, tf.cast(weight, total.dtype)
    elif tf.is_tensor(values) and values.shape.rank != 0:
        return values
    received = getattr(values, "shape", None)
    shape = type(values).__name__ if received is None else f"shape {tuple(received)}"
    raise ValueError(
        f"The loss of an objective must return {_EXAMPLES}, and that of {objective.name!r} returned {shape}. Leave "
        "the mean over the batch to tfpar."
    )


def check(model: keras.Model, batch: Any) -> None:
    """Refuse objectives whose loss of one example depends on others without `tfpar.gather`.

    During the check `tfpar.gather` returns the examples of both parts. A loss that draws random numbers outside Keras
    and TensorFlow is not checked.

    Args:
        model: A built and compiled model with objectives.
        batch: A global batch of at least one example.

    Raises:
        ValueError: If the values on two parts of the batch differ from those on both together.
    """
    num_examples = int(data.num_rows(batch))
    if num_examples < 2:
        return
    first, others = data.take_rows(batch, 0, 1), data.take_rows(batch, 1, min(4, num_examples))
    both = data.join_batches([first, others])
    for objective in objectives_of(model):
        with unchanged(model):
            again, recording = _values(objective, both, False), Recording()
            with recording.recording(int(data.num_rows(both))):
                whole = _values(objective, both, False)
            parts = []
            for start, part in enumerate((first, others)):
                with recording.replaying(start):
                    parts.append(_values(objective, part, False))
        joined = tuple(map(sum, zip(*parts, strict=True))) if isinstance(whole, tuple) else tf.concat(parts, 0)
        if _close(whole, again) and not _close(whole, joined):
            raise ValueError(
                f"The loss of an objective must not depend on the other examples of its replica, but "
                f"{objective.name!r} has other values on two parts of a batch than on both together. Compare examples "
                "through tfpar.gather, or train on SingleDevice()."
            )


def _close(values: Any, others: Any) -> bool:
    pairs = zip(tf.nest.flatten(values), tf.nest.flatten(others), strict=True)
    return all(
        value.shape == other.shape and bool(tf.reduce_all(tf.abs(value - other) <= 1e-3 * (tf.abs(value) + 1e-6)))
        for value, other in pairs
    )
