"""The engine of pipelines and of grids of replicas, stages and shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import data, process_lock
from tfpar._compat.graphs import tf_function
from tfpar._compat.models import keras_model
from tfpar._compat.optimizers import keras_sharded_updates
from tfpar._compat.random_numbers import random_state
from tfpar._compat.variables import keras_variables, keras_weight_placement
from tfpar.engines.optimizer_shards import LocalCommunicator, OptimizerShards
from tfpar.engines.preview import Preview
from tfpar.engines.shards_state import ShardsState
from tfpar.engines.single_replica import SingleReplica
from tfpar.engines.stages.shards_preview import shards_preview
from tfpar.engines.stages.stage_planner import StagePlanner
from tfpar.engines.steps.batches_ahead import StepBatch
from tfpar.engines.steps.hidden_errors import revealed
from tfpar.job import Job
from tfpar.messages import user_warnings
from tfpar.per_model import PerModel
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.analysis.prediction import Prediction, predict_step_time
from tfpar.pipeline.analysis.stage_table import stages_table
from tfpar.pipeline.analysis.step_timing import measure_step
from tfpar.pipeline.execution.other_workers import BatchSizes, Peers
from tfpar.pipeline.execution.step_compiler import StepCompiler
from tfpar.pipeline.execution.steps import PipelineSteps
from tfpar.pipeline.partition.partitioner import Balance
from tfpar.pipeline.partition.traffic import describe_traffic
from tfpar.pipeline.schedule.simulator import Timeline
from tfpar.recomputation.choice import Recompute
from tfpar.reduction import objective
from tfpar.reduction.verdict import Verdict
from tfpar.sharding.rules import Rules
from tfpar.sharding.stages import groups_of
from tfpar.sharding.whole_layers import lines_of
from tfpar.study.known_layers import check_parts, check_synchronized
from tfpar.study.outputs import Words
from tfpar.study.report import gathering
from tfpar.study.study import Abilities, check_state_of_stages, study
from tfpar.workers import remote_devices

_ALONE = "use a Pipeline with num_microbatches=1"
WORDS_OF_STAGES = Words(alone=_ALONE, mixing=f"{_ALONE}, or allow_batch_dependent_layers=True to accept other results")


class Settings(NamedTuple):
    """The settings of stages that do not depend on their devices; see `Pipeline`.

    Attributes:
        strategy: Name of the strategy at the beginning of a sentence.
        words: Advice of the strategy in error messages.
        has_schedule: Whether the computation of several stages or micro-batches is scheduled.
    """

    balance: Balance | Sequence[int] | Sequence[str] = "parameters"
    recompute: Recompute = False
    memory_limit_bytes: int | None = None
    allow_batch_dependent_layers: bool = False
    num_shards: int = 1
    layout: Rules | None = None
    strategy: str = "A pipeline"
    words: Words = WORDS_OF_STAGES
    has_schedule: bool = True


class StageEngine(ShardsState, SingleReplica):
    """The steps of a model in stages, on one replica of a pipeline or several.

    Args:
        settings: The pipeline.
        schedule: The order of the actions of all replicas of this process.
        devices: Those of the schedule, the devices of the first replica first; for each all those of its shards.
        peers: The other workers of a job; None for none.
        other_orders: Other orders of the same devices, on several machines.
        job: The workers; None for this process alone.
        shards_weights: Whether the weights are divided over the devices, each with all stages of a replica.
        misfit: Why the workers cannot share the stages, though replicas of them might; None if they can.
        shards: The owners of the weights among the workers; None if each worker updates all of them.
    """

    _shards: OptimizerShards
    cuts_model = True

    def __init__(
        self,
        settings: Settings,
        schedule: schedules.Schedule,
        devices: Sequence[str],
        peers: Peers | None = None,
        other_orders: Sequence[Sequence[str]] = (),
        *,
        job: Job | None = None,
        shards_weights: bool = False,
        misfit: ValueError | None = None,
        shards: OptimizerShards | None = None,
    ) -> None:
        if job is not None:
            self.job = job
        self._misfit = misfit
        self.settings, self.schedule, self.devices, self._peers = settings, schedule, list(devices), peers
        self.num_replicas = schedule.num_replicas
        if not any("/job:" in device for device in devices):  # a lost worker would not answer
            self.step_again = self._step_again
        self._groups = groups_of(devices, settings.num_shards)
        self._planner = StagePlanner(
            schedule,
            devices[:: settings.num_shards],
            settings.balance,
            settings.recompute,
            settings.memory_limit_bytes,
            settings.allow_batch_dependent_layers,
            self.job.vote,
            None if peers is None else self.job.agree,
            other_orders,
            shards_weights=shards_weights,
            groups=self._groups,
            rules=settings.layout,
        )
        self._shards = OptimizerShards(Job(), LocalCommunicator()) if shards is None else shards
        self._steps: PerModel[PipelineSteps] = PerModel()
        self._present: PerModel[list[bool]] = PerModel()

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that creates a model without weights, which are allocated with the stages.

        Raises:
            ValueError: If the stages do not fit the workers.
        """
        if self._misfit is not None:
            raise self._misfit
        return keras_weight_placement.deferred_weights()

    @property
    def device_names(self) -> list[str]:
        """Readable names of the devices; those of other workers include their rank."""
        return list(map(remote_devices.label, self.devices))

    def _holds(self, variable: keras.Variable) -> bool:
        """Return whether no strategy replicates a variable, and, without shards, whether it is whole."""
        return keras_variables.home_of(variable) is None if self._groups else super()._holds(variable)

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average, if the optimizer has one."""
        self._shards.finalize(model, model.optimizer)

    @property
    def chooses_xla(self) -> bool:  # type: ignore[override]
        """Whether `jit_compile="auto"` may choose XLA, which compiles stages on one device each."""
        return not self._groups

    @property
    def scheduled(self) -> StageEngine | None:
        """This engine; None without a schedule."""
        return self if self.settings.has_schedule else None

    @property
    def batch_parts(self) -> tuple[int, str]:
        """Number of micro-batches per global batch, and their noun."""
        return self.schedule.num_microbatches * self.job.num_workers, "micro-batch"

    def move_model(self, model: keras.Model) -> None:
        """Move a model here, and place its weights on the devices of their stages if its shapes are known.

        Raises:
            ValueError: If the model cannot be cut into stages, keeps state per example, or has variables that are not
                Keras variables.
        """
        super().move_model(model)
        check_parts(model, training=False)
        if objective.objectives_of(model):
            raise ValueError(
                f"{self.settings.strategy} trains with the loss of compile, and {type(model).__name__} has objectives. "
                "Train it with SingleDevice, or Mirrored or MultiWorker, also with shard='optimizer'."
            )
        if self._planner.drop_changed(model):
            self._steps.pop(model)
        self._planner.place_early(model)

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Cut the model into stages with the first batch, and place its weights on their devices.

        A model that was compiled again keeps its stages; its loss, metrics and optimizer are traced again.

        Raises:
            ValueError: If the model cannot be cut, or a layer is batch-dependent.
        """
        with self.job.vote():
            self._check_inputs(model, data.present_inputs(batch))
        is_planned = model in self._steps and self._steps[model].compiler.compilation is keras_model.compilation(model)
        if not is_planned:
            self._planner.plan(model, batch)
        if training and any(sharding.weights for sharding, _ in self._planner.sharded_stages(model)):
            _check_optimizer(model, f"{self.settings.strategy}{' with num_shards' * self.settings.has_schedule}")
        super().place(model, batch, training)
        if not is_planned:
            self._steps[model] = self._new_steps(model)
        self._steps[model].keep_first(batch, training)

    def _new_steps(self, model: keras.Model) -> PipelineSteps:
        schedule = self._planner.schedule_of(model)
        compiler = StepCompiler(
            self._planner.stages_of(model),
            schedule.num_microbatches * self.job.num_workers,
            self._planner.other_stage_devices(model),
            None if self._peers is None else self.job.agree,
        )
        return PipelineSteps(compiler, schedule, self._peers, functools.partial(self._apply, model))

    def _apply(self, model: keras.Model, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
        """Run the optimizer; of sharded weights the gradients and weights are shards."""
        sums = [None if gradient is None else (gradient,) for gradient in gradients]
        self._shards.apply(model, model.optimizer, weights, sums)

    def _check_inputs(self, model: keras.Model, present: list[bool]) -> None:
        """Refuse other optional inputs than in the first batch; a single stage of shards is planned again instead."""
        before = self._present.setdefault(model, present)
        if before == present or len(before) != len(present):
            return
        if not self._planner.divides_one_stage:
            raise ValueError(
                "All batches of a pipeline must have the same optional inputs, received a batch with None in other "
                "places than in the first batch. Use a separate tfpar.Trainer for each kind of batch, or Mirrored."
            )
        self._present[model] = present
        self._planner.drop(model)
        self._steps.pop(model)

    def schedule_of(self, model: keras.Model) -> schedules.Schedule:
        """Return the schedule of a model, which may have fewer stages or run all forward passes first."""
        steps = self._steps.get(model)
        return self._planner.schedule_of(model) if steps is None else steps.schedule

    def predict_step_time(self, model: keras.Model, batch: Any) -> Prediction:
        """Predict the time of a step from measurements of its stages; all workers must call this."""
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        steps = self._prepared(model)
        self._planner.check_settings(model, training=True)
        with process_lock.ProcessLock(), self.step_context(), self.job.reported(), self._revealed(model, batch):
            return predict_step_time(
                self._planner.partition_of(model),
                steps,
                self._planner.schedule_of(model),
                [self._planner.stage_devices(model), *self._planner.other_stage_devices(model)],
                self._planner.memory_of(model),
                batch,
                self._planner.microbatch_size(inputs),
                self._peers,
                self._groups,
            )

    def preview(self, model: keras.Model, batch: Any, title: str) -> Preview:
        """Return the measured stages and the predicted schedule; without a schedule, the bytes of each device."""
        if not self.settings.has_schedule:
            self._prepared(model)
            ((sharding, stage),) = self._planner.sharded_stages(model)
            num_examples = int(data.num_rows(batch))
            return shards_preview(title, model, stage.calls, sharding, num_examples, list(self._groups.values()))
        prediction, schedule = self.predict_step_time(model, batch), self.schedule_of(model)
        between_workers = describe_traffic(self._planner.grids_of(model))
        stages = self._planner.sharded_stages(model)
        lines = [line for sharding, stage in stages for line in lines_of(stage.calls, sharding)]
        table = stages_table(
            prediction.rows,
            prediction.planned,
            schedule,
            prediction.included,
            prediction.not_measured,
            between_workers,
            self.job.num_workers,
            self.settings.num_shards,
            ["The memory is that of all shards of a stage together.", *lines] if stages else [],
        )
        return Preview(table, prediction.rows, prediction.planned, schedule, prediction.durations)

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Run the actions of a step a few times and measure when each runs; no weight changes."""
        steps = self._prepared(model)
        self._planner.check_settings(model, training=True)
        with process_lock.ProcessLock(), self.step_context(), self._revealed(model, batch):
            return measure_step(self.schedule_of(model), lambda schedule: steps.timed(batch, schedule))

    def _prepared(self, model: keras.Model) -> PipelineSteps:
        steps = self._steps.get(model)
        if steps is None or steps.compiler.compilation is not keras_model.compilation(model):
            raise ValueError(
                f"A model must be prepared with its first batch before its stages are measured, and {model.name!r} was "
                f"{'compiled again since' if steps else 'not yet'}. Call trainer.build(dataset) first."
            )
        return steps

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Find out how micro-batches give the losses, metrics and states of the whole batch, or refuse the model."""
        super().study(model, batch, kind)
        training = kind == "train"
        check_parts(model, training)
        if self.batch_parts[0] == 1:
            with tf.device(self.devices[0]), random_state.stand_in_generator():
                check_state_of_stages(model, batch, kind, self.settings.words)
            return
        accepts = self.settings.allow_batch_dependent_layers
        adds_states = self.schedule.num_replicas > 1 or self._peers is not None  # replicas update metrics separately
        abilities = Abilities(self.settings.words, gathers=False, adds_states=adds_states, accepts_mixing=accepts)
        with self.job.vote(), tf.device(self.devices[0]), random_state.stand_in_generator():
            if training and not accepts:
                check_synchronized(model, self.settings.words.mixing)
            verdict, _ = study(model, batch, kind, abilities)
        if self._peers is not None:
            verdict = Verdict.of_json(self.job.agree(verdict.to_json()))
        if kind != "predict":
            self._steps[model].compiler.losses.verdicts[training] = verdict
            cost = self._cost_of_order(model) if training and verdict.takes_whole_loss else ""
            if self.job.is_chief and (line := gathering(model, verdict, "the last stage", cost)):
                user_warnings.warn(line)

    def _cost_of_order(self, model: keras.Model) -> str:
        """Describe the memory that running all forward passes first costs; empty if it costs none."""
        before, after = (
            max(schedules.peak_activations(schedule.first_replica))
            for schedule in (self._planner.schedule_of(model), self.schedule_of(model))
        )
        if before == after:
            return ""
        return (
            f"All forward passes of a step come first (the order of GPipe): a device keeps the activations of {after} "
            f"micro-batches, not of {before}. A loss with one value per example keeps fewer."
        )

    def verdict(self, model: keras.Model) -> Verdict | None:
        """Return the verdict of the study for train steps."""
        return self._steps[model].compiler.losses.verdicts.get(True)

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which TensorFlow optimizes the large graph of a step only once."""
        return tf_function.short_graph_optimization()

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the batch, each tensor for the devices of the stages that read it."""
        return StepBatch(*self._steps[model].staged(element))

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Run one optimizer update on a batch; return the loss, a scalar."""
        self._planner.check_settings(model, training=True)
        return self._steps[model].train_step(*self._local(batch))

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the metrics with a batch; return the loss, a scalar."""
        self._planner.check_settings(model, training=False)
        return self._steps[model].evaluate_step(*self._local(batch))

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the outputs for a batch, `[batch, ...]` each."""
        self._planner.check_settings(model, training=False)
        local, part = self._local(batch)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(local)
        return self._steps[model].predict_step(inputs, part)

    def _revealed(self, model: keras.Model, batch: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that finds the error of a failed train step on a batch."""
        again = self.step_again
        if again is None or self._peers is not None:
            return contextlib.nullcontext()
        return revealed(lambda: again(model, "train", batch))

    def _step_again(self, model: keras.Model, kind: str, element: Any) -> None:
        """Run the actions of a failed "train", "evaluate" or "predict" step one after another."""
        batch, part = self._local_alone(element)
        if kind == "predict":
            batch, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._steps[model].run_again(batch, part, kind)

    def _local(self, element: Any) -> tuple[Any, BatchSizes | None]:
        """Return the local batch of an element, and what part of the global batch it is; None for all of it."""
        return element, None

    def _local_alone(self, element: Any) -> tuple[Any, BatchSizes | None]:
        """Return what `_local` does, as if the local batch were the global batch; no message to other workers."""
        return self._local(element)


def _check_optimizer(model: keras.Model, strategy: str) -> None:
    """Refuse an optimizer that needs whole weights.

    Args:
        model: A compiled model with sharded weights.
        strategy: The strategy, for the message.

    Raises:
        ValueError: If its optimizer is not known to update each element of a weight separately.
    """
    if not keras_sharded_updates.is_elementwise(model.optimizer):
        name = type(keras_variables.innermost(model.optimizer)).__name__
        raise ValueError(
            f"{strategy} updates each shard of a weight on its own device, so the optimizer must update each "
            f"element separately, as Adam and SGD do, received {name}. Choose such an optimizer of Keras, or train "
            "with Mirrored(shard='optimizer'), where each weight is whole."
        )
