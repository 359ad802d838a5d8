"""Prediction of the step time, the bubble and the memory of a pipeline, from measured durations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tfpar import cluster, data
from tfpar.messages.number_format import three_digits
from tfpar.pipeline.analysis import step_timing
from tfpar.pipeline.analysis.communication_timing import measure_all_reduces, measure_reductions
from tfpar.pipeline.analysis.saved_bytes import saved_bytes
from tfpar.pipeline.analysis.stage_table import StageRow
from tfpar.pipeline.execution.other_workers import Peers
from tfpar.pipeline.execution.steps import PipelineSteps
from tfpar.pipeline.partition.partitioner import MemoryNeeds, Partition
from tfpar.pipeline.partition.stages import bytes_per_example
from tfpar.pipeline.schedule import Schedule
from tfpar.pipeline.schedule.simulator import Durations, Timeline, microbatch_scale, peak_bytes, simulate


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted step of a pipeline.

    Args:
        rows: The layers, times and memory of each stage.
        durations: The measured durations of the actions, and their bytes.
        planned: The simulated step, including the optimizer's update and the sums of gradients.
        included: Descriptions of what the step includes besides the actions.
        not_measured: Descriptions of what the step does not include.

    Example:
        >>> from tfpar.pipeline import schedule
        >>> durations = Durations((1.0, 1.0), (2.0, 2.0), (), (), transfer_seconds=(0.0,))
        >>> planned = simulate(schedule.make("1f1b", num_stages=2, num_microbatches=4), durations)
        >>> round(Prediction((), durations, planned).planned.bubble, 3)
        0.2
    """

    rows: tuple[StageRow, ...]
    durations: Durations
    planned: Timeline
    included: tuple[str, ...] = ("the optimizer",)
    not_measured: tuple[str, ...] = ()


def predict_step_time(
    partition: Partition,
    steps: PipelineSteps,
    schedule: Schedule,
    devices: Sequence[Sequence[str]],
    memory: MemoryNeeds,
    batch: Any,
    microbatch_size: int,
    peers: Peers | None = None,
    groups: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Prediction:
    """Predict a step: measure the actions on a batch, and simulate the schedule.

    All workers of a job must call this. Each predicts its own step, and assumes that the others are no slower.

    Args:
        partition: The stages of the model.
        steps: The compiled steps of the model, whose weights do not change.
        schedule: The schedule of the strategy.
        devices: The device of each stage, for each replica.
        memory: The estimate of the memory of weights and optimizer state.
        batch: A global batch, or the local batch of this worker.
        microbatch_size: Number of examples in a micro-batch.
        peers: The other workers, if the job has several.
        groups: All devices of a sharded stage, by its first device.

    Example:
        >>> batch = trainer.build(dataset)
        >>> prediction = trainer.strategy.predict_step_time(trainer.model, batch)
        >>> len(prediction.rows), prediction.planned.num_devices
        (2, 2)
    """
    compiled = steps.compiler.compile_replicas(batch, training=True)
    replicas = [step.stages for step in compiled]
    stages = replicas[0]
    # Padded micro-batches all take the same time.
    is_padded = any(stage.pads for stage in stages.stages)
    scale = () if is_padded else microbatch_scale(int(data.num_rows(batch)), schedule.num_microbatches)
    saved = [saved_bytes(stage, microbatch_size) for stage in stages.stages]
    sums = measure_all_reduces(compiled[0], peers)
    durations = dataclasses.replace(
        step_timing.measure_durations(schedule, lambda short: steps.timed(batch, short), devices[0], scale),
        update_seconds=step_timing.measure_updates(steps.compiler.staged.model.optimizer, stages, len(replicas)),
        reduction_seconds=measure_reductions(replicas),
        all_reduce_seconds=sums.seconds,
        activation_bytes=tuple(stage.activations for stage in saved),
        backward_temporary_bytes=tuple(stage.input_gradient_temporaries for stage in saved),
        weight_gradient_temporary_bytes=tuple(stage.weight_gradient_temporaries for stage in saved),
        until_weight_gradient_bytes=tuple(stage.until_weight_gradient for stage in saved),
        fixed_bytes=tuple(memory.fixed_bytes(costs) for costs in partition.stage_costs),
        microbatch_scale=scale,
    )
    cut_values = partition.cut_values
    rows = [
        StageRow(
            stage=index,
            device=" ".join(
                cluster.short_name(shard) for names in devices for shard in groups.get(names[index], [names[index]])
            ),
            first_layer=stage.calls[0].name,
            last_layer=stage.calls[-1].name,
            num_layers=len(stage.calls),
            num_parameters=sum(cost.parameters for cost in costs),
            forward_seconds=durations.forward_seconds[index],
            backward_seconds=durations.backward_seconds[index] + durations.weight_gradient_seconds[index],
            memory_bytes=peak_bytes(steps.schedule, durations, [index]),
            cut_bytes=microbatch_size * sum(map(bytes_per_example, cut_values[index]))
            if index < len(partition.stages) - 1
            else None,
        )
        for index, (stage, costs) in enumerate(zip(partition.stages, partition.stage_costs, strict=True))
    ]
    planned = simulate(steps.schedule, durations)
    if peers is None:
        return Prediction(tuple(rows), durations, planned)
    all_reduce = f"the all-reduce over {peers.num_workers} workers ({three_digits(1e3 * sum(sums.seconds))} ms)"
    not_measured = ("the exchange of looked-up rows over workers",) * sums.has_rows
    return Prediction(tuple(rows), durations, planned, ("the optimizer", all_reduce), not_measured)
