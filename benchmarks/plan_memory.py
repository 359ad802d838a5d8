"""The experiment `plan_memory`: how well the planner predicts the memory of each layout.

    python -m benchmarks plan_memory

Each model is trained under every layout that two logical CPUs can run, in a process of its own. TensorFlow's allocator
counts the bytes of all tensors; logical CPUs have one allocator, so the sum of the devices is predicted. The process
takes more, as the allocator holds memory in parts that are too small for the next tensor: this is the peak of the
process without that of one with a narrow model of as many layers.

The measured memory of the trained batch is also a limit: the largest batch that is predicted to fit in it is compared
with that batch.
"""

from __future__ import annotations

import dataclasses
import math

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Round
from benchmarks.plan import Planned, ratios
from tfpar.planning.layouts import Layout

_NARROWER, _NARROW_BATCH = 8, 8
MOST_BELOW, MOST_ABOVE = 0.03, 0.15

LAYOUTS = (
    Layout(),
    Layout(2),
    Layout(2, shard="optimizer"),
    Layout(2, shard="weights"),
    Layout(1, 2, 4),
    Layout(1, 2, 4, schedule="zero_bubble"),
    Layout(1, 2, 4, recompute=True),
    Layout(num_shards=2),
)


_SETTINGS = {
    name: Planned(model, batch)
    for name, model, batch in (
        ("wide MLP", "wide MLP", 512),
        ("wide MLP, large batch", "wide MLP", 8192),
        ("CNN", "CNN", 128),
        ("transformer", "transformer", 16),
        ("tied embeddings", "tied embeddings", 16),
        ("one dominant layer", "one dominant layer", 2048),
        ("many tiny layers", "many tiny layers", 32768),
    )
}


def measure(setting: Planned) -> Output:
    """Return the predicted and measured bytes of all layouts of a model, on all devices together.

    Args:
        setting: The model.

    Raises:
        WorkerError: If a process fails.
    """
    fields = [dataclasses.asdict(layout) for layout in LAYOUTS]
    output: dict[str, float] = {}
    for layout in LAYOUTS:
        wide, narrow = _trained(setting, layout, 1), _trained(setting, layout, _NARROWER)
        output[f"tensors {layout}"] = wide["tensor_bytes"]
        output[f"process {layout}"] = wide["process_bytes"] - narrow["process_bytes"]
    limits = [output[f"tensors {layout}"] for layout in LAYOUTS]
    output |= _ask({"model": setting.model, "batch": setting.batch, "layouts": fields, "limits": limits})
    found = list(ratios({setting.model: output}, "tensors"))
    return output | {"least_ratio": min(found), "largest_ratio": max(found)}


def _trained(setting: Planned, layout: Layout, narrower: int) -> dict[str, float]:
    batch = setting.batch if narrower == 1 else _NARROW_BATCH
    request = {"model": setting.model, "batch": batch, "layout": dataclasses.asdict(layout), "narrower": narrower}
    return _ask(request)


def _ask(request: dict[str, object]) -> dict[str, float]:
    return process.ask("benchmarks.plan_memory_worker", request)


def _finding(measured: str, words: str) -> tuple[Finding, Finding]:
    return (
        Finding(
            f"predicted / measured memory of {words}, the least",
            lambda outputs: min(ratios(outputs, measured)),
            at_least=1 - MOST_BELOW,
        ),
        Finding(
            f"predicted / measured memory of {words}, the most",
            lambda outputs: max(ratios(outputs, measured)),
            at_most=1 + MOST_ABOVE,
        ),
    )


def _largest(outputs: Round) -> list[float]:
    return [ratio for output in outputs.values() for name, ratio in output.items() if name.startswith("largest batch ")]


PLAN_MEMORY = Experiment(
    name="plan_memory",
    summary="Seven settings of six models: predicted and measured memory of every layout of two logical CPUs",
    figure="largest_ratio",
    settings=_SETTINGS,
    measure=measure,
    findings=(
        *_finding("tensors", "the tensors"),
        *_finding("process", "the process"),
        Finding(
            "largest batch that is predicted to fit / that runs, the least",
            lambda outputs: min(_largest(outputs), default=math.nan),
            at_least=1 - MOST_ABOVE,
        ),
        Finding(
            "largest batch that is predicted to fit / that runs, the most",
            lambda outputs: max(_largest(outputs), default=math.nan),
            at_most=1 + MOST_BELOW,
        ),
    ),
    has_rounds=False,
)
