"""Model parallelism: consecutive layers on different devices, and every batch through them in micro-batches."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import cluster, data
from tfpar._compat import keras_model, keras_pipeline, keras_tracing, keras_variables, random_state
from tfpar.messages import keyword_arguments
from tfpar.per_model import PerModel
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.analysis.prediction import Prediction, predict_step_time
from tfpar.pipeline.analysis.stage_table import stages_table
from tfpar.pipeline.analysis.step_timing import measure_step
from tfpar.pipeline.execution.compiled_stages import StagesOfModel
from tfpar.pipeline.execution.steps import PipelineSteps
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.batch_dependence import check_batch_independence, check_synchronized
from tfpar.pipeline.partition.layer_profile import CallCost, measure, update_trainable_bytes
from tfpar.pipeline.partition.partitioner import Balance, MemoryNeeds, Partition, check_balance, partition_model
from tfpar.pipeline.partition.placement import place_weights
from tfpar.pipeline.schedule.simulator import Timeline
from tfpar.reduction import objective
from tfpar.strategies.preview import Preview
from tfpar.strategies.single_replica import SingleReplica


class Pipeline(SingleReplica):
    """Train a model in stages on several devices of this machine, equal to one device.

        device 0   F0 F1 F2    B0 F3 B1 …        F: a micro-batch forward through the layers of this stage
        device 1      F0 B0 F1 B1 F2 B2 …        B: its gradient back through them

    The model function is the one for a single device. Its layers are divided into `num_stages` stages; each device
    holds the weights and the optimizer's state of its own stage only. Every global batch is cut into
    `num_microbatches`, so that the devices work at the same time; the losses are divided by the whole batch and the
    gradients of all micro-batches summed before the one update, so that the weights are those of one device. What
    differs: BatchNormalization takes its statistics from each micro-batch, and Dropout draws other masks.

    Args:
        num_stages: How many stages.
        num_microbatches: How many micro-batches a global batch is cut into; with one, the devices work in turn.
        schedule: "gpipe", "1f1b", "interleaved" (several stages a device) or "zero_bubble".
        balance: What is made as small as possible for the slowest stage: "time" (measured), "flops", "parameters" or
            "memory"; or the number of layers of each stage; or the names of the layers to cut before.
        devices: Device names such as `["GPU:0", "GPU:1"]`; None takes as many as the schedule needs.
        recompute: Save only the inputs of a stage, and repeat its forward pass in the backward pass: less memory for
            about a third more time.
        memory_limit_bytes: What a device may hold of weights, gradients, optimizer state and activations; None for no
            limit.
        allow_batch_dependent_layers: Also train layers that mix the examples of a batch, although micro-batches change
            what they compute.

    Raises:
        ValueError: If the schedule does not fit, or a device does not exist.

    Example:
        >>> tfpar.use_logical_cpus(2)
        >>> trainer = tfpar.Trainer(build_model, tfpar.Pipeline(num_stages=2, num_microbatches=8))
    """

    compiles_with_xla = False
    has_schedule = True

    @keyword_arguments.named
    def __init__(
        self,
        num_stages: int,
        num_microbatches: int,
        schedule: str = "1f1b",
        balance: Balance | Sequence[int] | Sequence[str] = "time",
        devices: Sequence[str] | None = None,
        recompute: bool = False,
        *,
        memory_limit_bytes: int | None = None,
        allow_batch_dependent_layers: bool = False,
    ) -> None:
        numbers = {"num_stages": num_stages, "num_microbatches": num_microbatches}
        if memory_limit_bytes is not None:
            numbers["memory_limit_bytes"] = memory_limit_bytes
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, received {value!r}.")
        check_balance(balance, num_stages)
        chosen = None if devices is None else cluster.resolve_devices(devices)
        self.schedule = schedules.make(schedule, num_stages, num_microbatches, None if chosen is None else len(chosen))
        self.devices = _devices(self.schedule) if chosen is None else chosen
        self._balance, self._recompute = balance, recompute
        self._memory_limit_bytes, self._allow_mixing = memory_limit_bytes, allow_batch_dependent_layers
        self._schedules: PerModel[schedules.Schedule] = PerModel()
        self._partitions: PerModel[Partition] = PerModel()
        self._num_moves: PerModel[int] = PerModel()
        self._stages: PerModel[StagesOfModel] = PerModel()
        self._adds_losses: PerModel[bool] = PerModel()
        self._lowerings: PerModel[PipelineSteps] = PerModel()
        self._present: PerModel[list[bool]] = PerModel()
        self._checked: PerModel[dict[bool, Any]] = PerModel()  # the compilation, by whether the model trains

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model is created: weights get memory when it is known where they live."""
        return keras_pipeline.deferred_weights()

    def describe(self) -> str:
        """Say in one line which devices run what."""
        one = self.schedule
        return (
            f"Pipeline of {one.num_stages} stage{'s' * (one.num_stages > 1)} on {', '.join(self.devices)}, "
            f"{one.num_microbatches} micro-batch{'es' * (one.num_microbatches > 1)}, {one.name}"
            + ", recomputing"
            * self._recompute
        )

    @property
    def batch_parts(self) -> tuple[int, str]:
        """The number of micro-batches of a global batch, and their noun."""
        return self.schedule.num_microbatches, "micro-batch"

    def adopt(self, model: keras.Model) -> None:
        """Give the model's weights memory where their stages run, as far as layers and shapes are known.

        Raises:
            ValueError: If it cannot be divided, or holds variables that are no Keras variables.
        """
        super().adopt(model)
        if objective.objectives_of(model):
            raise ValueError(
                f"A pipeline trains by the loss of compile, computed after the last stage, and {type(model).__name__} "
                "has objectives of its own. Train it with SingleDevice, Mirrored or MultiWorker."
            )
        if (self._num_moves.get(model) or 0) != keras_variables.num_moves(model.variables):
            for known in (self._partitions, self._stages, self._lowerings):  # another strategy had it meanwhile
                known.pop(model)
        if model not in self._partitions and model.built and getattr(model, "inputs", None):
            with random_state.stand_in_generator():
                graph = model_graph.trace(model)
            self._divide(model, graph, "parameters" if self._balance in ("time", "flops") else self._balance, (), 1)

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Divide the model into stages with the first batch, and give its weights memory there.

        A model that was compiled again keeps its stages; what depends on losses, metrics and the optimizer is new.

        Raises:
            ValueError: If it cannot be divided, or a layer mixes the examples of a batch.
        """
        data.check_same_inputs(self._present, model, batch)
        if model in self._stages:
            self._check_mixing(model, self._partitions[model].graph, batch, training)
        if model in self._lowerings and self._lowerings[model].compilation is keras_model.compilation(model):
            self._lowerings[model].examples.keep(batch)
            return
        if model not in self._stages:
            self._adds_losses[model] = self._read(model, batch, training)
        elif self._memory_limit_bytes is not None:  # the new optimizer may keep more for each weight
            before = self._partitions[model]
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            size = self._microbatch_size(inputs)
            self._cut(model, before.graph, self._balance, update_trainable_bytes(before.graph, before.costs), size)
        if model not in self._stages:
            self._stages[model] = StagesOfModel(
                model,
                self._partitions[model].graph,
                self._partitions[model].stages,
                self._stage_devices(model),
                recompute=self._recompute,
                splits_backward=self.schedule.splits_backward,
            )
        schedule = self.schedule_of(model)
        self._lowerings[model] = PipelineSteps(
            model, self._stages[model], schedule, self._adds_losses[model], self._allow_mixing
        )
        self._lowerings[model].examples.keep(batch)

    def _read(self, model: keras.Model, batch: Any, training: bool) -> bool:
        """Read a model's operations, check and divide them; return whether a layer adds a loss."""
        given, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        model_graph.build(model, given)
        with random_state.stand_in_generator():
            added: list[Any] = []
            with keras_model.collect_added_losses(lambda: added):
                graph = model_graph.trace(model, given)
            self._check_mixing(model, graph, batch, training)
            inputs = model_graph.standardize(model, given)
            self._divide(model, graph, self._balance, inputs, self._microbatch_size(given))
        # A layer tells while it runs on symbols; a model whose own `call` adds one is read.
        tells = added or any(isinstance(call.operation, keras_tracing.AddedLoss) for call in graph.calls)
        return bool(tells) or any(layer.activity_regularizer for layer in keras_model.all_layers(model))

    def _check_mixing(self, model: keras.Model, graph: model_graph.Graph, batch: Any, training: bool) -> None:
        """Refuse what micro-batches change in training, or in inference; once for as long as nothing is compiled."""
        compilation, checked = keras_model.compilation(model), self._checked.setdefault(model, {})
        if self.schedule.num_microbatches == 1 or self._allow_mixing or checked.get(training, self) is compilation:
            return
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        if training:
            check_synchronized(graph)
        with tf.device(self.devices[0]):
            check_batch_independence(graph, model_graph.standardize(model, inputs), training)
        checked[training] = compilation

    def _divide(
        self, model: keras.Model, graph: model_graph.Graph, balance: Balance, inputs: Sequence[Any], size: int
    ) -> None:
        costs = measure(graph, inputs, size, self.devices[0], times=balance == "time", flops=balance == "flops")
        self._cut(model, graph, balance, costs, size)

    def _cut(
        self, model: keras.Model, graph: model_graph.Graph, balance: Balance, costs: Sequence[CallCost], size: int
    ) -> None:
        self._schedules[model] = schedule = self._fitted(model, graph)
        memory = self._memory(model)
        partition = partition_model(graph, balance, schedule.num_stages, schedule.num_devices, costs, size, memory)
        place_weights(model, partition.stages, self._stage_devices(model))
        self._partitions[model] = partition
        self._num_moves[model] = keras_variables.num_moves(model.variables)
        self._stages.pop(model)

    def _fitted(self, model: keras.Model, graph: model_graph.Graph) -> schedules.Schedule:
        """Return the schedule of as many stages as a model has operations; with a warning where they are too few."""
        num_calls = len(graph.calls)
        if not isinstance(self._balance, str) or num_calls >= self.schedule.num_stages:
            return self.schedule
        fitted = schedules.limit_stages(self.schedule, num_calls)
        if model not in self._schedules:
            warnings.warn(
                f"{model.name!r} has {num_calls} layer call{'s' * (num_calls > 1)} for {self.schedule.num_stages} "
                f"stages: it runs in {fitted.num_stages} on {', '.join(self.devices[: fitted.num_devices])}. Set "
                "num_stages to no more, or use Mirrored, which needs no layers to divide.",
                stacklevel=2,
            )
        return fitted

    def schedule_of(self, model: keras.Model) -> schedules.Schedule:
        """Return the order in which the stages of a model run: with fewer stages where it has fewer layer calls."""
        return self._schedules.get(model) or self.schedule

    def _memory(self, model: keras.Model) -> MemoryNeeds:
        # Where the gradient of the weights waits, what recomputation made again for it waits too.
        one_at_a_time = self._recompute and not self.schedule.splits_backward
        num_activations = 1 if one_at_a_time else max(schedules.peak_activations(self.schedule_of(model)))
        num_slots = keras_pipeline.slots_per_weight(keras_variables.optimizer_of(model))
        return MemoryNeeds(self._memory_limit_bytes, num_slots, num_activations)

    def predict_step_time(self, model: keras.Model, batch: Any) -> Prediction:
        """Measure the stages on a batch and predict a step; nothing is trained.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: A global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If nothing has prepared the model, or not since it was compiled again.

        Example:
            >>> batch = trainer.build(dataset)
            >>> 0 < strategy.predict_step_time(trainer.model, batch).planned.bubble < 1
            True
        """
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        lowering = self._prepared(model)
        with self.step_context():
            return predict_step_time(
                self._partitions[model],
                lowering,
                self.schedule_of(model),
                self._stage_devices(model),
                self._memory(model),
                batch,
                self._microbatch_size(inputs),
            )

    def preview(self, model: keras.Model, batch: Any) -> Preview:
        """Return the stages as measured on a batch, the step that follows from them, and the picture of both."""
        outlook, schedule = self.predict_step_time(model, batch), self.schedule_of(model)
        table = stages_table(outlook.rows, outlook.planned, schedule)
        return Preview(table, outlook.rows, outlook.planned, schedule, outlook.durations)

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Run all actions of a step a few times and note when each really runs; nothing is trained.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: A global batch, `(inputs, targets, sample_weight)` as far as given.

        Raises:
            ValueError: If nothing has prepared the model, or not since it was compiled again.
        """
        lowering = self._prepared(model)
        with self.step_context():
            return measure_step(self.schedule_of(model), lambda actions: lowering.timed(batch, actions))

    def _prepared(self, model: keras.Model) -> PipelineSteps:
        lowering = self._lowerings.get(model)
        if lowering is None or lowering.compilation is not keras_model.compilation(model):
            raise ValueError(
                f"A model must be prepared with its first batch before its stages are measured, and {model.name!r} was "
                f"{'compiled again since' if lowering else 'not yet'}. Call trainer.build(dataset) first."
            )
        return lowering

    def _microbatch_size(self, inputs: Any) -> int:
        return -(-int(data.num_rows(inputs)) // self.schedule.num_microbatches)

    def _stage_devices(self, model: keras.Model) -> list[str]:
        """Return the device of each stage."""
        schedule = self.schedule_of(model)
        return [f"/device:{self.devices[schedule.device_of(stage)]}" for stage in range(schedule.num_stages)]

    def prepare(self, model: keras.Model, batch: Any) -> None:
        """Find out how losses divide over micro-batches; one that does not raises ValueError."""
        self._lowerings[model].prepare(batch)

    def prepare_loss(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Find out how what an overridden `compute_loss` returns divides over micro-batches, or refuse it."""
        self._lowerings[model].prepare_loss(batch, training)

    def step_context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which TensorFlow takes less time over the graph of a step, which is a large one."""
        return keras_pipeline.short_graph_optimization()

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on a batch; return the loss, a scalar."""
        return self._lowerings[model].train_step(batch)

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from a batch; return the loss, a scalar."""
        return self._lowerings[model].evaluate_step(batch)

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each."""
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        return self._lowerings[model].predict_step(inputs)


def _devices(schedule: schedules.Schedule) -> list[str]:
    """Return the first devices of this machine, as many as a schedule needs."""
    existing = cluster.resolve_devices(None)
    if len(existing) < schedule.num_devices:
        raise ValueError(
            f"{schedule.num_stages} stages under {schedule.name!r} need {schedule.num_devices} devices, and there are "
            f"{len(existing)}: {existing}. Use fewer stages, or, without GPUs, tfpar.use_logical_cpus(n)."
        )
    return existing[: schedule.num_devices]
