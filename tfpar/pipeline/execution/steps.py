"""The train, evaluate and predict step of a model in stages, as TensorFlow graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_optimizer
from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.microbatches import Microbatch, Microbatches
from tfpar.pipeline.execution.regularization import add_penalties
from tfpar.pipeline.execution.stage_chain import BatchLoss, StepContext
from tfpar.pipeline.execution.step_compiler import StepCompiler
from tfpar.pipeline.execution.step_results import assign_states, update_loss_trackers
from tfpar.pipeline.partition.placement import follow_data
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.pipeline.schedule.steady_state import Segment, segments
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
        context.execution.run(segments(self._schedule.in_order()))
        gradients = context.gradients()
        loss = self._finish(batch, context, add_penalties(self._model, gradients, scale))
        # Updates come after all operations that read weights.
        with tf.control_dependencies([tf.group(*context.execution.ends, loss)]), follow_data():
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
        context.execution.run(segments(self._forward_actions()))
        return self._finish(batch, context, add_penalties(self._model, {}, scale))

    def predict_step(self, inputs: Any) -> Any:
        """Add the forward pass of a batch to the graph; return the model's outputs, `[batch, ...]` each."""
        with tf.init_scope():
            programs = self.compiler.stages(inputs, training=False)
        microbatches = self._cut((inputs,), training=False)
        execution = Execution(programs, microbatches, self._staged.flat_inputs, tf.ones((), keras.config.floatx()))
        execution.run(segments(self._forward_actions()))
        assign_states(execution.new_states(), execution.ends)
        parts = execution.outputs()
        with tf.device(self._last_device):
            whole = [data.join_batches(list(ones)) for ones in zip(*parts, strict=True)]
        return self._staged.packed_outputs(whole)

    def timed(self, batch: Any, actions: Sequence[Action]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Add actions on a batch to the graph, without an update, and measure when each runs.

        Args:
            batch: A global batch.
            actions: In an order in which each comes after those that it depends on.

        Returns:
            The begin and end of each action, in seconds of TensorFlow's clock, float64 `[actions, 2]`; and the
            gradients, without which TensorFlow would prune the backward pass.
        """
        context = self._begin(batch, self._loss_scale(), training=True, timed=True)
        context.execution.run([Segment(tuple(actions))])
        sums = tf.nest.flatten(list(context.gradients().values()), expand_composites=True)
        moments = {moment.action: [moment.begin, moment.end] for moment in context.execution.moments}
        return tf.stack([tf.stack(moments[action]) for action in actions]), sums

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
            compiled = self.compiler.compile(batch, training=training)
        microbatches = self._cut(batch, training=training)
        divisors = tf.zeros([0], tf.float64)
        if compiled.loss.num_divisors:
            call = functools.partial(self._staged.call, training=training)
            divisors = compiled.loss.loss.divisors(batch, microbatches.num_examples, call)

        def factors(one: Microbatch) -> Sequence[tf.Tensor]:
            weights = BatchWeights(one.example_weight, one.size, one.num_examples)
            return self.compiler.decomposition.added_factors(training, weights)

        loss = BatchLoss(compiled, divisors, scale, updates_metrics=not timed)
        sums = None if timed else self._sums_in_call(batch, training)
        execution = Execution(
            compiled.programs, microbatches, self._staged.flat_inputs, scale, factors, loss, loss.variables, sums,
            timed=timed,
        )  # fmt: skip
        return StepContext(execution, loss)

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
        execution, live = context.execution, context.execution.live
        losses = [*execution.losses, context.loss.value(live), *penalties]
        with tf.device(self._last_device):
            loss = tf.add_n([tf.cast(part, keras.config.floatx()) for part in losses])
        assign_states([*execution.new_states(), *context.loss.new_states(live)], [*execution.ends, loss])
        of_outputs = context.loss.of_outputs(live)
        update_loss_trackers(self._model, batch, loss, execution.microbatches.num_examples, of_outputs)
        return loss

    def _forward_actions(self) -> list[Action]:
        stages, microbatches = range(self._schedule.num_stages), range(self._schedule.num_microbatches)
        return [Action("F", stage, number) for number in microbatches for stage in stages]
