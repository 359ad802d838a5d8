"""Metric states of the replicas of all workers, summed for logs and gathered for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.engines.replicas.replica_states import summed_variables
from tfpar.engines.workers.collectives import Group
from tfpar.reduction import metric_logs


class MetricSums:
    """Reduces metric states over all workers; every replica holds a term of each sum.

    Args:
        strategy: The `tf.distribute` strategy of the replicas.
        hosts: A device of each worker.
        first_replica: Number of the first local replica.
        num_replicas: Number of replicas, on all workers together.
    """

    def __init__(self, strategy: tf.distribute.Strategy, hosts: Group, first_replica: int, num_replicas: int) -> None:
        self._strategy, self._hosts = strategy, hosts
        self._first_replica, self._num_replicas = first_replica, num_replicas

    def results(self, model: keras.Model, kind: str) -> dict[str, tf.Tensor]:
        """Return the logs of steps of a kind over the examples of all workers, without changing any state."""
        variables = summed_variables(model)
        copies = [copy for variable in variables for copy in self._strategy.experimental_local_results(variable.value)]
        before = [copy.read_value() for copy in copies]
        local_sums = [tf.convert_to_tensor(variable.value) for variable in variables]
        for variable, total in zip(variables, self._hosts.all_reduce_many(local_sums), strict=True):
            self.assign_local_sum(variable, total)
        results: dict[str, tf.Tensor] = tf.nest.map_structure(tf.identity, metric_logs.results(model, kind))
        for copy, value in zip(copies, before, strict=True):
            copy.assign(value)
        return results

    def all_gather(self, states: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the states of the replicas of all workers.

        Args:
            states: States of this worker's replicas, `[local replicas, ...]` each.
        """
        rows = [np.zeros((self._num_replicas, *state.shape[1:]), state.dtype) for state in states]
        for row, state in zip(rows, states, strict=True):  # the rows of other workers are zero, so the sum is a gather
            row[self._first_replica : self._first_replica + len(state)] = state
        return [total.numpy() for total in self._hosts.all_reduce_many(list(map(tf.constant, rows)))]

    def assign_local_sum(self, variable: keras.Variable, value: Any) -> None:
        """Set the states of this worker's replicas so that their sum is `value`."""
        first, *others = self._strategy.experimental_local_results(variable.value)
        first.assign(value)
        for other in others:
            other.assign(tf.zeros_like(other))
