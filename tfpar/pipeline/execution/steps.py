"""The train, evaluate and predict steps of a pipeline, as TensorFlow graphs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat.graphs import tf_function
from tfpar._compat.variables.sharded_memory import shards_of
from tfpar.pipeline.execution.batch_execution import StepContext, replica_scope
from tfpar.pipeline.execution.microbatches import HOST, Microbatch, Microbatches, Share, StagedBatch, host_of
from tfpar.pipeline.execution.other_workers import BatchSizes, Peers
from tfpar.pipeline.execution.schedule_lowering import Execution
from tfpar.pipeline.execution.state_changes import new_values, sum_changes
from tfpar.pipeline.execution.step_compiler import CompiledStep, StepCompiler
from tfpar.pipeline.execution.step_loss import StepLoss
from tfpar.pipeline.execution.step_results import add_penalties, add_to_metrics, assign_states, update_loss_trackers
from tfpar.pipeline.execution.step_state import StepVariables
from tfpar.pipeline.graph.ir import Value
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.pipeline.schedule.segments import Segment, segments
from tfpar.pipeline.stages.compiler import CompiledStages
from tfpar.placement.weight_devices import follow_data
from tfpar.reduction.losses import BatchWeights
from tfpar.reduction.losses_in_call import counting, needs_pass

Apply = Callable[[Sequence[Any], Sequence[keras.Variable]], None]


class PipelineSteps:
    """The steps of one compiled model in stages.

    Args:
        compiler: Compiles the stages, the loss and the metrics of the model.
        schedule: The order of actions of a train step in this process.
        peers: The other workers of a job; None for none.
        apply: Runs the optimizer on gradients and their weights, of a sharded weight on its shards.
    """

    def __init__(self, compiler: StepCompiler, schedule: Schedule, peers: Peers | None, apply: Apply) -> None:
        self.compiler, self._peers, self._apply = compiler, peers, apply
        self._schedule, self._staged = schedule, compiler.staged
        self._replica_schedule = schedule.first_replica
        self._model, self._last_device = compiler.staged.model, compiler.staged.devices[-1]
        with tf.device("CPU:0"):
            self._usual_sizes = {training: tf.Variable(0, dtype=tf.int64) for training in (True, False)}

    @property
    def schedule(self) -> Schedule:
        """The order of actions of a train step: forward passes first, if the loss takes the whole batch."""
        takes_whole = self.compiler.losses.verdict(training=True).takes_whole_loss
        return self._schedule.forward_first() if takes_whole else self._schedule

    def keep_first(self, batch: Any, training: bool) -> None:
        """Set the size of the micro-batches of the first batch as the usual size, to which later ones are padded.

        Args:
            batch: The first global batch of the data.
            training: Whether the following steps are train steps.
        """
        self._usual_sizes[training].assign(-(-data.num_rows(batch) // self._schedule.num_microbatches))

    @functools.cached_property
    def _readers(self) -> list[list[tuple[Value, str]]]:
        """The pairs of a graph input and a device that reads it, for each replica."""
        graph, readers = self._staged.graph, list[list[tuple[Value, str]]]()
        for devices in self._devices:
            stages = zip(self._staged.stages, devices, strict=True)
            pairs = [(value, device) for stage, device in stages for value in stage.inputs]
            pairs += [(value, devices[-1]) for value in keras.tree.flatten(graph.outputs)]
            readers.append(list(dict.fromkeys(pair for pair in pairs if pair[0] in graph.inputs)))
        return readers

    @property
    def _devices(self) -> list[Sequence[str]]:
        """The device of each stage, for each replica."""
        return [self._staged.devices, *self.compiler.other_devices]

    def staged(self, batch: Any, num_counted: tf.Tensor | None = None) -> tuple[StagedBatch, list[str]]:
        """Return a batch with the share of each replica, on the host, and the device that reads each flat tensor.

        Args:
            batch: A global batch, or the local batch of this worker.
            num_counted: The number of examples of a local batch that count, an int64 scalar. Defaults to all.
        """
        inputs, *others = _plain(batch)
        with tf.device(HOST):
            values = self._staged.flat_inputs(inputs)
        staged = StagedBatch((inputs, *others), self._shares(inputs, others, values, num_counted))
        devices = [HOST for _ in tf.nest.flatten(inputs)]
        is_whole = len(staged.shares) == 1
        devices += [self._last_device if is_whole else HOST for _ in tf.nest.flatten(others)]
        for share, readers, stage_devices in zip(staged.shares, self._readers, self._devices, strict=True):
            devices += [HOST, *(device for _, device in readers)]
            devices += [stage_devices[-1] for _ in tf.nest.flatten(share.others)]
        return staged, devices

    def _shares(
        self, inputs: Any, others: Sequence[Any], values: Mapping[Value, Any], num_counted: tf.Tensor | None
    ) -> list[Share]:
        replica_values = [[values[value] for value, _ in readers] for readers in self._readers]
        if len(replica_values) == 1:
            return [Share(None, replica_values[0], None)]
        sizes = None if num_counted is None else BatchSizes(num_counted, num_counted)
        whole = Microbatches((inputs, *others), self._schedule.num_microbatches, sizes=sizes)
        numbers = [range(first, first + self._schedule.microbatches_per_replica) for first in self._first_microbatches]
        return [whole.share(*replica, others) for replica in zip(numbers, replica_values, strict=True)]

    def train_step(self, batch: Any, sizes: BatchSizes | None = None) -> tf.Tensor:
        """Add a train step to the graph; return the loss of the global batch, a scalar.

        Args:
            batch: A global batch, the local batch of this worker, or a `StagedBatch` with its tensors on their devices.
            sizes: The sizes of the local and the global batch, if they differ.
        """
        scale = self._loss_scale()
        context = self._begin(batch, scale, sizes, training=True)
        context.run(self._replica_schedule.in_order())
        gradients = context.gradients()
        loss = self._finish(_plain(batch), context, add_penalties(self._model, gradients, scale))
        # The update comes after all operations that read weights.
        with tf.control_dependencies([tf.group(*context.ends, loss)]), follow_data():
            after = {key: tf.nest.map_structure(tf.identity, g, expand_composites=True) for key, g in gradients.items()}
            weights = [shard for weight in self._model.trainable_variables for shard in shards_of(weight)]
            if weights:  # without any gradient, the optimizer raises
                self._apply([after.get(id(weight)) for weight in weights], weights)
        return loss

    def evaluate_step(self, batch: Any, sizes: BatchSizes | None = None) -> tf.Tensor:
        """Add an evaluate step to the graph; return the loss, a scalar. The arguments are those of `train_step`."""
        scale = tf.ones((), keras.config.floatx())
        context = self._begin(batch, scale, sizes, training=False)
        context.run(self._forward_actions())
        return self._finish(_plain(batch), context, add_penalties(self._model, {}, scale))

    def predict_step(self, inputs: Any, sizes: BatchSizes | None = None) -> Any:
        """Add a predict step to the graph; return the model's outputs, `[batch, ...]` each.

        Args:
            inputs: The inputs of the model, of a global batch or of the local batch of this worker.
            sizes: As for `train_step`.
        """
        compiled, executions = self._forward_passes(inputs, sizes)
        for execution in executions:
            execution.run(segments(self._forward_actions()))
        changes = sum_changes([execution.variables.changes() for execution in executions])
        assign_states(new_values(changes), [end for execution in executions for end in execution.ends])
        collected = [outputs for execution in executions for outputs in execution.outputs()]
        microbatches = [[output.tensor for output in outputs] for outputs in collected]
        with tf.device(self._last_device):
            whole = [data.join_batches(list(tensors)) for tensors in zip(*microbatches, strict=True)]
        if self._peers is not None:
            whole = self._peers.all_gather(whole, self._last_device)
        with tf.device(self._last_device):
            specs = [compiled.specs[value] for value in compiled.outputs]
            received = [spec.received(tensor, None) for spec, tensor in zip(specs, whole, strict=True)]
        return self._staged.packed_outputs(received)

    def _forward_passes(self, inputs: Any, sizes: BatchSizes | None) -> tuple[CompiledStages, list[Execution]]:
        """Return the stages of the first replica for a prediction, and the execution of each replica."""
        with tf_function.outside_of_functions():
            stages = self.compiler.stages_of_replicas(inputs, training=False)
        cuts, scale = self._cut((inputs,), sizes, training=False), tf.ones((), keras.config.floatx())
        return stages[0], [
            Execution(compiled, StepVariables(compiled.stages), microbatches, scale, first_microbatch=first)
            for compiled, microbatches, first in zip(stages, cuts, self._first_microbatches, strict=True)
        ]

    def run_again(self, batch: Any, sizes: BatchSizes | None, kind: str) -> None:
        """Repeat the actions of a failed step one by one, on this worker only, until an operation fails.

        Weights do not change, because a step assigns them at its end. Metrics may count the batch again.

        Args:
            batch: The batch of the step; for "predict" the inputs only.
            sizes: As for `train_step`.
            kind: "train", "evaluate" or "predict".
        """
        training = kind == "train"
        actions = self._replica_schedule.in_order() if training else self._forward_actions()
        if kind == "predict":
            for execution in self._forward_passes(batch, sizes)[1]:
                execution.run([Segment(tuple(actions))])
        elif self._peers is None or self.compiler.has_compiled(batch, training=training):  # workers compile together
            scale = self._loss_scale() if training else tf.ones((), keras.config.floatx())
            self._begin(batch, scale, sizes, training=training, alone=True).run(actions, loops=False)

    def timed(self, batch: Any, schedule: Schedule) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Add the actions of a schedule to the graph, without an update, and measure when each runs.

        Args:
            batch: A global batch.
            schedule: A schedule with as many replicas as the steps have, and at most as many micro-batches.

        Returns:
            The begin and end of each action of `schedule.in_order()`, in seconds of TensorFlow's clock, float64
            `[actions, 2]`; and the gradients, because TensorFlow would prune unused ones.
        """
        context = self._begin(batch, self._loss_scale(), None, training=True, timed=True)
        context.run(schedule.first_replica.in_order(), loops=False)
        sums = tf.nest.flatten(list(context.gradients().values()), expand_composites=True)
        moments = {}
        for replica, execution in enumerate(context.executions):
            first = replica * schedule.microbatches_per_replica
            for (kind, stage, microbatch), begin, end in execution.moments:
                moments[Action(kind, stage, first + microbatch)] = [begin, end]
        return tf.stack([tf.stack(moments[action]) for action in schedule.in_order()]), sums

    def _cut(self, batch: Any, sizes: BatchSizes | None, *, training: bool) -> list[Microbatches]:
        """Cut a batch into micro-batches; return them as each replica reads them."""
        with tf.device("CPU:0"):
            usual_size = self._usual_sizes[training].read_value()
        count = self._schedule.num_microbatches
        first_number = 0 if self._peers is None else self._peers.rank * count
        plain = _plain(batch)
        microbatches = Microbatches(plain, count, usual_size, sizes, first_number, self._hosts)
        if isinstance(batch, StagedBatch):
            replicas = zip(batch.shares, self._readers, self._devices, strict=True)
            return [microbatches.for_replica(share, readers, devices[-1]) for share, readers, devices in replicas]
        with tf.device(HOST):
            values = self._staged.flat_inputs(plain[0])
        return [
            microbatches.for_replica(Share(None, [values[value] for value, _ in readers], None), readers, None)
            for readers in self._readers
        ]

    def _loss_scale(self) -> tf.Tensor:
        with tf.device(self._last_device):
            scale: tf.Tensor = self._model.optimizer.scale_loss(tf.ones((), keras.config.floatx()))
            return scale

    def _begin(
        self,
        batch: Any,
        scale: tf.Tensor,
        sizes: BatchSizes | None,
        *,
        training: bool,
        timed: bool = False,
        alone: bool = False,
    ) -> StepContext:
        """Split a batch into micro-batches and prepare their execution. Timed executions do not update metrics."""
        microbatches, peers = self._cut(batch, sizes, training=training), None if timed or alone else self._peers
        batch = _plain(batch)
        with tf_function.outside_of_functions():
            steps = self.compiler.compile_replicas(batch, training=training)
        divisors = tf.zeros([0], tf.float64)
        if steps[0].loss.num_divisors:
            call = functools.partial(self._staged.call, training=training)
            local = steps[0].loss.divisors(batch, data.num_rows(batch), call)
            divisors = _sum_over_workers(local, microbatches[0], peers)
        sums = None if timed else self._sums_in_call(batch, training)
        sums = None if sums is None else _sum_over_workers(sums, microbatches[0], peers)
        factors = self._added_factors(steps[0], training)

        def begin(replica: int, step: CompiledStep, first_microbatch: int) -> tuple[Execution, StepLoss]:
            with replica_scope(replica):
                variables = StepVariables(step.stages.stages, step.loss.layer_states, step.loss.parameters)
                adds = replica > 0 or self._peers is not None
                loss = StepLoss(step, variables, divisors, scale, updates_metrics=not timed, adds_metrics=adds)
                execution = Execution(
                    step.stages, variables, microbatches[replica], scale, factors, loss, sums,
                    first_microbatch=first_microbatch, timed=timed,
                )  # fmt: skip
            return execution, loss

        pairs = list(map(begin, itertools.count(), steps, self._first_microbatches))
        executions, losses = [execution for execution, _ in pairs], [loss for _, loss in pairs]
        reads_inputs = self.compiler.losses.verdict(training).reads_inputs
        return StepContext(executions, losses, peers, reads_inputs=reads_inputs)

    def _added_factors(self, step: CompiledStep, training: bool) -> Callable[[Microbatch], Sequence[tf.Tensor]]:
        """Return a function that gives the weight of each added loss of a micro-batch in the loss of the batch."""
        num_added = sum(stage.num_losses for stage in step.stages.stages)

        def factors(microbatch: Microbatch) -> Sequence[tf.Tensor]:
            weights = BatchWeights(microbatch.example_weight, microbatch.size, microbatch.num_examples)
            return self.compiler.losses.added_factors(training, weights, num_added)

        return factors

    def _sums_in_call(self, batch: Any, training: bool) -> tf.Tensor | None:
        """Return the sums and weights over the whole batch of losses that layers compute, if they need them.

        This calls the model on the batch, but TensorFlow prunes the operations that the sums do not depend on.
        """
        ways, sums = self.compiler.losses.ways(training), list[tf.Tensor]()
        if not needs_pass(ways):
            return None
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with keras.StatelessScope(), counting(ways, sums):
            self._staged.call(inputs, training)
        return tf.stack(sums)

    def _finish(self, batch: Any, context: StepContext, penalties: Sequence[tf.Tensor]) -> tf.Tensor:
        """Assign new states and update the tracked losses; return the loss of the batch."""
        with tf.device(self._last_device):
            loss, output_losses, new_states, metrics = context.results(penalties)
        assign_states(new_states, [*context.ends, loss])
        add_to_metrics(metrics, [*context.ends, loss])
        update_loss_trackers(self._model, batch, loss, context.num_examples, output_losses)
        return loss

    @property
    def _first_microbatches(self) -> range:
        """The index in the batch of the first micro-batch of each replica."""
        return range(0, self._schedule.num_microbatches, self._schedule.microbatches_per_replica)

    @functools.cached_property
    def _hosts(self) -> set[str]:
        """The hosts of the processes that run stages."""
        return {host_of(device) for devices in self._devices for device in devices}

    def _forward_actions(self) -> list[Action]:
        stages, microbatches = range(self._schedule.num_stages), range(self._schedule.microbatches_per_replica)
        return [Action("F", stage, number) for number in microbatches for stage in stages]


def _plain(batch: Any) -> tuple[Any, ...]:
    """Return a batch as a tuple. As in Keras, an element of a dataset may be just the inputs."""
    plain = batch.batch if isinstance(batch, StagedBatch) else batch
    return plain if isinstance(plain, tuple) else (plain,)


def _sum_over_workers(sums: tf.Tensor, microbatches: Microbatches, peers: Peers | None) -> tf.Tensor:
    """Sum over the local batches of all workers, except empty ones."""
    if peers is None:
        return sums
    counts = tf.cast(microbatches.num_counted > 0, sums.dtype)
    (total,) = peers.add([sums * counts])
    return total
