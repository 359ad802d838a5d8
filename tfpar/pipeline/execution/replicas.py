"""The execution of one batch on all replicas of a pipeline, and the sums of their results.

    replica 0   micro-batches 0 1 2   devices 0 1   ─► gradients ─┐
                                                                  ├─ added on the device of each weight ─► update
    replica 1   micro-batches 3 4 5   devices 2 3   ─► gradients ─┘

A pipeline has one replica. Each replica reads the weights at the beginning of a step, on its own devices.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.stage_chain import BatchLoss
from tfpar.pipeline.execution.state_changes import values_after
from tfpar.pipeline.schedule.segments import Segment
from tfpar.reduction.gradient_addition import plus


class ReplicaContext(NamedTuple):
    """The execution of the micro-batches of one replica.

    Args:
        execution: The actions on them.
        loss: Their loss.
    """

    execution: Execution
    loss: BatchLoss


def named(replica: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context that puts the number of a replica after the first into the names of its operations."""
    # With its slash, TensorFlow's name scope is that of an earlier context, not a new one.
    return tf.name_scope(f"replica_{replica}/") if replica else contextlib.nullcontext()


class StepContext:
    """The execution of one batch on all replicas.

    Args:
        replicas: The first one has the states of metrics, to which those of the others are added.
    """

    def __init__(self, replicas: Sequence[ReplicaContext]) -> None:
        self.replicas = replicas
        self.num_examples = replicas[0].execution.microbatches.num_examples

    def run(self, segments: Sequence[Segment]) -> None:
        """Add the actions of each replica to the graph."""
        for number, replica in enumerate(self.replicas):
            with named(number):
                replica.execution.run(segments)

    @property
    def ends(self) -> list[tf.Tensor]:
        """Tensors after which all actions have run."""
        return [end for replica in self.replicas for end in replica.execution.ends]

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses added by layers and the loss of the outputs, scalars; their sum is the loss of the batch."""
        added = [loss for replica in self.replicas for loss in replica.execution.losses]
        return [*added, *(replica.loss.value(replica.execution.live) for replica in self.replicas)]

    def of_outputs(self) -> list[tf.Tensor]:
        """Return the losses of single outputs, where Keras logs them, scalars."""
        parts = [replica.loss.of_outputs(replica.execution.live) for replica in self.replicas]
        return [tf.add_n(list(same)) for same in zip(*parts, strict=True)]

    def gradients(self) -> dict[int, Any]:
        """Return the gradient of each weight by the weight's `id`.

        It is summed over the replicas, once the last backward pass of a stage has run on each; then over the stages
        that read the weight, and the loss.
        """
        found: dict[int, Any] = collections.defaultdict(lambda: None)
        programs = self.replicas[0].execution.programs.stages
        sums = zip(*(replica.execution.sums() for replica in self.replicas), strict=True)
        per_user = [(one.parameters, one.gradients(of_one)) for one, of_one in zip(programs, sums, strict=True)]
        loss = self.replicas[0].loss.program
        of_loss = [replica.loss.sums(replica.execution.live) for replica in self.replicas]
        for variables, gradients in [*per_user, (loss.parameters, loss.gradients(of_loss))]:
            for variable, gradient in zip(variables, gradients, strict=False):
                with tf.device(variable.value.device):
                    found[id(variable)] = plus(found[id(variable)], gradient)
        return {key: gradient for key, gradient in found.items() if gradient is not None}

    def new_states(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return each state that layers or the loss change, with its value after the step."""
        first, *others = self.replicas
        of_layers = values_after([replica.execution.variables.changes() for replica in self.replicas])
        of_metrics = dict[int, tuple[keras.Variable, tf.Tensor]]()
        for variable, value in first.loss.new_states(first.execution.live):
            of_metrics[id(variable)] = variable, value
        for replica in others:
            for variable, more in replica.loss.new_states(replica.execution.live):
                of_metrics[id(variable)] = variable, of_metrics[id(variable)][1] + more
        return [*of_layers, *of_metrics.values()]

    def metrics_to_add(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return variables of metrics with the sums of the other replicas, which the first one does not have."""
        return [pair for one in self.replicas[1:] for pair in one.loss.metrics_to_add(one.execution.live)]
