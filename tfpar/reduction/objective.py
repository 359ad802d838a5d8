"""Objectives: losses of the user's own, each with the weights that it trains, as in a GAN or a contrastive model.

    batch ──► discriminator's loss ──► its gradients, summed ──► its optimizer ──► generator's loss ──► …

A model with a method `objectives` trains by them instead of by one loss of its outputs. A strategy runs them one after
the other in one step: a loss over the examples at hand, one division by the whole batch, one update of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model, keras_objectives, random_state
from tfpar.reduction.losses import BatchWeights, mean_of_sums, reduce_loss
from tfpar.reduction.sum_or_mean import restored, unchanged
from tfpar.reduction.update_order import after_reads
from tfpar.reduction.whole_batch import Trial

Loss = Callable[[Any, bool], Any]
_EXAMPLES = "one value per example, [batch, ...], or a pair (sum, weight) of scalars"


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
    """A loss, the layers that it trains and their optimizer; what a model's method `objectives` returns a list of.

    Keras models with a `train_step` of their own say in it how a loss becomes an update. Over several replicas the loss
    of a part, its share of the whole batch and the sum of the gradients come in between, so the model gives the parts
    that are its own and the strategy does the rest.

    Args:
        name: The name in the logs. A `keras.metrics.Mean` of this name that the model holds counts the loss; "loss" is
            the entry of the whole step, the sum of all objectives.
        loss: Takes a batch, as `keras.Model.train_step` does, and whether the model trains. Returns one value per
            example, `[batch, ...]`, whose mean is minimized, or a pair (sum, weight) of scalars, whose quotient over
            the whole batch is. What compares examples takes them from `tfpar.gather`.
        layers: The layer or layers that it trains; None for the whole model.
        optimizer: Theirs; None for the one of `compile`.

    Raises:
        TypeError: If an argument is of another kind.

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
        """Check the kinds of the arguments."""
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
    """Return the objectives of a model, in their order; none for a model that trains by the loss of `compile`.

    Args:
        model: Any model.

    Raises:
        TypeError: If its method `objectives` returns something else.
        ValueError: If it returns none, or two have the same name.
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
            f"{type(model).__name__}.objectives must return at least one objective, each with a name of its own, "
            f"received {names}."
        )
    return list(found)


def has_objectives(model: keras.Model) -> bool:
    """Say whether a model trains by objectives.

    Args:
        model: Any model.

    Raises:
        ValueError: If its method `objectives` makes an optimizer each time it is called, whose state would be lost.
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
    """Return every optimizer of a model with the weights that it trains.

    Args:
        model: A compiled model, with or without objectives.
    """
    found: dict[int, tuple[Any, dict[int, keras.Variable]]] = {}
    for objective in objectives_of(model):
        optimizer = optimizer_of(model, objective)
        _, weights = found.setdefault(id(optimizer), (optimizer, {}))
        weights.update({id(weight): weight for weight in trained_by(model, objective)})
    if not found:
        return [(model.optimizer, model.trainable_variables)]
    return [(optimizer, list(weights.values())) for optimizer, weights in found.values()]


def counts_steps(model: keras.Model) -> bool:
    """Say whether the optimizer of `compile` trains nothing, and so counts steps only if a step says so."""
    return all(optimizer is not model.optimizer for optimizer, _ in updates_of(model))


def build(model: keras.Model, batch: Any) -> None:
    """Create what waits for data: weights, slots of all optimizers, and a metric for each objective.

    Args:
        model: A compiled model with objectives; runs inside the strategy's scope.
        batch: A global batch.
    """
    objectives = objectives_of(model)
    with random_state.stand_in_generator(), restored(model):
        for objective in objectives:
            _values(objective, data.take_rows(batch, 0, 1), False)
    for optimizer, weights in updates_of(model):
        if not optimizer.built:
            optimizer.build(weights)
    for objective in objectives:
        if objective.name != "loss" and tracker_of(model, objective) is None:
            keras_objectives.add_metric(model, keras.metrics.Mean(name=objective.name))


def tracker_of(model: keras.Model, objective: Objective) -> keras.metrics.Mean | None:
    """Return the metric that counts an objective's loss."""
    held = keras_objectives.held_metrics(model)
    return next((one for one in held if isinstance(one, keras.metrics.Mean) and one.name == objective.name), None)


def loss_of(objective: Objective, batch: Any, training: bool, counts: BatchWeights) -> tf.Tensor:
    """Compute an objective's loss over the whole batch, a scalar; its gradient is that of the examples at hand.

    Args:
        objective: The objective.
        batch: The examples at hand.
        training: Whether the model trains.
        counts: How many examples there are, here and in all.

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
        batch: The examples at hand.
        counts: How many examples there are, here and in all.
    """
    with tf.GradientTape() as tape:
        loss = loss_of(objective, batch, True, counts)
        scaled = optimizer_of(model, objective).scale_loss(loss)
    gradients = tape.gradient(scaled, [weight.value for weight in trained_by(model, objective)])
    return loss, after_reads(gradients, loss, keras_model.recomputes(model))


def count(model: keras.Model, losses: Sequence[tf.Tensor], num_examples: tf.Tensor) -> tf.Tensor:
    """Count the losses of a step in the metrics of the objectives; return their sum, which is the log entry "loss".

    Args:
        model: A built and compiled model with objectives.
        losses: Of its objectives over the whole batch, scalars.
        num_examples: How many examples they count.
    """
    total = tf.add_n([tf.cast(loss, losses[0].dtype) for loss in losses])
    keras_model.loss_tracker(model).update_state(total, sample_weight=num_examples)
    for objective, loss in zip(objectives_of(model), losses, strict=True):
        tracker = tracker_of(model, objective)
        if tracker is not None:
            tracker.update_state(loss, sample_weight=num_examples)
    return total


def _values(objective: Objective, batch: Any, training: bool) -> Any:
    """Return what the loss function gives: values of examples, or a tuple (sum, weight)."""
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
    """Refuse objectives whose value for one example depends on the others in a way that parts would not show.

    What draws other numbers in each run, and not by functions of Keras or TensorFlow, is not checked. What a loss takes
    from `tfpar.gather` is that of both parts.

    Args:
        model: A built and compiled model with objectives.
        batch: A global batch of at least one example.

    Raises:
        ValueError: If the values of two parts of the batch are not those of both together.
    """
    num_examples = int(data.num_rows(batch))
    if num_examples < 2:
        return
    first, others = data.take_rows(batch, 0, 1), data.take_rows(batch, 1, min(4, num_examples))
    both = data.join_batches([first, others])
    for objective in objectives_of(model):
        with unchanged(model):
            again, trial = _values(objective, both, False), Trial()
            with trial.recording():
                whole = _values(objective, both, False)
            parts = []
            for start, part in enumerate((first, others)):
                with trial.replaying(start):
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
