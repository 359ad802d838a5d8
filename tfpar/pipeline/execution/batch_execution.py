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

from tfpar._compat.graphs import tf_graph
from tfpar.pipeline.execution.gathered_microbatches import compute_on_whole_batch
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.execution.row_sums import added, added_over_workers, joined
from tfpar.pipeline.execution.schedule_executor import Execution
from tfpar.pipeline.execution.state_changes import added_changes, sums_of_pairs, values_after
from tfpar.pipeline.execution.step_loss import StepLoss
from tfpar.pipeline.loss.microbatch_loss import MicrobatchLoss
from tfpar.pipeline.schedule import Action
from tfpar.pipeline.schedule.segments import Segment, segments
from tfpar.pipeline.stages.compiled_stage import CompiledStage
from tfpar.reduction.gradients.gradient_addition import plus


def named(replica: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context that puts the number of a replica after the first into the names of its operations."""
    # With its slash, TensorFlow's name scope is that of an earlier context, not a new one.
    return tf.name_scope(f"replica_{replica}/") if replica else contextlib.nullcontext()


class StepResults(NamedTuple):
    """The results of a step but the gradients.

    Args:
        loss: The loss of the global batch, a scalar in Keras' float type.
        of_outputs: The losses of single outputs, where Keras logs them, scalars.
        new_states: Each state that layers or the loss change, with its value after the step.
        metrics_to_add: Variables of metrics, each with a sum to add to it.
    """

    loss: tf.Tensor
    of_outputs: list[tf.Tensor]
    new_states: list[tuple[keras.Variable, tf.Tensor]]
    metrics_to_add: list[tuple[keras.Variable, tf.Tensor]]


def _sum(losses: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.cast(loss, keras.config.floatx()) for loss in losses])


class StepContext:
    """The execution of one batch on all replicas.

    Args:
        executions: The actions of each replica of this process.
        losses: The loss of each replica.
        peers: The other workers of a job; None for none.
        reads_inputs: Whether a loss or a metric that takes the whole batch reads its inputs.
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
        """Add the actions of each replica to the graph: its forward passes first, if the loss takes the whole batch.

        Args:
            actions: The actions of one replica in a topological order.
            loops: Whether actions that repeat with later micro-batches are loops.
        """
        loss = self._losses[0]
        later = [action for action in actions if loss.takes_whole and action.kind != "F"]
        first = [action for action in actions if action.kind == "F"] if loss.takes_whole else actions
        before, after = (segments(some) if loops else [Segment(tuple(some))] for some in (first, later))
        self._run(before, after)
        if loss.takes_outputs:
            compute_on_whole_batch(self.executions, loss, self._peers, reads_inputs=self._reads_inputs)
        self._run(after, before)

    def _run(self, some: Sequence[Segment], others: Sequence[Segment]) -> None:
        for number, execution in enumerate(self.executions):
            with named(number):
                execution.run(some, others)

    @property
    def ends(self) -> list[tf.Tensor]:
        """Tensors after which all actions have run."""
        return [end for execution in self.executions for end in execution.ends]

    def gradients(self) -> dict[int, Any]:
        """Return the gradient of each weight by the weight's `id`.

        It is summed over the replicas, once the last backward pass of a stage has run on each; then over the stages
        that read the weight, and the loss.
        """
        of_loss = [sums for loss in self._losses if (sums := loss.sums())]
        of_stages = zip(*(execution.sums() for execution in self.executions), strict=True)
        users: list[tuple[Any, Any]] = [
            *zip(self.executions[0].stages, of_stages, strict=True),
            (self._losses[0].compiled, of_loss),
        ]
        # The workers' messages about the last stage come first, which is the first to end its backward passes.
        per_user = [self._joined(user, sums) if any(sums) else [] for user, sums in reversed(users)][::-1]
        self._keep_pace(per_user)
        total: dict[int, Any] = collections.defaultdict(lambda: None)
        for (user, _), gradients in zip(users, per_user, strict=True):
            for variable, gradient in zip(user.parameters, gradients, strict=False):
                with tf.device(variable.value.device):
                    total[id(variable)] = plus(total[id(variable)], gradient)
        return {key: gradient for key, gradient in total.items() if gradient is not None}

    def _keep_pace(self, gradients: Sequence[Sequence[Any]]) -> None:
        """Let the weights of a block wait for the sums of the gradients of the block but one before.

        A replica that is ahead of the others would hold the gradients of all its blocks.
        """
        for execution in self.executions:
            for stage, reads in execution.variables.last_reads.items():
                sums = tf.nest.flatten(gradients[stage + 2 : stage + 3], expand_composites=True)
                with tf.control_dependencies([total for total in sums if total is not None]):
                    tf_graph.run_before(tf.no_op(), reads)

    def _joined(self, user: CompiledStage | MicrobatchLoss, replicas: Sequence[Sequence[Any]]) -> list[Any]:
        """Return summed gradients of the parameters of a stage or the loss as tensors, slices or None."""
        gradients = added(replicas, user.kinds, user.parameters)
        if self._peers is not None:
            gradients = added_over_workers(gradients, user.kinds, user.parameters, self._peers)
        return joined(gradients, user.kinds, user.parameters)

    def results(self, penalties: Sequence[tf.Tensor]) -> StepResults:
        """Return the loss and the new states, summed over all replicas.

        Args:
            penalties: The losses of weight regularizers, scalars.
        """
        computing = self._losses[:1] if self._losses[0].takes_whole else self._losses
        of_outputs = [tf.add_n(list(same)) for same in zip(*(loss.of_outputs() for loss in computing), strict=True)]
        metrics = sums_of_pairs([loss.metrics_to_add() for loss in self._losses])
        states = sums_of_pairs([loss.new_states() for loss in self._losses])
        changes = added_changes([execution.variables.changes() for execution in self.executions])
        if self._peers is None:
            loss = _sum([*self._values(), *penalties])
            return StepResults(loss, of_outputs, [*values_after(changes), *states], metrics)
        metrics = sums_of_pairs([metrics, states])  # both are sums from zero
        replaced = [change for change in changes if change.is_replaced]
        changes = [change for change in changes if not change.is_replaced]
        sums = [value for _, value in metrics] + [change.change for change in changes]
        total = iter(self._peers.add([_sum(self._values()), *of_outputs, *sums]))
        loss, of_outputs = _sum([next(total), *penalties]), [next(total) for _ in of_outputs]
        metrics = [(variable, next(total)) for variable, _ in metrics]
        changes = [*replaced, *(change._replace(change=next(total)) for change in changes)]
        return StepResults(loss, of_outputs, values_after(changes), metrics)

    def _values(self) -> list[tf.Tensor]:
        """Return the losses added by layers and the loss of the outputs, scalars."""
        of_layers = [loss for execution in self.executions for loss in execution.losses]
        return [*of_layers, *(loss.value() for loss in self._losses)]
