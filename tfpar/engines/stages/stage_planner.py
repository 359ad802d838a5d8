"""Planning of stages: costs, partition, placement of weights, and compilation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import keras

from tfpar import cluster, data
from tfpar._compat.models import keras_losses
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.random_numbers import random_state
from tfpar._compat.variables import keras_variables
from tfpar.engines.stages.model_version import ModelVersion
from tfpar.messages import user_warnings
from tfpar.messages.number_format import figure
from tfpar.per_model import PerModel
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.analysis.communication_timing import measure_transfers
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.partition.blocks import num_blocks
from tfpar.pipeline.partition.layer_profile import CallCost, measure, update_trainable_bytes
from tfpar.pipeline.partition.partitioner import Balance, MemoryNeeds, Partition, partition_model
from tfpar.pipeline.partition.stages import bytes_per_example, variable_owners
from tfpar.pipeline.partition.traffic import Grid, sort_by_traffic
from tfpar.pipeline.schedule.simulator import Durations
from tfpar.pipeline.schedule.transfer_hiding import hide_transfers
from tfpar.pipeline.stages.compiler import StageCompiler
from tfpar.placement.owners import placements
from tfpar.placement.weight_devices import place_weights
from tfpar.recomputation.choice import Recompute
from tfpar.sharding.model_sharding import ModelSharding
from tfpar.sharding.rules import Rules
from tfpar.sharding.stages import Groups, ShardedStage, shard_stages


class StagePlanner:
    """Cuts models into stages and places the weights of each stage on its device.

    Args:
        schedule: Schedule for a model with enough layer calls.
        devices: Devices of the schedule.
        balance: As for `Pipeline`.
        recompute: As for `Pipeline`.
        memory_limit_bytes: As for `Pipeline`.
        allow_batch_dependence: Whether batch-dependent layers are allowed.
        vote: Returns a context that raises an error of one worker on all workers.
        agree: Returns the chief's value of a JSON structure; None without other workers.
        other_orders: Other orders of the same devices; each model uses the order with the least traffic.
        shards_weights: Whether weights are sharded over the replicas, each of which runs all stages on one device.
        groups: Devices of the shards of each stage, by the first of them, which is in `devices`; empty without shards.
        rules: Sharding rules of the user; None to choose the divided weights from the graph.

    Attributes:
        num_state_shards: Number of workers that the optimizer state of a stage is sharded over.
    """

    num_state_shards: int = 1

    def __init__(
        self,
        schedule: schedules.Schedule,
        devices: Sequence[str],
        balance: Balance | Sequence[int] | Sequence[str],
        recompute: Recompute,
        memory_limit_bytes: int | None,
        allow_batch_dependence: bool,
        vote: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        agree: Callable[[Any], Any] | None = None,
        other_orders: Sequence[Sequence[str]] = (),
        *,
        shards_weights: bool = False,
        groups: Groups = MappingProxyType({}),
        rules: Rules | None = None,
    ) -> None:
        self._schedule, self._devices, self._shards_weights = schedule, devices, shards_weights
        self._groups, self._rules, self._orders = groups, rules, [devices, *other_orders]
        self._sharded: PerModel[dict[int, tuple[ModelSharding, ShardedStage]]] = PerModel()
        self._grids: PerModel[list[Grid]] = PerModel()
        self._vote, self._agree, self._balance, self._recompute = vote, agree, balance, recompute
        self._memory_limit_bytes, self._allow_batch_dependence = memory_limit_bytes, allow_batch_dependence
        self._schedules: PerModel[schedules.Schedule] = PerModel()
        self._partitions: PerModel[Partition] = PerModel()
        self._versions: PerModel[ModelVersion] = PerModel()
        self._sizes: PerModel[list[int]] = PerModel()
        self._stages: PerModel[StageCompiler] = PerModel()

    def drop_changed(self, model: keras.Model) -> bool:
        """Drop cached stages if the model has changed; return True if any were dropped.

        Another strategy may have moved its weights, or settings of its layers may differ since the last `compile`.
        """
        version = self._versions.get(model)
        if version is None:
            return False
        if not version.is_moved(model):
            if not version.has_other_settings(model):
                return False
            # Stages of the same sizes keep every weight on its device.
            self._sizes[model] = [len(stage.calls) for stage in self._partitions[model].stages]
        self.drop(model)
        return True

    def drop(self, model: keras.Model) -> None:
        """Drop the cached stages of a model."""
        self._partitions.pop(model)
        self._stages.pop(model)
        self._versions.pop(model)

    def check_settings(self, model: keras.Model, training: bool) -> None:
        """Refuse to trace a step if the model has changed since its stages were traced.

        Raises:
            ValueError: If the settings of a layer or the `call` of the model have changed.
        """
        self._versions[model].check_settings(model, training)
        model_graph.check_unchanged(model, self._partitions[model].graph)

    def _balance_of(self, model: keras.Model, graph: model_graph.Graph) -> Balance | Sequence[int] | Sequence[str]:
        """Return the sizes of dropped stages if they still fit the graph, else the balance of the user."""
        sizes = self._sizes.get(model) or []
        return sizes if sum(sizes) == len(graph.calls) else self._balance

    def place_early(self, model: keras.Model) -> None:
        """Place the weights of a functional model before its first batch, without measured times."""
        if model not in self._partitions and model.built and getattr(model, "inputs", None):
            with self._vote(), random_state.stand_in_generator():
                graph = self._trace(model)
                balance = self._balance_of(model, graph)
                balance = "parameters" if balance in ("time", "flops") else balance
                costs = self._measure(graph, balance, (), 1)
            # Rules are checked against the stages, and several stages may change with measured times.
            rules = self._rules if self.divides_one_stage else None
            self._cut(model, graph, balance, costs, 1, warns=self.divides_one_stage, rules=rules)

    def plan(self, model: keras.Model, batch: Any) -> None:
        """Cut a model into stages with its first batch, and again for a new optimizer with a memory limit.

        Args:
            model: A compiled model.
            batch: The first global batch.

        Raises:
            ValueError: If the model cannot be cut into stages.
        """
        if model not in self._stages and not self._is_placed_for(model, batch):
            self._trace_and_cut(model, batch)
        elif self._memory_limit_bytes is not None:  # a new optimizer may have more slots per weight
            before = self._partitions[model]
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            size = self.microbatch_size(inputs)
            costs = update_trainable_bytes(before.graph, before.costs)
            self._cut(model, before.graph, self._balance, costs, size, rules=self._rules)
            self._hide_transfers(model, size)
        if model not in self._stages:
            self._stages[model] = StageCompiler(
                model,
                self._partitions[model].graph,
                self._partitions[model].stages,
                self.stage_devices(model),
                recompute=self._recompute,
                splits_backward=self._schedule.splits_backward,
                accumulates=self._schedule.microbatches_per_replica > 1,
                shards_weights=self._shards_weights,
                sharded_calls=dict(enumerate(calls for _, calls in self.sharded_stages(model))),
                groups=self._groups,
                pads=self._schedule.num_microbatches > 1 and not self._allow_batch_dependence,
            )

    def _is_placed_for(self, model: keras.Model, batch: Any) -> bool:
        """Return True if the stages from before the first batch are final: no measurement, no absent input."""
        is_final = self.divides_one_stage and self._balance == "parameters" and model in self._partitions
        return is_final and all(data.present_inputs(batch))

    def stages_of(self, model: keras.Model) -> StageCompiler:
        """Return the compiled stages of a model."""
        return self._stages[model]

    def partition_of(self, model: keras.Model) -> Partition:
        """Return the partition of a model into stages."""
        return self._partitions[model]

    def schedule_of(self, model: keras.Model) -> schedules.Schedule:
        """Return the schedule of a model, with fewer stages if it has few layer calls."""
        return self._schedules.get(model) or self._schedule

    def memory_of(self, model: keras.Model) -> MemoryNeeds:
        """Return the memory that the stages of a model need besides weights and gradients."""
        # A split backward pass saves recomputed activations until the weight gradient.
        one_at_a_time = self._recompute is True and not self._schedule.splits_backward
        num_activations = 1 if one_at_a_time else max(schedules.peak_activations(self.schedule_of(model)))
        num_slots = keras_optimizer.slots_per_weight(keras_variables.optimizer_of(model), model.trainable_variables)
        return MemoryNeeds(self._memory_limit_bytes, -(-num_slots // self.num_state_shards), num_activations)

    def microbatch_size(self, inputs: Any) -> int:
        """Return the size of the largest micro-batch of a batch."""
        return -(-int(data.num_rows(inputs)) // self._schedule.num_microbatches)

    def stage_devices(self, model: keras.Model) -> list[str]:
        """Return the device of each stage of the first replica."""
        return self._grids[model][0].devices[0]

    def other_stage_devices(self, model: keras.Model) -> list[list[str]]:
        """Return the device of each stage of the other replicas."""
        return self._grids[model][0].devices[1:]

    def sharded_stages(self, model: keras.Model) -> list[tuple[ModelSharding, ShardedStage]]:
        """Return the layout and the layer calls of each stage; nothing for stages on one device each."""
        return list((self._sharded.get(model) or {}).values())

    def grids_of(self, model: keras.Model) -> list[Grid]:
        """Return the grid of a model, followed by those with more traffic between machines."""
        return self._grids[model]

    def _trace_and_cut(self, model: keras.Model, batch: Any) -> None:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        size = self.microbatch_size(inputs)
        with self._vote(), random_state.stand_in_generator():
            model_graph.build(model, inputs)
            with keras_losses.collect_added_losses(list):
                graph = self._trace(model, inputs)
            balance = self._balance_of(model, graph)
            costs = self._measure(graph, balance, model_graph.standardize(model, inputs), size)
        warned = self.divides_one_stage and model in self._partitions
        self._cut(model, graph, balance, costs, size, warns=not warned, rules=self._rules)
        self._hide_transfers(model, size)

    @property
    def divides_one_stage(self) -> bool:
        """Whether a replica is a single stage of shards, which needs no balance."""
        return bool(self._groups) and self._schedule.num_stages == 1

    def _trace(self, model: keras.Model, inputs: Any = None) -> model_graph.Graph:
        """Trace a model. Several stages do not open blocks, whose symbolic sizes would cross the cuts."""
        opens = self.divides_one_stage
        return model_graph.trace(model, inputs, opens_blocks=opens, symbolic_sizes=opens)

    def _measure(
        self, graph: model_graph.Graph, balance: Balance, inputs: Sequence[Any], size: int
    ) -> Sequence[CallCost]:
        return measure(graph, inputs, size, self._devices[0], times=balance == "time", flops=balance == "flops")

    def _cut(
        self,
        model: keras.Model,
        graph: model_graph.Graph,
        balance: Balance,
        costs: Sequence[CallCost],
        size: int,
        warns: bool = False,
        rules: Rules | None = None,
    ) -> None:
        self._schedules[model] = schedule = self._fitted_schedule(model, graph, costs)
        memory = self.memory_of(model)
        cut = functools.partial(partition_model, graph, balance, schedule.num_stages, schedule.num_devices, costs, size)
        with self._vote():
            estimates = not self._shards_weights and not self._groups
            if memory.limit_bytes is None and estimates and self._free_bytes is not None:
                partition = _within_free_memory(
                    model.name, cut, memory, self._free_bytes, schedule.num_devices if warns else None
                )
            else:
                partition = cut(memory)
        if self._agree is not None:  # measured times and free memory differ between workers
            partition = partition.with_sizes(self._agree([len(stage.calls) for stage in partition.stages]))
        grids = [_stage_devices(schedule, order) for order in self._orders]
        self._grids[model] = sort_by_traffic(model, graph, partition.stages, grids, size * schedule.num_microbatches)
        if self._groups:
            grid, groups = self._grids[model][0].devices, self._groups
            with self._vote():
                self._sharded[model] = shard_stages(model, graph, partition.stages, grid, groups, rules, warns=warns)
        else:
            devices, stages = self._grids[model][0].devices, variable_owners(partition.stages, model.variables)
            home_of = placements(model, stages, len(devices), shards_weights=self._shards_weights)
            place_weights(model, lambda variable: [devices[home_of[id(variable)].owner][home_of[id(variable)].stage]])
        self._partitions[model] = partition
        self._versions[model] = ModelVersion(model, counts_variables=bool(self._groups))
        self._stages.pop(model)

    def _hide_transfers(self, model: keras.Model, size: int) -> None:
        """Use a schedule that hides transfers between processes, if the memory suffices."""
        partition, schedule, devices = self._partitions[model], self._schedules[model], self.stage_devices(model)
        if schedule.name != "1f1b" or self._balance == "memory":
            return
        cut_bytes = [size * sum(map(bytes_per_example, values)) for values in partition.cut_values]
        transfer_seconds = measure_transfers(devices, cut_bytes)
        if not any(transfer_seconds):
            return
        untimed = 10 * max(transfer_seconds)  # layers are timed only with balance="time"
        forward, backward = (
            tuple(sum(getattr(cost, name) for cost in costs) or untimed for costs in partition.stage_costs)
            for name in ("forward_seconds", "backward_seconds")
        )
        durations = Durations(forward, backward, (), (), transfer_seconds)
        self._schedules[model] = hide_transfers(schedule, durations)
        memory, limit_bytes = self.memory_of(model), self._memory_limit_bytes or self._free_bytes
        if limit_bytes is not None and max(partition.device_bytes(memory, schedule.num_devices)) > limit_bytes:
            self._schedules[model] = schedule

    @functools.cached_property
    def _free_bytes(self) -> int | None:
        """Free memory of the GPU with the least, before the first model is placed; None without GPUs."""
        return cluster.free_bytes(self._devices)

    def _fitted_schedule(
        self, model: keras.Model, graph: model_graph.Graph, costs: Sequence[CallCost]
    ) -> schedules.Schedule:
        """Return the schedule, with fewer stages and a warning if the model has too few layer calls."""
        if self._shards_weights:
            number = num_blocks([cost.weight_bytes for cost in costs])
            return schedules.on_one_device(number).replicated(self._schedule.num_replicas)
        num_calls = len(graph.calls)
        if not isinstance(self._balance, str) or num_calls >= self._schedule.num_stages:
            return self._schedule
        fitted = schedules.limit_stages(self._schedule, num_calls)
        if model not in self._schedules:
            user_warnings.warn(
                f"{model.name!r} has {num_calls} layer call{'s' * (num_calls > 1)} for {self._schedule.num_stages} "
                f"stages: it runs in {fitted.num_stages} on {', '.join(self._devices[: fitted.num_devices])}. Set a "
                "smaller num_stages, or use Mirrored, which needs no stages."
            )
        return fitted


def _within_free_memory(
    name: str, cut: Callable[[MemoryNeeds], Partition], memory: MemoryNeeds, free_bytes: int, num_devices: int | None
) -> Partition:
    """Return a partition that fits the free memory of GPUs; if there is none, warn, as the needs are estimates.

    Args:
        name: Name of the model.
        cut: Returns the partition of the model for some memory needs.
        memory: Memory needs without a limit.
        free_bytes: Free memory of the GPU with the least.
        num_devices: Number of devices, for the warning; None for no warning.
    """
    with contextlib.suppress(ValueError):
        return cut(dataclasses.replace(memory, limit_bytes=free_bytes))
    partition = cut(memory)
    if num_devices is not None:
        needed = partition.device_bytes(memory, num_devices)
        user_warnings.warn(
            f"The stages of {name!r} need up to {figure(max(needed) / 1e6)} MB on one device, by estimate, and the GPU "
            f"with the least free memory has {figure(free_bytes / 1e6)} MB: training may run out of memory. Use "
            "balance='memory', more stages, smaller micro-batches or recompute=True, or end other processes on the "
            "GPUs."
        )
    return partition


def _stage_devices(schedule: schedules.Schedule, devices: Sequence[str]) -> list[list[str]]:
    """Return the device of each stage, for each replica."""
    names = [name if name.startswith("/") else f"/device:{name}" for name in devices]
    firsts = range(0, schedule.num_microbatches, schedule.microbatches_per_replica)
    return [[names[schedule.device_of(stage, first)] for stage in range(schedule.num_stages)] for first in firsts]
