"""Local SGD: every replica updates its own weights, which are averaged every few steps.

    replica 0   step  step  step  step ┐         ┌ step …
                                       ├ average ┤             every=4: one all-reduce of weights for four steps
    replica 1   step  step  step  step ┘         └ step …

See Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767. The weights differ from those of
one device, since a replica trains on its own examples between two averages. They are equal with `every=1`, plain SGD
and per-replica batches of equal size, since the average of the updates is the update by the average gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.engines.steps.batches_ahead import HOST
from tfpar.engines.workers.collectives import Group
from tfpar.reduction.replicas import local_replica_id


class LocalSGD:
    """Averages the weights of the replicas every few steps.

    The end of a call averages too and resets the count, so that validation and checkpoints use averaged weights. The
    result does not depend on the number of steps per call, a multiple of `every` except at the end of an epoch.

    Args:
        every: Steps between two averages.
        with_optimizer: Whether the optimizer's moments are averaged too.
    """

    def __init__(self, every: int, with_optimizer: bool) -> None:
        self.every = every
        self._with_optimizer = with_optimizer
        # On the host: TensorFlow 2.21 has no int32 variables on GPUs.
        with tf.device(HOST):
            self._num_steps_alone = tf.Variable(0, trainable=False, name="num_steps_alone")

    def after_step(self, model: keras.Model, strategy: tf.distribute.Strategy, group: Group) -> None:
        """Count a local step and average if it is the last; traced after the update."""
        with tf.device(HOST):
            due = self._num_steps_alone.assign_add(1) >= self.every
        self._average_if(due, model, strategy, group)

    def end_call(self, model: keras.Model, strategy: tf.distribute.Strategy, group: Group) -> None:
        """Average the weights if there were steps since the last average."""
        with tf.device(HOST):
            due = self._num_steps_alone > 0
        self._average_if(due, model, strategy, group)

    def _average_if(self, due: tf.Tensor, model: keras.Model, strategy: tf.distribute.Strategy, group: Group) -> None:
        variables = self._variables(model)

        def average() -> tf.Tensor:
            strategy.run(lambda: _average(variables, group))
            return self._num_steps_alone.assign(0)

        tf.cond(due, average, lambda: tf.identity(self._num_steps_alone))

    def _variables(self, model: keras.Model) -> list[keras.Variable]:
        """Return the variables to average: weights and slots, but not the learning rate, which the replicas share."""
        slots = [
            variable
            for variable in model.optimizer.variables
            if "learning_rate" not in variable.path.rsplit("/", 1)[-1]
        ]
        candidates = [*model.variables, *(slots if self._with_optimizer else ())]
        unique = {id(variable): variable for variable in candidates}
        return [variable for variable in unique.values() if tf.as_dtype(variable.dtype).is_floating]


def _average(variables: Sequence[keras.Variable], group: Group) -> None:
    member = local_replica_id()
    values: list[Any] = [tf.convert_to_tensor(variable.value) for variable in variables]
    for variable, total in zip(variables, group.all_reduce_many(values, member), strict=True):
        variable.value.assign(total / tf.cast(group.num_members, total.dtype))
