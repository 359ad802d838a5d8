"""Objectives: several losses, each with the layers that it trains, as in a GAN or a contrastive model.

    batch ──► discriminator loss ──► all-reduce of gradients ──► its optimizer ──► generator loss ──► …

A model with a method `objectives` minimizes these losses in place of the loss of `compile`. A strategy runs them one
after another in each step: it computes the loss of the per-replica batch, reduces it and updates the weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_metrics, keras_model
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

    A model's method `objectives` returns a list of them. It replaces an overridden `train_step`, which computes losses
    and updates on one device: the strategy reduces the losses and gradients between the two.

    Args:
        name: The name in the logs. If the model has a `keras.metrics.Mean` of this name, it averages the loss. The
            entry "loss" is the sum of all objectives.
        loss: Takes a batch, as `keras.Model.train_step` does, and whether the model trains. Returns one value per
            example, `[batch, ...]`, and their mean is minimized; or a pair (sum, weight) of scalars, and the quotient
            of their totals over the batch is minimized. A loss that compares examples uses `tfpar.gather`.
        layers: The layer or layers that it trains; None for the whole model.
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
    """Return the objectives of a model, in their order; an empty list for a model without them.

    Args:
        model: Any model.

    Raises:
        TypeError: If its method `objectives` does not return a list of `Objective`.
        ValueError: If the list is empty, or two objectives have the same name.
    """
    method = getattr(model, "objectives", None)
    if not callable(method):
        return []
    found = method()
    if not isinstance(found, list | tuple) or not all(isinstance(one, Objective) for one in found):
        raise TypeError(f"{type(model).__name__}.objectives must return a list of tfpar.Objective, received {found!r}.")
    names = [one.name for one in found]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"{type(model).__name__}.objectives must return at least one objective, with different names, "
            f"received the names {names}."
        )
    return list(found)


def has_objectives(model: keras.Model) -> bool:
    """Return whether a model has objectives.

    Args:
        model: Any model.

    Raises:
        ValueError: If every call of its method `objectives` creates new optimizers, without the earlier state.
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
    """Return the weights that an objective trains, without duplicates."""
    layers = [model] if objective.layers is None else _listed(objective.layers)
    return list({id(weight): weight for layer in layers for weight in layer.trainable_variables}.values())


def updates_of(model: keras.Model) -> list[tuple[Any, list[keras.Variable]]]:
    """Return the optimizers of a model, each with the weights that it trains.

    Args:
        model: A compiled model, with or without objectives, or with a `train_step` of its own that has run once.
    """
    found: dict[int, tuple[Any, dict[int, keras.Variable]]] = {}
    for objective in objectives_of(model):
        optimizer = optimizer_of(model, objective)
        _, weights = found.setdefault(id(optimizer), (optimizer, {}))
        weights.update({id(weight): weight for weight in trained_by(model, objective)})
    if not found:
        return own_step.updates_of(model) or [(model.optimizer, model.trainable_variables)]
    return [(optimizer, list(weights.values())) for optimizer, weights in found.values()]


def counts_steps(model: keras.Model) -> bool:
    """Return whether the step must increment `iterations` of the optimizer of `compile`, which trains no weights."""
    return all(optimizer is not model.optimizer for optimizer, _ in updates_of(model))


def build(
    model: keras.Model,
    batch: Any,
    creating_slots: Callable[[keras.Model], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Create the variables that need data: weights, optimizer slots, and a metric for each objective.

    Args:
        model: A compiled model with objectives; runs inside the strategy's scope.
        batch: A global batch.
        creating_slots: Returns the context in which the optimizers of the model create their slots.
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
    held = keras_metrics.held_metrics(model)
    return next((one for one in held if isinstance(one, keras.metrics.Mean) and one.name == objective.name), None)


def loss_of(objective: Objective, batch: Any, training: bool, counts: BatchWeights) -> tf.Tensor:
    """Compute an objective's loss over the global batch, a scalar with the gradient of the per-replica batch.

    Args:
        objective: The objective.
        batch: The per-replica batch.
        training: Whether the model trains.
        counts: The numbers of examples in the per-replica batch and in the global batch.

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
    """Compute an objective's loss, a scalar, and the gradient of each weight that it trains.

    Args:
        model: A built and compiled model.
        objective: One of its objectives.
        batch: The per-replica batch.
        counts: The numbers of examples in the per-replica batch and in the global batch.
    """
    loss, gradients = loss_and_gradients(model, objective, batch, counts)
    return loss, after_reads(gradients, loss, keras_model.recomputes(model))


def loss_and_gradients(
    model: keras.Model, objective: Objective, batch: Any, counts: BatchWeights
) -> tuple[tf.Tensor, list[Any]]:
    """Do what `forward_backward` does, for a caller that reduces the gradients and then calls `after_reads`."""
    with tf.GradientTape() as tape:
        loss = loss_of(objective, batch, True, counts)
        scaled = optimizer_of(model, objective).scale_loss(loss)
    return loss, tape.gradient(scaled, [weight.value for weight in trained_by(model, objective)])


def count(model: keras.Model, losses: Sequence[tf.Tensor], num_examples: tf.Tensor) -> tf.Tensor:
    """Update the metrics of the objectives with the losses of a step; return their sum, the log entry "loss".

    Args:
        model: A built and compiled model with objectives.
        losses: The losses of its objectives over the global batch, scalars.
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
    """Refuse objectives in which the loss of one example depends on the others without `tfpar.gather`.

    Inside of the check `tfpar.gather` returns the examples of both parts. A loss with random numbers that are not from
    Keras or TensorFlow is not checked.

    Args:
        model: A built and compiled model with objectives.
        batch: A global batch of at least one example.

    Raises:
        ValueError: If the values of two parts of the batch differ from the values of both together.
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
                f"The loss of an objective must not depend on which other examples a replica has, and the values of "
                f"{objective.name!r} on two parts of a batch are not those on both. Take what compares examples from "
                "tfpar.gather, or train on SingleDevice()."
            )


def _close(values: Any, others: Any) -> bool:
    pairs = zip(tf.nest.flatten(values), tf.nest.flatten(others), strict=True)
    return all(
        one.shape == other.shape and bool(tf.reduce_all(tf.abs(one - other) <= 1e-3 * (tf.abs(one) + 1e-6)))
        for one, other in pairs
    )
