"""The train, evaluate and predict step of a model in stages, as TensorFlow graphs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_optimizer
from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.microbatches import Microbatch, Microbatches
from tfpar.pipeline.execution.regularization import add_penalties
from tfpar.pipeline.execution.replicas import ReplicaContext, StepContext, named
from tfpar.pipeline.execution.stage_chain import BatchLoss, StepPrograms
from tfpar.pipeline.execution.state_changes import values_after
from tfpar.pipeline.execution.step_compiler import StepCompiler
from tfpar.pipeline.execution.step_results import add_to_metrics, assign_states, update_loss_trackers
from tfpar.pipeline.partition.placement import follow_data
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.pipeline.schedule.segments import Segment, segments
from tfpar.reduction.losses import BatchWeights
from tfpar.reduction.losses_in_call import counting, needs_pass


class PipelineSteps:
    """The steps of one model in stages, until the model is compiled again.

    Args:
        compiler: Compiles the stages, the loss and the metrics of the model.
        schedule: The order of actions of a train step.
    """

    def __init__(self, compiler: StepCompiler, schedule: Schedule) -> None:
        self.compiler = compiler
        self._schedule, self._staged = schedule, compiler.staged
        self._of_one_replica = schedule.of_one_replica
        self._model, self._last_device = compiler.staged.model, compiler.staged.devices[-1]
        with tf.device("CPU:0"):
            self._usual_sizes = {training: tf.Variable(0, dtype=tf.int64) for training in (True, False)}

    def keep_first(self, batch: Any, training: bool) -> None:
        """Keep what later batches need of the first one: examples for trials, and the size of micro-batches.

        Args:
            batch: The first global batch of the data.
            training: Whether train steps follow, or evaluate or predict steps.
        """
        self.compiler.examples.keep(batch)
        self._usual_sizes[training].assign(-(-data.num_rows(batch) // self._schedule.num_microbatches))

    def train_step(self, batch: Any) -> tf.Tensor:
        """Add one optimizer update to the graph; return the loss, a scalar."""
        scale = self._loss_scale()
        context = self._begin(batch, scale, training=True)
        context.run(segments(self._of_one_replica.in_order()))
        gradients = context.gradients()
        loss = self._finish(batch, context, add_penalties(self._model, gradients, scale))
        # Updates come after all operations that read weights.
        with tf.control_dependencies([tf.group(*context.ends, loss)]), follow_data():
            after = {key: tf.nest.map_structure(tf.identity, g, expand_composites=True) for key, g in gradients.items()}
            if after:
                variables = self._model.trainable_variables
                with keras_optimizer.one_device_optimizer():
                    self._model.optimizer.apply([after.get(id(variable)) for variable in variables], variables)
        return loss

    def evaluate_step(self, batch: Any) -> tf.Tensor:
        """Add the loss and metrics of a batch to the graph; return the loss, a scalar."""
        scale = tf.ones((), keras.config.floatx())
        context = self._begin(batch, scale, training=False)
        context.run(segments(self._forward_actions()))
        return self._finish(batch, context, add_penalties(self._model, {}, scale))

    def predict_step(self, inputs: Any) -> Any:
        """Add the forward pass of a batch to the graph; return the model's outputs, `[batch, ...]` each."""
        with tf.init_scope():
            programs = self.compiler.stages_of_replicas(inputs, training=False)
        microbatches, one = self._cut((inputs,), training=False), tf.ones((), keras.config.floatx())
        executions = [
            Execution(of_one, microbatches, self._staged.flat_inputs, one, first_microbatch=first)
            for of_one, first in zip(programs, self._first_microbatches, strict=True)
        ]
        for execution in executions:
            execution.run(segments(self._forward_actions()))
        new_states = values_after([execution.variables.changes() for execution in executions])
        assign_states(new_states, [end for execution in executions for end in execution.ends])
        parts = [part for execution in executions for part in execution.outputs()]
        with tf.device(self._last_device):
            whole = [data.join_batches(list(ones)) for ones in zip(*parts, strict=True)]
        return self._staged.packed_outputs(whole)

    def timed(self, batch: Any, schedule: Schedule) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Add the actions of a schedule on a batch to the graph, without an update, and measure when each runs.

        Args:
            batch: A global batch.
            schedule: With as many replicas as that of the steps, and at most as many micro-batches.

        Returns:
            The begin and end of each action of `schedule.in_order()`, in seconds of TensorFlow's clock, float64
            `[actions, 2]`; and the gradients, without which TensorFlow would prune the backward pass.
        """
        context = self._begin(batch, self._loss_scale(), training=True, timed=True)
        context.run([Segment(tuple(schedule.of_one_replica.in_order()))])
        sums = tf.nest.flatten(list(context.gradients().values()), expand_composites=True)
        moments = {}
        for number, replica in enumerate(context.replicas):
            first = number * schedule.microbatches_per_replica
            for (kind, stage, microbatch), begin, end in replica.execution.moments:
                moments[Action(kind, stage, first + microbatch)] = [begin, end]
        return tf.stack([tf.stack(moments[action]) for action in schedule.in_order()]), sums

    def _cut(self, batch: Any, *, training: bool) -> Microbatches:
        with tf.device("CPU:0"):
            usual_size = self._usual_sizes[training].read_value()
        return Microbatches(batch, self._schedule.num_microbatches, usual_size)

    def _loss_scale(self) -> tf.Tensor:
        with tf.device(self._last_device):
            scale: tf.Tensor = self._model.optimizer.scale_loss(tf.ones((), keras.config.floatx()))
            return scale

    def _begin(self, batch: Any, scale: tf.Tensor, *, training: bool, timed: bool = False) -> StepContext:
        """Split a batch into micro-batches and prepare their execution; metrics are updated unless it is timed."""
        with tf.init_scope():
            compiled, *others = self.compiler.compile_replicas(batch, training=training)
        microbatches = self._cut(batch, training=training)
        divisors = tf.zeros([0], tf.float64)
        if compiled.loss.num_divisors:
            call = functools.partial(self._staged.call, training=training)
            divisors = compiled.loss.loss.divisors(batch, microbatches.num_examples, call)

        def factors(one: Microbatch) -> Sequence[tf.Tensor]:
            weights = BatchWeights(one.example_weight, one.size, one.num_examples)
            return self.compiler.decomposition.added_factors(training, weights)

        sums = None if timed else self._sums_in_call(batch, training)

        def begin(replica: int, one: StepPrograms, first_microbatch: int) -> ReplicaContext:
            with named(replica):
                loss = BatchLoss(one, divisors, scale, updates_metrics=not timed, adds_metrics=replica > 0)
                execution = Execution(
                    one.programs, microbatches, self._staged.flat_inputs, scale, factors, loss, loss.variables, sums,
                    first_microbatch=first_microbatch, timed=timed,
                )  # fmt: skip
            return ReplicaContext(execution, loss)

        return StepContext(list(map(begin, itertools.count(), [compiled, *others], self._first_microbatches)))

    def _sums_in_call(self, batch: Any, training: bool) -> tf.Tensor | None:
        """Return the sums and weights of the whole batch that losses computed by layers need.

        TensorFlow prunes all operations of the model that they do not depend on.
        """
        ways, found = self.compiler.ways(training), list[tf.Tensor]()
        if not needs_pass(ways):
            return None
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with keras.StatelessScope(), counting(ways, found):
            self._staged.call(inputs, training)
        return tf.stack(found)

    def _finish(self, batch: Any, context: StepContext, penalties: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the loss of the batch; assign new states and update the tracked losses."""
        with tf.device(self._last_device):
            parts = [tf.cast(part, keras.config.floatx()) for part in [*context.losses, *penalties]]
            loss, of_outputs = tf.add_n(parts), context.of_outputs()
        assign_states(context.new_states(), [*context.ends, loss])
        add_to_metrics(context.metrics_to_add(), [*context.ends, loss])
        update_loss_trackers(self._model, batch, loss, context.num_examples, of_outputs)
        return loss

    @property
    def _first_microbatches(self) -> range:
        """The index in the batch of the first micro-batch of each replica."""
        return range(0, self._schedule.num_microbatches, self._schedule.microbatches_per_replica)

    def _forward_actions(self) -> list[Action]:
        stages, microbatches = range(self._schedule.num_stages), range(self._schedule.microbatches_per_replica)
        return [Action("F", stage, number) for number in microbatches for stage in stages]
