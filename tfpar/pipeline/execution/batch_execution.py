"""Execution of one batch on all replicas of a pipeline, and the sums of their results.

    replica 0   micro-batches 0 1 2   devices 0 1   ─► gradients ─┐
                                                                  ├─ added on the device of each weight ─► update
    replica 1   micro-batches 3 4 5   devices 2 3   ─► gradients ─┘

Each replica copies the weights to its own devices at the beginning of a step.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_graph
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.execution.row_sums import sum_over_replicas, sum_over_workers, to_slices
from tfpar.pipeline.execution.schedule_lowering import Execution
from tfpar.pipeline.execution.state_changes import new_values, sum_by_variable, sum_changes
from tfpar.pipeline.execution.step_loss import StepLoss
from tfpar.pipeline.execution.whole_batch_loss import compute_whole_batch_loss
from tfpar.pipeline.loss.microbatch_loss import MicrobatchLoss
from tfpar.pipeline.schedule import Action
from tfpar.pipeline.schedule.segments import Segment, segments
from tfpar.pipeline.stages.compiled_stage import CompiledStage
from tfpar.reduction.gradients.gradient_addition import plus


def replica_scope(replica: int) -> contextlib.AbstractContextManager[Any]:
    """Return a name scope for the operations of a replica; none for the first replica."""
    # The slash makes TensorFlow reuse the scope instead of numbering a new one.
    return tf.name_scope(f"replica_{replica}/") if replica else contextlib.nullcontext()


class StepResults(NamedTuple):
    """The results of a step, except gradients.

    Args:
        loss: The loss of the global batch, a scalar in Keras' float type.
        output_losses: The loss of each output, if Keras logs them, scalars.
        new_states: Each state that layers or the loss change, with its value after the step.
        metrics_to_add: Each metric variable to which replicas add, with the sum to add.
    """

    loss: tf.Tensor
    output_losses: list[tf.Tensor]
    new_states: list[tuple[keras.Variable, tf.Tensor]]
    metrics_to_add: list[tuple[keras.Variable, tf.Tensor]]


def _sum(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(loss, keras.config.floatx()) for loss in losses])


class StepContext:
    """The execution of one batch on all replicas.

    Args:
        executions: The execution on each replica of this process.
        losses: The loss of each replica.
        peers: The other workers, if the job has several.
        reads_inputs: Whether a loss or metric of the whole batch reads the model's inputs.
    """

    def __init__(
        self,
        executions: Sequence[Execution],
        losses: Sequence[StepLoss],
        peers: Peers | None = None,
        *,
        reads_inputs: bool = False,
    ) -> None:
        self.executions, self._losses, self._peers, self._reads_inputs = executions, losses, peers, reads_inputs
        self.num_examples = executions[0].microbatches.num_examples

    def run(self, actions: Sequence[Action], *, loops: bool = True) -> None:
        """Add the actions of each replica to the graph, with all forward passes first for a loss of the whole batch.

        Args:
            actions: The actions of one replica in topological order.
            loops: Whether actions that repeat with later micro-batches become loops.
        """
        loss = self._losses[0]
        later = [action for action in actions if loss.takes_whole and action.kind != "F"]
        first = [action for action in actions if action.kind == "F"] if loss.takes_whole else actions
        before, after = (segments(order) if loops else [Segment(tuple(order))] for order in (first, later))
        self._run(before, after)
        if loss.takes_outputs:
            compute_whole_batch_loss(self.executions, loss, self._peers, reads_inputs=self._reads_inputs)
        self._run(after, before)

    def _run(self, run_now: Sequence[Segment], others: Sequence[Segment]) -> None:
        for replica, execution in enumerate(self.executions):
            with replica_scope(replica):
                execution.run(run_now, others)

    @property
    def ends(self) -> list[tf.Tensor]:
        """Tensors to wait for until all actions have run."""
        return [end for execution in self.executions for end in execution.ends]

    def gradients(self) -> dict[int, Any]:
        """Return the gradient of each weight by the weight's `id`.

        Gradients are summed over the replicas as soon as all have ended the backward passes of a stage, then over the
        stages that read the weight, and the loss.
        """
        loss_sums = [sums for loss in self._losses if (sums := loss.sums())]
        stage_sums = zip(*(execution.sums() for execution in self.executions), strict=True)
        readers: list[tuple[Any, Any]] = [
            *zip(self.executions[0].stages, stage_sums, strict=True),
            (self._losses[0].compiled, loss_sums),
        ]
        # Workers send the gradients of the last stage first, because its backward passes end first.
        per_reader = [self._reduced(reader, sums) if any(sums) else [] for reader, sums in reversed(readers)][::-1]
        self._keep_pace(per_reader)
        total: dict[int, Any] = collections.defaultdict(lambda: None)
        for (reader, _), gradients in zip(readers, per_reader, strict=True):
            for variable, gradient in zip(reader.parameters, gradients, strict=False):
                with tf.device(variable.value.device):
                    total[id(variable)] = plus(total[id(variable)], gradient)
        return {key: gradient for key, gradient in total.items() if gradient is not None}

    def _keep_pace(self, gradients: Sequence[Sequence[Any]]) -> None:
        """Gather the weights of a block only after the gradients of the block two before it are summed.

        Otherwise a replica ahead of the others would hold the gradients of all its blocks.
        """
        for execution in self.executions:
            for stage, reads in execution.variables.last_reads.items():
                sums = tf.nest.flatten(gradients[stage + 2 : stage + 3], expand_composites=True)
                with tf.control_dependencies([total for total in sums if total is not None]):
                    tf_graph.run_before(tf.no_op(), reads)

    def _reduced(self, reader: CompiledStage | MicrobatchLoss, replicas: Sequence[Sequence[Any]]) -> list[Any]:
        """Sum the gradients of the parameters of a stage or the loss over replicas and workers."""
        gradients = sum_over_replicas(replicas, reader.kinds, reader.parameters)
        if self._peers is not None:
            gradients = sum_over_workers(gradients, reader.kinds, reader.parameters, self._peers)
        return to_slices(gradients, reader.kinds, reader.parameters)

    def results(self, penalties: Sequence[tf.Tensor]) -> StepResults:
        """Return the loss and the new states, summed over replicas and workers.

        Args:
            penalties: The losses of weight regularizers, scalars.
        """
        computing = self._losses[:1] if self._losses[0].takes_whole else self._losses
        output_losses = [
            tf.add_n(list(values)) for values in zip(*(loss.output_losses() for loss in computing), strict=True)
        ]
        metrics = sum_by_variable([loss.metrics_to_add() for loss in self._losses])
        states = sum_by_variable([loss.new_states() for loss in self._losses])
        changes = sum_changes([execution.variables.changes() for execution in self.executions])
        if self._peers is None:
            loss = _sum([*self._values(), *penalties])
            return StepResults(loss, output_losses, [*new_values(changes), *states], metrics)
        metrics = sum_by_variable([metrics, states])  # both are sums from zero
        replaced = [change for change in changes if change.is_replaced]
        changes = [change for change in changes if not change.is_replaced]
        sums = [value for _, value in metrics] + [change.change for change in changes]
        total = iter(self._peers.add([_sum(self._values()), *output_losses, *sums]))
        loss, output_losses = _sum([next(total), *penalties]), [next(total) for _ in output_losses]
        metrics = [(variable, next(total)) for variable, _ in metrics]
        changes = [*replaced, *(change._replace(change=next(total)) for change in changes)]
        return StepResults(loss, output_losses, new_values(changes), metrics)

    def _values(self) -> list[tf.Tensor]:
        """Return the losses added by layers and the loss of the outputs, scalars."""
        layer_losses = [loss for execution in self.executions for loss in execution.losses]
        return [*layer_losses, *(loss.value() for loss in self._losses)]
