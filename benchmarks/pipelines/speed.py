"""The step times of `tfpar.Pipeline`, `torch.distributed.pipelining` and one core. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness import Experiment, Finding
from benchmarks.pipelines.figures import efficiency, ratio, spread
from benchmarks.pipelines.setting import Setting
from benchmarks.pipelines.worker import measure

EFFICIENCY = 0.92


def _speed(name: str, summary: str, base: Setting, times_as_fast: float) -> Experiment:
    """Compare 8 and 16 micro-batches of one size, and 16 of half the size: the global batch of 8 in more pieces.

    Within a comparison, all train the same global batch.
    """
    twice = replace(base, num_microbatches=2 * base.num_microbatches)
    settings: dict[str, Setting] = {}
    findings: list[Finding] = []
    for point in (base, twice):
        settings |= _one_core(point) | _two_stages(point, "1f1b") | _two_stages(point, "gpipe")
        findings += _findings(point, "1f1b", times_as_fast)
        findings += _findings(point, "gpipe")
    finer = replace(twice, microbatch_size=base.microbatch_size // 2)
    settings |= _one_core(finer) | _two_stages(finer, "1f1b")
    findings += [replace(finding, at_least=None) for finding in _findings(finer, "1f1b")]
    same_layers = Finding("most / fewest weights of a model", spread(list(settings), "num_parameters"), 1.0, 1.0)
    return Experiment(name, summary, "step_seconds", settings, measure, (*findings, same_layers))


def _size(point: Setting) -> str:
    return f"{point.num_microbatches} x {point.microbatch_size}"


def _whole(point: Setting) -> str:
    return f"one core, whole batch of {point.batch_size}"


def _one_stage(point: Setting) -> str:
    return f"one core, one stage, {_size(point)}"


def _one_core(point: Setting) -> dict[str, Setting]:
    """Return the two ways to do the same step on one core: the batch at once, or in micro-batches."""
    one = replace(point, num_stages=1, num_devices=1)
    # Rows that fit the processor's caches can be faster, so the whole batch alone would flatter the pipeline.
    return {_whole(point): replace(one, trainer="one_device"), _one_stage(point): replace(one, schedule="gpipe")}


def _two_stages(point: Setting, schedule: str) -> dict[str, Setting]:
    ours = replace(point, schedule=schedule)
    return {
        f"tfpar, {schedule}, {_size(point)}": ours,
        f"torch, {schedule}, {_size(point)}": replace(ours, trainer="torch"),
    }


def _findings(point: Setting, schedule: str, times_as_fast: float | None = None) -> Iterator[Finding]:
    ours, theirs = _two_stages(point, schedule)
    yield Finding(f"{theirs} / {ours}", ratio(theirs, ours, "step_seconds"), times_as_fast)
    for one_core in (_whole(point), _one_stage(point)):
        yield Finding(f"{ours}: efficiency, T = {one_core}", efficiency(ours, point, one_core), EFFICIENCY)


MLP = Setting("mlp", "pipeline", num_microbatches=8, microbatch_size=64, num_laps=5, steps_per_lap=20)
PIPELINE_MLP = _speed(
    "pipeline_mlp",
    "8 x Dense(512) in 2 stages on 2 logical CPUs, compared with torch.distributed.pipelining in 2 processes",
    MLP,
    times_as_fast=1.3,
)
TRANSFORMER = Setting("transformer", "pipeline", num_microbatches=8, microbatch_size=4, num_laps=5, steps_per_lap=1)
PIPELINE_TRANSFORMER = _speed(
    "pipeline_transformer",
    "8 blocks of width 256, context 128, in 2 stages, compared with torch.distributed.pipelining in 2 processes",
    TRANSFORMER,
    times_as_fast=1.12,
)
