"""The order of the predicted layouts: by time among those that fit, and the simplest among equals. Pure Python."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.planning.costs import MachineCosts, ModelCosts
from tfpar.planning.layouts import Layout, Refusal, never_tried
from tfpar.planning.plan import Plan, Row
from tfpar.planning.quantities import memory
from tfpar.planning.rows import PredictedStep

# A larger spread of the measurements could exchange most rows.
MOST_SPREAD = 0.5
UNTESTED = "no run of this machine has tested the prediction yet"
_KINDS = ("single_device", "mirrored", "multi_worker", "tensor_parallel", "pipeline", "hybrid")
_SHARDS = (None, "optimizer", "weights")
_ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def rank(
    predictions: Iterable[PredictedStep],
    refusals: Iterable[Refusal],
    model: ModelCosts,
    machine: MachineCosts,
    more: Sequence[PredictedStep] = (),
    history: str = UNTESTED,
    devices: Sequence[str] = (),
) -> Plan:
    """Order predicted layouts: those that fit by time, then those that do not fit by memory.

    Of the pipelines of one grid only the fastest that fits is a row. Rows closer than the spread of the measurement are
    equal: they have the same rank, and the simplest of them comes first.

    Args:
        predictions: The predicted step of each layout.
        refusals: Layouts that are not considered.
        model: The measured costs of the model.
        machine: The costs of the devices and links, with the memory of a device.
        more: Predictions for one device more.
        history: How well earlier runs were predicted, in words.
        devices: Names of the devices of a host, where a user has chosen them.

    Returns:
        The plan, without its command.

    Raises:
        ValueError: If there is no prediction.

    Example:
        >>> from tfpar.planning.costs import Curve
        >>> model = ModelCosts("mlp", 100, 400, 400, 800, (400,), 32, Curve((32,), (0.02,)), 0.001, spread=0.02)
        >>> steps = [PredictedStep(Layout(), 0.030, {}, 900), PredictedStep(Layout(2), 0.018, {}, 900)]
        >>> [(row.rank, str(row.layout)) for row in rank(steps, [], model, MachineCosts("CPU", 2, 2)).rows]
        [(1, 'Mirrored(2)'), (2, 'SingleDevice')]
    """
    steps = list(predictions)
    if not steps:
        raise ValueError("A plan needs at least one predicted layout, received none. Predict SingleDevice.")
    one = next((step for step in steps if step.layout.num_devices == 1), None)
    best = best_of_each_grid(steps, machine)
    fitting, others = split(best, machine)
    is_noisy = model.spread > MOST_SPREAD
    order = [(None, step) for step in sorted(fitting, key=_simplicity)] if is_noisy else _ranks(fitting, model.spread)
    rows = [_row(step, number, one, model, machine, devices) for number, step in order]
    rows += [_row(step, None, one, model, machine, devices) for step in sorted(others, key=_size)]
    take = rows[0] if fitting and not is_noisy else None
    return Plan(
        rows=tuple(rows),
        model=model,
        machine=machine,
        taken=take,
        notes=tuple(_notes(rows, take, model, machine, more)),
        not_considered=tuple(_not_considered(refusals, model, machine)),
        history=history,
    )


def settings_of(layout: Layout, machine: MachineCosts, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of section `[strategy]` for a layout, with the devices that it needs.

    Args:
        layout: The layout.
        machine: The devices of each host.
        devices: Names of the devices of a host, where a user has chosen them.

    Example:
        >>> settings_of(Layout(num_replicas=2), MachineCosts("CPU", 2, 2))
        {'kind': 'mirrored', 'num_logical_cpus': 2}
    """
    if devices:
        return layout.settings_on(devices)
    settings, used = layout.settings, layout.devices_per_host
    if machine.device == "CPU":
        return settings | ({"num_logical_cpus": used} if used > 1 else {})
    # These use all GPUs unless some are named.
    if settings["kind"] in ("mirrored", "multi_worker") and used < machine.num_devices:
        settings["devices"] = [f"GPU:{number}" for number in range(used)]
    return settings


