"""The pipeline experiments as data: memory, predictions and the first step; the speed is in `speed`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.harness import Experiment, Finding
from benchmarks.pipelines.figures import quotient, ratio, saved, saved_share
from benchmarks.pipelines.fully_sharded import FULLY_SHARDED
from benchmarks.pipelines.setting import Setting
from benchmarks.pipelines.speed import PIPELINE_MLP, PIPELINE_TRANSFORMER, TRANSFORMER
from benchmarks.pipelines.worker import measure
from benchmarks.pipelines.workers import HYBRID, PIPELINE_WORKERS

NUMBERS_OF_MICROBATCHES = (8, 16, 32, 64)


def _memory() -> Experiment:
    """Measure the most memory of a step, for more and more micro-batches of one size."""
    wide = Setting("wide", "pipeline", num_microbatches=8, microbatch_size=128, balance="parameters", quantity="memory")
    settings = {
        _kept(schedule, number, recompute): replace(
            wide, schedule=schedule, num_microbatches=number, recompute=recompute
        )
        for schedule, numbers, recompute in (
            ("1f1b", NUMBERS_OF_MICROBATCHES, False),
            ("gpipe", NUMBERS_OF_MICROBATCHES, False),
            ("1f1b", (8,), True),
            ("gpipe", (8, 64), True),
        )
        for number in numbers
    }
    findings = (
        *(_growth("1f1b", number, 1.0) for number in NUMBERS_OF_MICROBATCHES[1:]),
        *(_growth("gpipe", number, number / 8) for number in NUMBERS_OF_MICROBATCHES[1:]),
        *(_recomputation(schedule, number) for schedule, number in (("1f1b", 8), ("gpipe", 8), ("gpipe", 64))),
    )
    summary = "16 x (Dense(2048), Dense(16)) in 2 stages, micro-batches of 128: a step's most memory above that before"
    return Experiment("pipeline_memory", summary, "peak_bytes", settings, measure, findings)


def _kept(schedule: str, num_microbatches: int, recompute: bool = False) -> str:
    return f"{schedule}, {num_microbatches} micro-batches" + (", recompute" if recompute else "")


def _growth(schedule: str, num_microbatches: int, times: float) -> Finding:
    """Hold that memory is so many times that of 8 micro-batches, within 10 %."""
    names = _kept(schedule, num_microbatches), _kept(schedule, 8)
    return Finding(" / ".join(names), ratio(*names, "peak_bytes"), at_least=0.9 * times, at_most=1.1 * times)


def _recomputation(schedule: str, num_microbatches: int) -> Finding:
    names = _kept(schedule, num_microbatches, recompute=True), _kept(schedule, num_microbatches)
    return Finding(
        f"{names[0]}: bytes saved, measured / predicted",
        quotient(saved(*names, "peak_bytes"), saved(*names, "predicted_bytes")),
        at_least=0.8,
        at_most=1.2,
    )


def _prediction() -> Experiment:
    """Compare measured and predicted step times, all for the same global batch on two devices."""
    settings = {}
    for schedule, num_stages, num_microbatches in (
        ("gpipe", 2, 8),
        ("1f1b", 2, 8),
        ("interleaved", 4, 8),
        ("zero_bubble", 2, 8),
        # Few micro-batches: the bubble is a larger share, and so is what zero bubble can save.
        ("1f1b", 2, 4),
        ("zero_bubble", 2, 4),
    ):
        settings[f"{schedule}, {num_microbatches} micro-batches"] = replace(
            TRANSFORMER,
            schedule=schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            microbatch_size=TRANSFORMER.batch_size // num_microbatches,
            quantity="prediction",
        )
    findings = [
        Finding(f"{name}: predicted / measured", ratio(name, name, "predicted_seconds", "step_seconds"), 0.85, 1.15)
        for name in settings
    ]
    findings += [finding for number in (8, 4) for finding in _zero_bubble(f"{number} micro-batches")]
    summary = "The transformer on 2 logical CPUs, 32 examples a step: predicted and measured step time by schedule"
    return Experiment("pipeline_prediction", summary, "step_seconds", settings, measure, tuple(findings))


def _zero_bubble(size: str) -> Iterator[Finding]:
    names = f"zero_bubble, {size}", f"1f1b, {size}"
    measured, predicted = (saved_share(*names, figure) for figure in ("step_seconds", "predicted_seconds"))
    yield Finding(f"{names[0]}: share of 1f1b's time saved, measured", measured)
    yield Finding(f"{names[0]}: share of 1f1b's time saved, predicted", predicted)
    yield Finding(f"{names[0]}: saved, measured / predicted", quotient(measured, predicted), 2 / 3, 4 / 3)


def _first_step() -> Experiment:
    """Measure the seconds until ResNet50's first step is done, of the same batch as in Keras' own `fit`."""
    pipeline = Setting(
        "resnet50",
        "pipeline",
        num_microbatches=8,
        microbatch_size=4,
        num_stages=4,
        num_devices=4,
        quantity="first_step",
    )
    ours, many, by_parameters, one_device, theirs = (
        "tfpar.Pipeline",
        "tfpar.Pipeline, 64 micro-batches",
        "tfpar.Pipeline, balanced by parameters",
        "tfpar.SingleDevice",
        "Keras fit",
    )
    settings = {
        ours: pipeline,
        many: replace(pipeline, num_microbatches=64, microbatch_size=1),
        by_parameters: replace(pipeline, balance="parameters"),  # without measuring the layers first
        one_device: replace(pipeline, trainer="one_device", num_devices=1),
        theirs: replace(pipeline, trainer="keras", num_devices=1),
    }
    findings = (
        Finding(f"{ours} / {theirs}", ratio(ours, theirs, "first_step_seconds"), at_most=2.0),
        Finding(f"{many} / {ours}", ratio(many, ours, "first_step_seconds"), at_most=1.2),
        Finding(f"{by_parameters} / {theirs}", ratio(by_parameters, theirs, "first_step_seconds")),
        Finding(f"{one_device} / {theirs}", ratio(one_device, theirs, "first_step_seconds")),
    )
    summary = "ResNet50, 32 images of 64x64x3, 4 stages, 8 micro-batches: from making the model to the first step's end"
    return Experiment("pipeline_first_step", summary, "first_step_seconds", settings, measure, findings)


PIPELINE_MEMORY = _memory()
PIPELINE_PREDICTION = _prediction()
PIPELINE_FIRST_STEP = _first_step()
PIPELINE_EXPERIMENTS = (
    PIPELINE_MLP,
    PIPELINE_TRANSFORMER,
    PIPELINE_MEMORY,
    PIPELINE_PREDICTION,
    PIPELINE_FIRST_STEP,
    PIPELINE_WORKERS,
    HYBRID,
    FULLY_SHARDED,
)
