"""What a pipeline will be like before it trains: its stages, its step and its memory, measured and computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar.pipeline.analysis import step_timing
from tfpar.pipeline.analysis.stage_table import StageRow
from tfpar.pipeline.execution.steps import PipelineSteps
from tfpar.pipeline.partition.partitioner import MemoryNeeds, Partition
from tfpar.pipeline.partition.stages import bytes_per_example
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.simulator import Durations, Timeline, peak_bytes, simulate


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a pipeline will be like.

    Args:
        rows: One a stage.
        durations: How long its actions take, measured in a short step, and what they keep.
        planned: The step that follows from them, the optimizer included.
    """

    rows: tuple[StageRow, ...]
    durations: Durations
    planned: Timeline


def predict_step_time(
    partition: Partition,
    lowering: PipelineSteps,
    schedule: Schedule,
    devices: Sequence[str],
    memory: MemoryNeeds,
    batch: Any,
    microbatch_size: int,
) -> Prediction:
    """Measure the stages of a model on a batch, and compute from that what a step will be like.

    Args:
        partition: The stages.
        lowering: Their functions.
        schedule: The order of actions.
        devices: One a stage.
        memory: What training needs of memory.
        batch: A global batch.
        microbatch_size: Examples of a micro-batch.
    """
    programs = lowering.compile(batch, training=True).programs
    kept = [program.kept(microbatch_size) for program in programs.stages]
    durations = dataclasses.replace(
        step_timing.measure_durations(schedule, lambda actions: lowering.timed(batch, actions)),
        update_seconds=step_timing.measure_updates(lowering.optimizer, programs),
        activation_bytes=tuple(one.activation for one in kept),
        backward_temporary_bytes=tuple(one.backward for one in kept),
        weight_gradient_temporary_bytes=tuple(one.weight_gradient for one in kept),
        until_weight_gradient_bytes=tuple(one.waiting for one in kept),
        fixed_bytes=tuple(memory.fixed_bytes(costs) for costs in partition.stage_costs),
    )
    crossing = partition.cut_values
    rows = [
        StageRow(
            stage=index,
            device=devices[index].removeprefix("/device:"),
            first_layer=stage.calls[0].name,
            last_layer=stage.calls[-1].name,
            num_layers=len(stage.calls),
            num_parameters=sum(cost.parameters for cost in costs),
            forward_seconds=durations.forward_seconds[index],
            backward_seconds=durations.backward_seconds[index] + durations.weight_gradient_seconds[index],
            memory_bytes=peak_bytes(schedule, durations, [index]),
            cut_bytes=microbatch_size * sum(map(bytes_per_example, crossing[index]))
            if index < len(partition.stages) - 1
            else None,
        )
        for index, (stage, costs) in enumerate(zip(partition.stages, partition.stage_costs, strict=True))
    ]
    return Prediction(tuple(rows), durations, simulate(schedule, durations))