def best_of_each_grid(steps: Iterable[PredictedStep], machine: MachineCosts) -> list[PredictedStep]:
    """Keep of the variants of a grid the fastest that fits; if none fits, that with the least memory.

    Args:
        steps: Predicted steps of any layouts.
        machine: The costs of the devices, with their memory.

    Example:
        >>> steps = [PredictedStep(Layout(1, 2, number), 1 / number, {}) for number in (2, 4)]
        >>> [str(step.layout) for step in best_of_each_grid(steps, MachineCosts("CPU", 2, 2))]
        ['Pipeline(2, 4)']
    """
    grids: dict[Any, list[PredictedStep]] = {}
    for step in steps:
        one = step.layout
        grids.setdefault((one.num_replicas, one.num_stages, one.num_shards, one.shard, one.num_hosts), []).append(step)
    best = []
    for variants in grids.values():
        fitting, others = split(variants, machine)
        best.append(
            min(fitting, key=lambda step: (step.known_seconds, _simplicity(step)))
            if fitting
            else min(others, key=_size)
        )
    return best


def split(steps: Iterable[PredictedStep], machine: MachineCosts) -> tuple[list[PredictedStep], list[PredictedStep]]:
    """Return the steps that fit, or may fit, and those that do not.

    Args:
        steps: Predicted steps.
        machine: The costs of the devices, with their memory.

    Example:
        >>> machine = MachineCosts("GPU", 1, 1, memory_bytes=800)
        >>> fitting, others = split([PredictedStep(Layout(), 1.0, {}, 900)], machine)
        >>> len(fitting), len(others)
        (0, 1)
    """
    fitting: list[PredictedStep] = []
    others: list[PredictedStep] = []
    for step in steps:
        (others if _fits(step, machine) is False else fitting).append(step)
    return fitting, others


def _fits(step: PredictedStep, machine: MachineCosts) -> bool | None:
    if step.ran_out_of_memory:
        return False
    return None if machine.memory_bytes is None else step.memory_bytes <= machine.memory_bytes


def _ranks(steps: Sequence[PredictedStep], spread: float) -> list[tuple[int | None, PredictedStep]]:
    """Return the steps with their ranks: a group of equals begins with its fastest, and is ordered by simplicity."""
    ranked: list[tuple[int | None, PredictedStep]] = []
    rest = sorted(steps, key=lambda step: (step.known_seconds, _simplicity(step)))
    while rest:
        is_equal = functools.partial(_are_equal, rest[0], spread)
        equal = list(itertools.takewhile(is_equal, rest))
        rest = rest[len(equal) :]
        number = len(ranked) + 1
        ranked += [(number, step) for step in sorted(equal, key=_simplicity)]
    return ranked


def _are_equal(fastest: PredictedStep, spread: float, step: PredictedStep) -> bool:
    """Return whether a step is no longer than another one beyond the spread.

    Two measured steps follow each other, so that their own spread counts, and not the drift since the measurement of
    the model, by which predictions differ from them.
    """
    if None not in (fastest.measured_seconds, step.measured_seconds):
        spread = max(fastest.spread, step.spread)
    return step.known_seconds <= fastest.known_seconds * (1 + spread)


def _simplicity(step: PredictedStep) -> tuple[Any, ...]:
    """Return a key by which simpler layouts come first."""
    one = step.layout
    return (
        one.num_hosts,
        _KINDS.index(one.kind),
        _SHARDS.index(one.shard),
        one.num_devices,
        one.recompute,
        one.schedule != "1f1b",
        one.num_microbatches,
        step.known_seconds,
    )


def _size(step: PredictedStep) -> tuple[Any, ...]:
    """Return a key by which layouts of less memory come first."""
    return (step.memory_bytes, *_simplicity(step))


def _row(
    step: PredictedStep,
    number: int | None,
    one: PredictedStep | None,
    model: ModelCosts,
    machine: MachineCosts,
    devices: Sequence[str],
) -> Row:
    fits = _fits(step, machine)
    return Row(
        rank=number,
        layout=step.layout,
        step_seconds=step.seconds,
        measured_seconds=step.measured_seconds,
        examples_per_second=model.batch / step.known_seconds,
        times_one=None if one is None else one.known_seconds / step.known_seconds,
        memory_bytes=step.memory_bytes,
        fits=fits,
        waits=step.waits,
        settings=settings_of(step.layout, machine, devices),
        largest_batch=step.largest_batch,
        lacks=_lacks(step, machine) if fits is False else "",
        forward_seconds=step.forward_seconds,
    )


def _lacks(step: PredictedStep, machine: MachineCosts) -> str:
    if step.ran_out_of_memory:
        return "ran out of memory when it was measured"
    assert machine.memory_bytes is not None, "without a limit all layouts may fit"
    missing = f"lacks {memory(step.memory_bytes - machine.memory_bytes)} on a device"
    if step.largest_batch:
        return f"{missing}; fits at batch {step.largest_batch:,}"
    return f"{missing}; no batch fits"


