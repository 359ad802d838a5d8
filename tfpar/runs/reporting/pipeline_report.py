"""The output of the train command about a pipeline: its stage table, and a figure of a step as planned and as run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpar.engines.preview import Preview
from tfpar.messages.number_format import line
from tfpar.pipeline.analysis import timeline_plot
from tfpar.pipeline.analysis.stage_table import describe_step
from tfpar.pipeline.schedule.simulator import simulate
from tfpar.reports.timelines import PipelineRecord
from tfpar.runs.run_trainer import RunTrainer


def measured_stages(trainer: RunTrainer, batch: Any) -> Preview:
    """Measure the stages on a batch; the chief prints them with the predicted step.

    Args:
        trainer: A built trainer whose strategy has a schedule.
        batch: A global batch.
    """
    preview = trainer.strategy.preview(trainer.model, batch)
    if trainer.strategy.is_chief:
        print(preview)
        print(line("bubble", "the fraction of the devices' time without an action"), end="\n\n", flush=True)
    return preview


def predicted(preview: Preview) -> PipelineRecord:
    """Return the predicted step of a pipeline, for the report."""
    assert preview.schedule is not None, "the strategy has a schedule"
    assert preview.planned is not None, "the strategy has a schedule"
    return PipelineRecord(preview.schedule, preview.planned, None, preview.durations)


def draw_trace(
    trainer: RunTrainer, preview: Preview, batch: Any, picture: Path, tensorboard: Path | None
) -> PipelineRecord | None:
    """Measure when each action of a step runs; the chief draws it below the plan.

    Both exclude the all-reduce of the gradients and the optimizer, which follow the actions.

    Args:
        trainer: A built trainer whose strategy has a schedule.
        preview: The predicted step.
        batch: A global batch.
        picture: The PNG file to write.
        tensorboard: The TensorBoard folder, if any.

    Returns:
        The step as planned and as run, on the chief; None on the other workers.
    """
    assert preview.schedule is not None, "the strategy has a schedule"
    assert preview.durations is not None, "the strategy has a schedule"
    measured = trainer.strategy.trace(trainer.model, batch)
    if not trainer.strategy.is_chief:
        return None
    num_workers = measured.num_devices // len(preview.schedule.actions)
    schedule = preview.schedule.first_replica.replicated(preview.schedule.num_replicas * num_workers)
    actions = dataclasses.replace(
        preview.durations,
        update_seconds=(),
        reduction_seconds=(),
        all_reduce_seconds=(),
        microbatch_scale=preview.durations.microbatch_scale * num_workers,
    )
    planned = simulate(schedule, actions)
    png = timeline_plot.draw(planned, measured, schedule, picture)
    if tensorboard is not None:
        with tf.summary.create_file_writer(str(tensorboard / "pipeline")).as_default():
            tf.summary.image("schedule, as planned and as run", tf.io.decode_png(png, channels=4)[tf.newaxis], step=0)
    print(line("planned", f"{describe_step(planned)}: as predicted, actions only"))
    print(line("run", f"{describe_step(measured)}: as measured, actions only"))
    print(line("picture", f"{picture}: planned above, run below"), end="\n\n", flush=True)
    return PipelineRecord(schedule, planned, measured, preview.durations)
