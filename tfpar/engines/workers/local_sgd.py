"""Local SGD: every replica updates its own weights, and the weights are averaged after every few steps.

    replica 0   step  step  step  step ┐         ┌ step …
                                       ├ average ┤             every=4: one all-reduce of weights for four steps
    replica 1   step  step  step  step ┘         └ step …

See Stich 2019, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767. The weights differ from those of
one device, since a replica trains on its own examples between two averages. With `every=1`, plain SGD and per-replica
batches of equal size they are equal, since the average of the updates is the update by the average gradient.
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
    """Count local steps, and average the weights after every `every` steps.

    The end of a call averages too and resets the count, so that validation and checkpoints use averaged weights. The
    result does not depend on the number of steps a call, which is a multiple of `every` except at the end of an epoch.

    Args:
        every: Steps from one average to the next.
        with_optimizer: Whether the optimizer's moments are averaged too; otherwise every replica has its own.
    """

    def __init__(self, every: int, with_optimizer: bool) -> None:
        self.every = every
        self._with_optimizer = with_optimizer
        # On the host, which decides by it: TensorFlow 2.21 has no int32 variables on GPUs.
        with tf.device(HOST):
            self._num_steps_alone = tf.Variable(0, trainable=False, name="num_steps_alone")

    def after_step(self, model: keras.Model, strategy: tf.distribute.Strategy, group: Group) -> None:
        """Count a local step, and average after the last one; traced after the update."""
        with tf.device(HOST):
            due = self._num_steps_alone.assign_add(1) >= self.every
        self._average_if(due, model, strategy, group)

    def end_call(self, model: keras.Model, strategy: tf.distribute.Strategy, group: Group) -> None:
        """Average the weights if a local step has followed the last average."""
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
        """Return the averaged variables: weights and optimizer slots without the learning rate, which is shared."""
        slots = [
            variable
            for variable in model.optimizer.variables
            if "learning_rate" not in variable.path.rsplit("/", 1)[-1]
        ]
        candidates = [*model.variables, *(slots if self._with_optimizer else ())]
        found = {id(variable): variable for variable in candidates}
        return [variable for variable in found.values() if tf.as_dtype(variable.dtype).is_floating]


def _average(variables: Sequence[keras.Variable], group: Group) -> None:
    member = local_replica_id()
    values: list[Any] = [tf.convert_to_tensor(variable.value) for variable in variables]
    for variable, total in zip(variables, group.all_reduce_many(values, member), strict=True):
        variable.value.assign(total / tf.cast(group.num_members, total.dtype))
