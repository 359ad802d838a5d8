"""A model's own step on replicas: every replica runs it on its part, and what parts change becomes that of the whole.

    replica 0   step on rows 0 1 ── gradients ──┐                ┌─ update ── … ── metrics, states, logs
                                                ├─ scaled, added ┤
    replica 1   step on rows 2 3 ── gradients ──┘                └─ update ── … ── metrics, states, logs

A gradient that is a mean over examples is scaled by the replica's fraction of the batch before the sum. The optimizer
acts on the sums, with clipping, accumulation and loss scaling, as in every other step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar._compat.graphs.tf_graph import after_all
from tfpar._compat.models import keras_losses
from tfpar._compat.optimizers import keras_own_updates
from tfpar._compat.variables import keras_variables
from tfpar.engines.replicas.gradient_sums import ReplicaGradients
from tfpar.engines.replicas.replica_runs import ReplicaRuns
from tfpar.reduction import own_step
from tfpar.reduction.own_step import PartsOfStep, Relation
from tfpar.reduction.replicas import local_replica_id, replica_id, sum_without_gradient


class _Replica:
    """What one replica needs while it runs the step.

    Args:
        example_weight: The weight of an example in losses.
        num_counted: The number of the replica's examples to count.
        fraction: Their fraction of the global batch.
    """

    def __init__(self, example_weight: tf.Tensor, num_counted: tf.Tensor, fraction: tf.Tensor) -> None:
        self.example_weight, self.num_counted = example_weight, num_counted
        self.fraction = fraction
        self._weights = {"mean": fraction, "sum": tf.cast(num_counted > 0, fraction.dtype)}
        self.num_updates = 0

    def weighted(self, value: Any, relation: Relation | None) -> Any:
        """Return the term of a value in the sum over all replicas."""
        if value is None:
            return None
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.weighted(value.values, relation), value.indices, value.dense_shape)
        tensor = tf.convert_to_tensor(value)
        weight = self._weights["sum" if relation == "sum" else "mean"]
        if tensor.dtype.is_floating or tensor.dtype.is_complex or relation == "sum":
            return tensor * tf.cast(weight, tensor.dtype)
        return tensor if replica_id() == 0 else tf.zeros_like(tensor)  # whole numbers have a mean if all are equal


class ReplicaStep:
    """An own step of a model, on replicas.

    Args:
        model: The model.
        kind: "train" or "evaluate".
        parts: How parts of a batch give what the step computes for all of it.
        sum_gradients: Sums the gradients of a replica over all, in replica context.
        apply: Applies an optimizer of the model to weights with their reduced gradients, in cross-replica context.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        parts: PartsOfStep,
        sum_gradients: Callable[[keras.Model, ReplicaGradients], list[Any]],
        apply: Callable[[keras.Model, Any, Sequence[keras.Variable], Any], None],
    ) -> None:
        self._model, self._kind, self._parts = model, kind, parts
        self._sum_gradients, self._apply = sum_gradients, apply
        state = keras_variables.state(model)
        self._states = [(state[number], relation) for number, relation in parts.states]
        self._replicas: dict[int, _Replica] = {}

    def run(self, runs: ReplicaRuns, batch: Any) -> tf.Tensor:
        """Run the step on the parts of a global batch; return zero: the logs have the loss."""
        with (
            keras_own_updates.updates_through(self._update),
            keras_losses.masked_losses(self._masked_loss),
            tf_distribute.assigning_own_copies(),
        ):
            runs.run_alone(self._model, self._on_replica, batch)
        return tf.zeros([])

    def _on_replica(
        self, part: Any, num_counted: tf.Tensor, fraction: tf.Tensor, example_weight: tf.Tensor
    ) -> tf.Tensor:
        replica = self._replicas[local_replica_id()] = _Replica(example_weight, num_counted, fraction)
        before = [tf.identity(variable.value) for variable, _ in self._states]
        logs = own_step.flat_logs(own_step.call(self._model, self._kind, part))
        for (variable, relation), old in zip(self._states, before, strict=True):
            change = replica.weighted(tf.convert_to_tensor(variable.value) - old, relation)
            is_metric = tf_distribute.is_summed_on_read(variable)
            variable.assign(old + (change if is_metric else sum_without_gradient(change)))
        relations = dict(self._parts.logs)
        for name, metric in own_step.last_values(self._model, self._kind).items():
            value = tf.cast(logs[name], metric.dtype)
            metric.update_state(replica.weighted(value, relations.get(name)))
        return tf.zeros([])

    def _masked_loss(self, *loss: Any) -> Any:
        replica = self._replicas[local_replica_id()]
        sum_weights = lambda weight: sum_without_gradient(replica.weighted(weight, "sum"))  # noqa: E731
        return own_step.masked_loss(loss, sum_weights, replica.fraction)

    def _update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Update variables with the gradients of all replicas, in replica context."""
        replica = self._replicas[local_replica_id()]
        number = replica.num_updates
        replica.num_updates += 1
        relations = self._parts.updates[number] if self._parts.updates else [None] * len(gradients)
        terms = [replica.weighted(*pair) for pair in zip(gradients, relations, strict=True)]
        sums = self._sum_gradients(
            self._model,
            ReplicaGradients(terms, variables, (), replica.example_weight, replica.num_counted, number),
        )

        def apply(_: tf.distribute.Strategy, *sums: Any) -> None:
            with keras_own_updates.applying():
                self._apply(self._model, optimizer, variables, list(sums))

        tf.distribute.get_replica_context().merge_call(apply, args=tuple(after_all(sums)))