def _notes(
    rows: Sequence[Row], take: Row | None, model: ModelCosts, machine: MachineCosts, more: Sequence[PredictedStep]
) -> Iterable[str]:
    ranks = [row.rank for row in rows if row.rank is not None]
    fits_nowhere = all(row.fits is False for row in rows)
    if model.spread > MOST_SPREAD and not fits_nowhere:  # a quiet machine would not change what fits
        yield (
            f"The measured times vary by {model.spread:.0%}, and more than {MOST_SPREAD:.0%} is too noisy to rank the "
            "layouts: end other programs on this machine, and repeat the command."
        ).replace("%", " %")
    elif len(set(ranks)) < len(ranks):
        yield (
            "Rows of the same rank are equal: they differ by less than the spread of the measurements, "
            f"{100 * model.spread:.1f} %, and two measured rows by less than that of their own steps. The simplest is "
            "first."
        )
    if fits_nowhere:
        limit = "memory" if machine.memory_bytes is None else memory(machine.memory_bytes)
        yield f"No layout fits in the {limit} of a device. The nearest is {rows[0].layout}: it {rows[0].lacks}."
    if model.normalizing and any(row.layout.num_devices > 1 for row in rows):
        yield (
            f"{', '.join(model.normalizing)}: normalizes each part of a batch by itself, so that rows of several "
            "devices give another result than one device."
        )
    if machine.num_devices > machine.num_measured:
        there = f"{machine.num_measured} measured device" + "s" * (machine.num_measured != 1)
        yield f"Planned for {machine.num_devices} devices of each host, from {there}."
    if machine.assumed:
        yield f"Stated, not measured: {', '.join(machine.assumed)}."
    if machine.device == "CPU" and machine.num_devices > 1:
        yield (
            "Logical CPUs share the cores that one device uses alone: more of them show that results agree, not how "
            "fast several devices are."
        )
    if take is not None and (gain := _gain(take, model, machine, more)):
        yield gain


def _gain(take: Row, model: ModelCosts, machine: MachineCosts, more: Sequence[PredictedStep]) -> str:
    """Return what one device more would bring."""
    possible, _ = split(more, machine)
    if not possible or (machine.device == "CPU" and machine.num_devices > 1):  # one more would share the same cores
        return ""
    times = take.step_seconds / min(step.seconds for step in possible)
    number = machine.num_devices + 1
    name = _ORDINALS[number - 2] if number - 2 < len(_ORDINALS) else f"{number}th"
    where = " on each host" if machine.num_hosts > 1 else ""
    if times <= 1 + model.spread or f"{times:.1f}" == "1.0":
        return f"A {name} device{where} would bring nothing."
    article = "An" if name.startswith("e") or number in (11, 18) else "A"
    return f"{article} {name} device{where} would bring {times:.1f}x."


def _not_considered(refusals: Iterable[Refusal], model: ModelCosts, machine: MachineCosts) -> Iterable[str]:
    """Return the refused layouts, those of one reason together."""
    of_reason: dict[str, list[str]] = {}
    for refusal in refusals:
        names = of_reason.setdefault(refusal.reason, [])
        if (name := _grid(refusal.layout)) not in names:
            names.append(name)
    yield from (f"{', '.join(names)} ({reason})" for reason, names in of_reason.items())
    if machine.num_devices * machine.num_hosts > 1:
        divides_layers = any(block.is_divided for block in model.blocks)
        if model.uncut:
            yield f"pipelines ({model.uncut.rstrip('.')})"
        yield from never_tried(machine.num_devices, machine.num_hosts, len(model.blocks), divides_layers)
        if not divides_layers and machine.num_devices > 1:
            reason = "no layer that it divides" if model.blocks else "not predicted for a model that cannot be cut"
            yield f"TensorParallel ({reason})"


def _grid(layout: Layout) -> str:
    """Return the name of a layout without micro-batches, which are not the reason of a refusal."""
    if layout.num_stages == 1:
        return str(layout)
    hosts = f", hosts={layout.num_hosts}" if layout.num_hosts > 1 else ""
    if layout.across_hosts:
        return f"Pipeline({layout.num_stages}, across_workers{hosts})"
    one = f"Pipeline({layout.num_stages})"
    return one if layout.num_replicas == 1 and not hosts else f"Hybrid({layout.num_replicas} x {one}{hosts})"
