"""The candidate layouts of a plan, all with the result of one device, and the reasons why others are left out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tfpar.layout import Layout, Shard
from tfpar.planning.model_facts import ModelFacts

_MICROBATCHES_PER_STAGE = (1, 2, 4)
_OPTIMIZER: tuple[Shard, ...] = (None, "optimizer")


def candidates(facts: ModelFacts, num_devices: int, num_workers: int = 1, *, recompute: bool = False) -> list[Layout]:
    """Return the layouts that the model, its batch and the devices allow.

    Layouts may use fewer devices than there are: one device may be faster than two.

    Args:
        facts: The model and its batch.
        num_devices: Devices of each worker.
        num_workers: Number of workers; all are used.
        recompute: Whether to add pipelines that recompute activations, which saves memory but no time.

    Example:
        >>> facts = ModelFacts("mlp", 10, batch=4, weight_bytes=40, variable_bytes=(40,), slot_bytes=0)
        >>> [str(layout) for layout in candidates(facts, 2)]
        ['SingleDevice', 'Mirrored(2)', 'Mirrored(2, shard="optimizer")']
    """
    layouts = [Layout()]
    for used in numbers_tried(num_devices):
        total = used * num_workers
        if total > 1:
            layouts += _replicas(total, num_workers, facts)
            for size in (size for size in range(2, used + 1) if used % size == 0):
                layouts += _pipelines(Layout(total // size, size, num_workers=num_workers), facts, recompute)
                layouts += _shards(size, total // size, num_workers, facts)
            if num_workers > 1:
                across = Layout(1, total, num_workers=num_workers, across_workers=True)
                layouts += _pipelines(across, facts, recompute)
    return layouts


def numbers_tried(number: int) -> list[int]:
    """Return the numbers of devices to try: all `number` of them, half, and the powers of two below.

    Example:
        >>> numbers_tried(8), numbers_tried(12)
        ([1, 2, 4, 8], [1, 2, 4, 6, 8, 12])
    """
    powers = {1 << power for power in range(number.bit_length()) if 1 << power < number}
    return sorted(powers | {number} | ({number // 2} if number % 2 == 0 else set()))


def not_considered(facts: ModelFacts, num_devices: int, num_workers: int = 1) -> list[str]:
    """Name the layouts that would give the result of one device but are not candidates, with the reasons.

    Args:
        facts: The model and its batch.
        num_devices: Devices of each worker.
        num_workers: Number of workers.

    Example:
        >>> facts = ModelFacts("mlp", 10, 8, 40, (40,), 0, num_blocks=5, divides_layers=True)
        >>> not_considered(facts, 2)
        ['gpipe (1f1b is as fast, with less memory)', 'interleaved, micro-batches but 1, 2, 4 a stage (too many)']
        >>> not_considered(dataclasses.replace(facts, num_blocks=0, uncut="It has one layer."), 2)
        ['pipelines (It has one layer.)']
    """
    total = num_devices * num_workers
    if total == 1:
        return []
    rows = [f"pipelines ({facts.uncut})"] if facts.uncut else []
    if not facts.divides_layers and not facts.uncut and num_devices > 1:
        rows.append("TensorParallel (no layer that it divides)")
    others = list[str]()
    if facts.num_blocks > 1:
        rows.append("gpipe (1f1b is as fast, with less memory)")
        others += ["interleaved", f"micro-batches but {', '.join(map(str, _MICROBATCHES_PER_STAGE))} a stage"]
        others += ["stages of shards"] if facts.divides_layers and num_devices >= 4 else []
        others += ["grids across workers"] if num_workers > 1 and num_devices > 1 else []
    if untried := sorted({*range(1, num_devices + 1)} - {*numbers_tried(num_devices)}):
        others.append(f"{', '.join(map(str, untried[:4]))}{' ...' * (len(untried) > 4)} of {num_devices} devices")
    others += ["fewer workers"] if num_workers > 2 else []
    return rows + ([f"{', '.join(others)} (too many)"] if others else [])


def _replicas(total: int, num_workers: int, facts: ModelFacts) -> Iterator[Layout]:
    shards: tuple[Shard, ...] = (*_OPTIMIZER, "weights") if facts.num_blocks > 1 else _OPTIMIZER
    if facts.batch >= total:
        yield from (Layout(total, shard=shard, num_workers=num_workers) for shard in shards)


def _shards(num_shards: int, replicas: int, num_workers: int, facts: ModelFacts) -> Iterator[Layout]:
    if facts.divides_layers and facts.batch >= replicas:
        for shard in _OPTIMIZER if replicas > 1 else (None,):
            yield Layout(replicas, num_shards=num_shards, num_workers=num_workers, shard=shard)


def _pipelines(grid: Layout, facts: ModelFacts, recompute: bool) -> Iterator[Layout]:
    if grid.num_stages > facts.num_blocks:
        return
    # In one process the replicas of a pipeline always shard the optimizer's state.
    shards = _OPTIMIZER if grid.num_workers > 1 and not grid.across_workers else (None,)
    counts = [per_stage * grid.num_stages for per_stage in _MICROBATCHES_PER_STAGE]
    possible = [count for count in counts if count * grid.num_replicas <= facts.batch]
    for count, shard in itertools.product(possible, shards):
        layout = dataclasses.replace(grid, num_microbatches=count, shard=shard)
        yield layout
        yield dataclasses.replace(layout, schedule="zero_bubble")
        if recompute:
            yield dataclasses.replace(layout, recompute=True)
