"""The three steps of a model in stages: train, evaluate and predict, as TensorFlow graphs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, keras_pipeline
from tfpar.pipeline.execution.compiled_stages import Programs, StagesOfModel
from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.lookup_trials import find_kinds
from tfpar.pipeline.execution.loss_program import LossPart, LossProgram
from tfpar.pipeline.execution.microbatches import cut_batch
from tfpar.pipeline.execution.regularization import add_penalties
from tfpar.pipeline.execution.stage_chain import StepContext, StepPrograms
from tfpar.pipeline.execution.stage_values import MaskedTensor
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Value
from tfpar.pipeline.graph.trial_batch import Examples
from tfpar.pipeline.partition.placement import copied_to, follow_data
from tfpar.pipeline.schedule import Action, Schedule
from tfpar.reduction import metric_logs
from tfpar.reduction.gradient_addition import spec_of
from tfpar.reduction.loss_decomposition import LossDecomposition
from tfpar.reduction.losses import BatchWeights
from tfpar.reduction.losses_in_call import Way, counting, needs_pass


class PipelineSteps:
    """The steps of one model in stages, for as long as the model is not compiled again.

    Args:
        model: A built and compiled model, its weights on the devices of their stages.
        stages: Its stages.
        schedule: The order of a train step.
        adds_losses: Whether a layer adds a loss.
        allows_mixing: Whether micro-batches may change what layers compute.
    """

    def __init__(
        self, model: keras.Model, stages: StagesOfModel, schedule: Schedule, adds_losses: bool, allows_mixing: bool
    ) -> None:
        self.compilation = keras_model.compilation(model)
        self._model, self._of_stages, self._adds_losses = model, stages, adds_losses
        self._graph, self._devices, self._schedule = stages.graph, stages.devices, schedule
        self._allows_mixing = allows_mixing or schedule.num_microbatches == 1
        self._division: LossDecomposition | None = None
        self._compiled: dict[Any, StepPrograms] = {}
        self.examples = Examples()

    def prepare(self, batch: Any) -> None:
        """Find out how the model's losses divide over micro-batches.

        Args:
            batch: The first global batch.

        Raises:
            ValueError: If a loss does not divide.
        """
        # Else only the shapes of the losses are looked at, and a large model takes long to run without a graph.
        depends_on_values = self._adds_losses or not self._has_shapes or bool(keras_model.own_metrics(self._model))
        call = self._call_of_check if depends_on_values else self._zeros_of_check
        self._division = LossDecomposition(
            self._model, batch, call, communicates=False, values_call=self._call_of_check
        )

    def prepare_loss(self, batch: Any, training: bool) -> None:
        """Find out how what an overridden `compute_loss` returns divides over micro-batches.

        Args:
            batch: The first global batch.
            training: Whether train steps follow, or evaluate steps.

        Raises:
            ValueError: If it does not divide.
        """
        assert self._division is not None, "prepare comes before the losses"
        self._division.find_own_loss(self._model, batch, training, self._call_of_check)

    def _call_of_check(self, model: keras.Model, inputs: Any, training: bool) -> Any:
        return self._call(inputs, training)

    def _zeros_of_check(self, model: keras.Model, inputs: Any, training: bool) -> Any:
        return self._zeros(inputs)

    def train_step(self, batch: Any) -> tf.Tensor:
        """Add one optimizer update to the graph; return the loss, a scalar."""
        optimizer = self._model.optimizer
        scale = self._loss_scale()
        run = self._begin(batch, scale, training=True)
        run.execution.run(self._schedule.in_order())
        gradients = run.gradients()
        loss = self._finish(batch, run, add_penalties(self._model, gradients, scale))
        # Updates wait for all that reads weights.
        with tf.control_dependencies([tf.group(*run.execution.ends, loss)]), follow_data():
            after = {key: tf.nest.map_structure(tf.identity, g, expand_composites=True) for key, g in gradients.items()}
            if after:
                variables = self._model.trainable_variables
                with keras_model.one_device_optimizer():
                    optimizer.apply([after.get(id(variable)) for variable in variables], variables)
        return loss

    def evaluate_step(self, batch: Any) -> tf.Tensor:
        """Add the loss and metrics of a batch to the graph; return the loss, a scalar."""
        scale = tf.ones((), keras.config.floatx())
        run = self._begin(batch, scale, training=False)
        run.execution.run(self._forwards())
        return self._finish(batch, run, add_penalties(self._model, {}, scale))

    def predict_step(self, inputs: Any) -> Any:
        """Add the forward pass of a batch to the graph; return the model's outputs, `[batch, ...]` each."""
        with tf.init_scope():
            programs = self._programs(_specs(inputs), training=False)
        microbatches = cut_batch(inputs, self._schedule.num_microbatches)
        flat = [self._flat(one.batch) for one in microbatches]
        execution = Execution(programs, microbatches, flat, tf.ones((), keras.config.floatx()))
        execution.run(self._forwards())
        self._keep_states(execution.new_states(), execution.ends)
        parts = [execution.outputs(number) for number in range(len(microbatches))]
        with tf.device(self._devices[-1]):
            whole = [
                data.join_batches(
                    [data.take_rows(one.tensor, 0, part.counted) for one, part in zip(ones, microbatches, strict=True)]
                )
                for ones in zip(*parts, strict=True)
            ]
        return keras.tree.pack_sequence_as(self._graph.outputs, whole)

    def timed(self, batch: Any, actions: Sequence[Action]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Add actions on a batch to the graph, without an update, and note when each runs.

        Args:
            batch: A global batch.
            actions: In an order in which each comes after what it needs.

        Returns:
            When each action began and ended, in seconds of TensorFlow's clock, float64 `[actions, 2]`; and the
            gradients, without which TensorFlow would leave out what makes them.
        """
        run = self._begin(batch, self._loss_scale(), training=True, timed=True)
        run.execution.run(actions)
        sums = tf.nest.flatten(list(run.gradients().values()), expand_composites=True)
        moments = {moment.action: [moment.begin, moment.end] for moment in run.execution.moments}
        return tf.stack([tf.stack(moments[action]) for action in actions]), sums

    def compile(self, batch: Any, *, training: bool) -> StepPrograms:
        """Compile the functions of all stages and of the loss, once for as long as the same weights are trainable.

        Args:
            batch: A global batch, or tensors like it.
            training: Whether the model trains.
        """
        assert self._division is not None, "prepare comes before the steps"
        specs = _specs(batch)
        key = (training, str(specs))  # not what trains: that is fixed where a step is first traced, as in Keras
        if key not in self._compiled:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(specs)
            programs = self._programs(inputs, training=training)
            outputs = keras.tree.map_structure(lambda value: programs.flows[value], self._graph.outputs)
            device = self._devices[-1]
            counted = {id(state) for program in programs.stages for state in program.states}
            own = [state for metric in keras_model.own_metrics(self._model) for state in metric.variables]
            states = [state for state in own if id(state) not in counted]
            loss = LossProgram(self._model, self._division, outputs, specs, device, training=training, states=states)
            if training:
                live = [value for value, back in zip(programs.outputs, loss.sends_back, strict=True) if back]
                programs = self._of_stages.without_dead_ends(programs, live)
                find_kinds(programs, loss, self.examples.like(batch), self._flat, mixing=self._allows_mixing)
            self._check_own_loss(programs)
            self._compiled = {other: one for other, one in self._compiled.items() if other[0] != training}
            metrics = self._metrics_program(programs, specs) if keras_model.counts_metrics(self._model) else None
            self._compiled[key] = StepPrograms(programs, loss, metrics)
        return self._compiled[key]

    @property
    def optimizer(self) -> keras.Optimizer:
        """The model's optimizer."""
        return self._model.optimizer

    def _loss_scale(self) -> tf.Tensor:
        with tf.device(self._devices[-1]):
            scale: tf.Tensor = self._model.optimizer.scale_loss(tf.ones((), keras.config.floatx()))
            return scale

    def _begin(self, batch: Any, scale: tf.Tensor, *, training: bool, timed: bool = False) -> StepContext:
        """Cut a batch and prepare to run it, with the losses and, unless it is only timed, metrics behind it."""
        with tf.init_scope():
            compiled = self.compile(batch, training=training)
        assert self._division is not None, "prepare comes before the steps"
        microbatches = cut_batch(batch, self._schedule.num_microbatches)
        flat = [self._flat(keras.utils.unpack_x_y_sample_weight(one.batch)[0]) for one in microbatches]
        divisors = tf.zeros([0], tf.float64)
        if compiled.loss.needs_divisors:
            call = functools.partial(self._call, training=training)
            divisors = compiled.loss.divisors(batch, microbatches[0].num_examples, call)
        counts = [BatchWeights(one.share, one.size, one.num_examples) for one in microbatches]
        factors = [self._division.added_factors(training, one) for one in counts]
        states = [variable.value.read_value() for variable in compiled.loss.states]
        weights: list[Any] = [None] * len(compiled.loss.parameters)

        def loss(number: int, outputs: list[MaskedTensor]) -> LossPart:
            one = microbatches[number]
            layer_states, parameters = (
                [execution.state(variable, number) for variable in variables]
                for variables in (compiled.loss.layer_states, compiled.loss.parameters)
            )
            part = compiled.loss.part(number, one, outputs, states, layer_states, parameters, divisors, scale)
            states[:] = [tf.where(one.counted > 0, new, old) for new, old in zip(part.states, states, strict=True)]
            if part.weights:
                weights[:] = compiled.loss.sum_rows(weights, part.weights)
            execution.note(compiled.loss.layer_states, number, part.layer_states)
            if compiled.update_metrics is not None and not timed:
                tensors, masks = [value.tensor for value in outputs], [value.mask for value in outputs]
                compiled.update_metrics(one.counted, one.part, one.batch, tensors, masks)
            return part

        sums = None if timed else self._sums_in_call(batch, training)
        execution = Execution(compiled.programs, microbatches, flat, scale, factors, loss, sums, timed=timed)
        return StepContext(execution, compiled.loss, states, weights)

    def _finish(self, batch: Any, run: StepContext, penalties: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the loss of the batch; keep new states and count the loss."""
        loss = tf.add_n([tf.cast(part, keras.config.floatx()) for part in (*run.execution.losses, *penalties)])
        new_states = [*run.execution.new_states(), *run.loss.counted(run.states)]
        self._keep_states(new_states, [*run.execution.ends, loss])
        self._update_trackers(batch, loss, run.execution)
        return loss

    def _keep_states(self, new_states: Sequence[tuple[keras.Variable, tf.Tensor]], ends: Sequence[tf.Tensor]) -> None:
        """Assign states when all that reads them has run."""
        with tf.control_dependencies([tf.group(*ends)]), follow_data():
            for variable, value in new_states:
                variable.assign(value)

    def _programs(self, inputs: Any, *, training: bool) -> Programs:
        return self._of_stages.programs(inputs, self._trainable, self._ways(training), training=training)

    def _ways(self, training: bool) -> tuple[Way, ...]:
        """Return what losses that layers compute need of the whole batch; nothing where there is no other batch."""
        if self._division is None or self._schedule.num_microbatches == 1:
            return ()
        return self._division.ways[training]

    def _sums_in_call(self, batch: Any, training: bool) -> tf.Tensor | None:
        """Return what losses that layers compute take of the whole batch; of the model only that much is run."""
        ways, found = self._ways(training), list[tf.Tensor]()
        if not needs_pass(ways):
            return None
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with keras.StatelessScope(), counting(ways, found):
            self._call(inputs, training)
        return tf.stack(found)

    @property
    def _trainable(self) -> tuple[int, ...]:
        """Which weights train, for what was compiled with others."""
        return tuple(map(id, self._model.trainable_variables))

    def _check_own_loss(self, programs: Programs) -> None:
        """Refuse a compute_loss of the user's own together with losses that it would have to add up."""
        penalized = [variable.path for variable in self._model.trainable_variables if variable.regularizer is not None]
        adds = [program.stage.index for program in programs.stages if program.num_losses]
        if keras_model.overridden(self._model, "compute_loss") and (penalized or adds):
            what = f"a penalty on {penalized[0]!r}" if penalized else f"an added loss in stage {adds[0]}"
            raise ValueError(
                f"In a pipeline a model that overrides compute_loss can have no other losses, and "
                f"{type(self._model).__name__} has {what}: what its compute_loss makes of them is not known. Leave "
                "compute_loss to Keras, or train on SingleDevice()."
            )

    def _metrics_program(self, programs: Programs, batch: Any) -> Any:
        """Compile the update of the metrics with the outputs of one micro-batch."""
        flows = [programs.flows[value] for value in programs.outputs]

        def update(
            counted: tf.Tensor, part: tf.Tensor, batch: Any, tensors: list[tf.Tensor], masks: list[Any]
        ) -> tf.Tensor:
            def count() -> tf.Tensor:
                inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
                outputs = keras.tree.pack_sequence_as(
                    self._graph.outputs, list(map(keras_pipeline.with_mask, tensors, masks))
                )
                with keras_losses.scalars_weighted(lambda _: part):
                    metric_logs.update_metrics(self._model, inputs, targets, outputs, weights, whole=False)
                return tf.constant(True)

            return tf.cond(counted > 0, count, lambda: tf.constant(False))

        counts = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)]
        specs = [*counts, batch, [flow.spec for flow in flows], [flow.mask for flow in flows]]
        return keras_pipeline.noinline_function(
            update, *specs
        )  # its conditional has no place in the loop around the steps

    def _forwards(self) -> list[Action]:
        stages, microbatches = range(self._schedule.num_stages), range(self._schedule.num_microbatches)
        return [Action("F", stage, number) for number in microbatches for stage in stages]

    def _flat(self, inputs: Any) -> dict[Value, tf.Tensor]:
        return dict(zip(self._graph.inputs, model_graph.standardize(self._model, inputs), strict=True))

    def _call(self, inputs: Any, training: bool) -> Any:
        """Run the whole model, stage after stage, in the order in which its added losses count."""
        tensors: dict[Value, Any] = self._flat(inputs)
        for stage, device in zip(self._of_stages.stages, self._devices, strict=True):
            with copied_to(device, stage.variables) as losses:
                model_graph.run(stage.calls, tensors, training)
            layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
            for loss in losses:
                (layers or [self._model])[0].add_loss(loss)
        return keras.tree.map_structure(lambda value: tensors[value], self._graph.outputs)

    @property
    def _has_shapes(self) -> bool:
        """Whether all sizes of the outputs but the number of examples are known."""
        return all(None not in value.shape[1:] for value in keras.tree.flatten(self._graph.outputs))

    def _zeros(self, inputs: Any) -> Any:
        """Return outputs of the right shapes and types."""
        num_examples = data.num_rows(inputs)
        return keras.tree.map_structure(
            lambda value: tf.zeros([num_examples, *value.shape[1:]], value.dtype), self._graph.outputs
        )

    def _update_trackers(self, batch: Any, loss: tf.Tensor, execution: Execution) -> None:
        """Count the loss of the step, and that of each output where Keras logs them."""
        num_examples = execution.microbatches[0].num_examples
        # Keras weighs the loss of an output by the size of the batch where that is fixed, and else by one.
        fixed_size = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None).shape[0]
        keras_model.loss_tracker(self._model).update_state(loss, sample_weight=num_examples)
        for index, tracker in enumerate(keras_pipeline.trackers_of_losses(self._model)):
            whole = tf.add_n([part.of_outputs[index] for part in execution.loss_parts])
            tracker.update_state(whole, sample_weight=fixed_size)


def _specs(structure: Any) -> Any:
    """Return the specs of a batch of any size."""
    return tf.nest.map_structure(lambda tensor: None if tensor is None else spec_of(tensor), structure)
