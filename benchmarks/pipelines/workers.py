"""Pipelines over two workers: one over both, or one on each, compared with others on the same cores. No TensorFlow."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness import Experiment, Finding
from benchmarks.pipelines.figures import ratio
from benchmarks.pipelines.setting import Setting
from benchmarks.pipelines.speed import MLP, TRANSFORMER
from benchmarks.pipelines.worker import measure


def _across() -> Experiment:
    """Compare one pipeline over two processes with PyTorch's, which also has one process a stage."""
    settings: dict[str, Setting] = {}
    findings = []
    for name, base, times_as_fast in (("mlp", MLP, 1.2), ("transformer", TRANSFORMER, 1.05)):
        ours, theirs = f"tfpar, {name}", f"torch, {name}"
        settings[ours] = replace(base, num_workers=2, num_devices=1)
        settings[theirs] = replace(base, trainer="torch")
        findings.append(Finding(f"{theirs} / {ours}", ratio(theirs, ours, "step_seconds"), at_least=times_as_fast))
    summary = "One pipeline over two processes, a core each, compared with torch.distributed.pipelining on gloo"
    return Experiment("pipeline_workers", summary, "step_seconds", settings, measure, tuple(findings))


def _hybrid() -> Experiment:
    """Compare a pipeline on each of two workers with a whole model on each."""
    ours, theirs = "tfpar.Hybrid, 2 workers x 2 stages", "tfpar.MultiWorker, 2 workers"
    settings = {
        ours: replace(TRANSFORMER, trainer="hybrid", num_workers=2, num_devices=2),
        theirs: replace(TRANSFORMER, trainer="multi_worker", num_workers=2, num_devices=1),
    }
    finding = Finding(f"{ours} / {theirs}", ratio(ours, theirs, "step_seconds"), at_most=1.1)
    summary = "The transformer on two workers of a core each: in two stages on each, or whole on each"
    return Experiment("hybrid", summary, "step_seconds", settings, measure, (finding,))


PIPELINE_WORKERS = _across()
HYBRID = _hybrid()
