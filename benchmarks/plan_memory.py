"""The experiment `plan_memory`: how well the planner predicts the memory of each layout.

    python -m benchmarks plan_memory

Each model is trained under every layout that two logical CPUs can run, in a process of its own. Its memory is the peak
of the process without that of a process with a narrow model of as many layers; logical CPUs share one memory, so it is
compared with the sum of the devices.

The processes return freed blocks of 64 KB and more to the system at once (`MALLOC_MMAP_THRESHOLD_`). By default glibc
raises this limit up to 32 MB while a program runs, and keeps freed blocks below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks import process
from benchmarks.harness import Experiment, Finding, Output, Round
from tfpar.planning.layouts import Layout

_ENVIRONMENT = ["env", "MALLOC_MMAP_THRESHOLD_=65536"]
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


@dataclasses.dataclass(frozen=True)
class Planned:
    """What is planned and trained.

    Args:
        model: A model of `benchmarks.plan_memory_models`.
        batch: Examples of the global batch.
    """

    model: str
    batch: int


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
    predicted = _ask({"model": setting.model, "batch": setting.batch, "layouts": fields})
    output: dict[str, float] = {}
    for layout in LAYOUTS:
        name = str(layout)
        output[f"predicted {name}"] = predicted[name]
        output[f"measured {name}"] = _peak_bytes(setting, layout, 1) - _peak_bytes(setting, layout, _NARROWER)
    found = [ratio - 1 for ratio in ratios({setting.model: output})]
    return output | {"most_below": max(0.0, -min(found)), "most_above": max(0.0, *found)}


def _peak_bytes(setting: Planned, layout: Layout, narrower: int) -> int:
    batch = setting.batch if narrower == 1 else _NARROW_BATCH
    request = {"model": setting.model, "batch": batch, "layout": dataclasses.asdict(layout), "narrower": narrower}
    return int(_ask(request)["peak_bytes"])


def _ask(request: dict[str, object]) -> dict[str, float]:
    return process.ask_all("benchmarks.plan_memory_worker", [request], prefixes=[_ENVIRONMENT])[0]


def ratios(outputs: Round) -> Iterator[float]:
    """Yield predicted relative to measured bytes, for each prediction of a round.

    Args:
        outputs: The outputs of each setting.

    Example:
        >>> list(ratios({"model": {"predicted SingleDevice": 120, "measured SingleDevice": 100, "most_below": 0.0}}))
        [1.2]
    """
    for output in outputs.values():
        for name, predicted in output.items():
            if name.startswith("predicted "):
                yield predicted / output[name.replace("predicted", "measured", 1)]


PLAN_MEMORY = Experiment(
    name="plan_memory",
    summary="Six models: predicted and measured memory of every layout of two logical CPUs",
    figure="most_above",
    settings=_SETTINGS,
    measure=measure,
    findings=(
        Finding(
            "predicted / measured memory, the least",
            lambda outputs: min(ratios(outputs)),
            at_least=1 - MOST_BELOW,
        ),
        Finding(
            "predicted / measured memory, the most",
            lambda outputs: max(ratios(outputs)),
            at_most=1 + MOST_ABOVE,
        ),
    ),
    has_rounds=False,
)
