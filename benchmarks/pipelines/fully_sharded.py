"""Weights divided over two replicas, compared with PyTorch's `fully_shard` and with whole replicas. No TensorFlow."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness import Experiment, Finding
from benchmarks.pipelines.figures import ratio
from benchmarks.pipelines.speed import TRANSFORMER
from benchmarks.pipelines.worker import measure

OURS, WHOLE, THEIRS = 'tfpar.Mirrored(shard="weights")', "tfpar.Mirrored", "torch fully_shard, 2 processes"

FULLY_SHARDED = Experiment(
    name="fully_sharded",
    summary="8 blocks of width 256, weights divided over 2 logical CPUs, compared with PyTorch's fully_shard on gloo",
    figure="step_seconds",
    settings={
        OURS: replace(TRANSFORMER, trainer="sharded_weights"),
        WHOLE: replace(TRANSFORMER, trainer="mirrored"),
        THEIRS: replace(TRANSFORMER, trainer="torch_sharded"),
    },
    measure=measure,
    findings=(
        Finding(f"{THEIRS} / {OURS}", ratio(THEIRS, OURS, "step_seconds"), at_least=1.0),
        Finding(f"{OURS} / {WHOLE}", ratio(OURS, WHOLE, "step_seconds"), at_most=1.25),
        Finding(f"{THEIRS} / {WHOLE}", ratio(THEIRS, WHOLE, "step_seconds")),
    ),
)
