"""The number of layer calls of each stage: from costs, from given sizes, or from layer names.

The slowest stage limits the throughput of a pipeline, so the partition minimizes its cost. Bisection over this cost
finds the exact optimum:

    costs          4  1  1  1  1  4      greedy: each stage takes calls up to the bound
    3 stages      |4||1  1  1  1||4|     3 stages suffice for bound 4 but not for bound 3, so 4 is optimal

Among the partitions with this bound, dynamic programming finds one with the fewest bytes across its cuts.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from tfpar.pipeline.partition.minmax_partition import PrefixSums, device_memory, prefix_sums, solve, to_integers


def balance_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    transfer_bytes: Sequence[float] = (),
    memory_bytes: Sequence[float] = (),
    memory_limit_bytes: float | None = None,
    num_devices: int | None = None,
    names: Sequence[str] = (),
) -> list[int]:
    """Partition layer calls into consecutive stages so that the slowest stage is as fast as possible.

    The optimum is exact and deterministic. Among the optimal partitions, the function returns one with the fewest bytes
    across its cuts, and among these one with balanced stages. If all costs are zero, each call counts as one.

    The result never exceeds the memory limit. With one stage on each device, it remains optimal. With several stages on
    a device, it is optimal if the limit does not matter, or if there are at most 20,000 partitions. Otherwise a local
    search moves one cut at a time; it can miss the optimum, and can refuse a limit that is close to the minimum.

    Args:
        costs: Cost of each call in any unit, such as seconds or bytes.
        num_stages: Number of stages, from 1 to the number of calls.
        transfer_bytes: Bytes across a cut after each call except the last. Defaults to zeros.
        memory_bytes: Memory of each call. Required with `memory_limit_bytes`.
        memory_limit_bytes: Memory of each device. Defaults to no limit.
        num_devices: Number of devices. Stage s runs on device `s % num_devices`. Defaults to `num_stages`.
        names: Names of the calls, for error messages.

    Returns:
        The number of calls of each stage, each at least 1.

    Raises:
        ValueError: If there are more stages than calls, a number is negative or not finite, or no partition within the
            memory limit is found.

    Example:
        >>> balance_layers([4, 1, 1, 1, 1, 4], num_stages=3)
        [1, 4, 1]
        >>> balance_layers([2, 2, 2], num_stages=2, transfer_bytes=[800, 100])
        [2, 1]
    """
    num_devices = num_stages if num_devices is None else num_devices
    names = names or [f"call {index}" for index in range(len(costs))]
    transfer_bytes = transfer_bytes if len(transfer_bytes) else [0] * (len(costs) - 1)
    _check_counts(len(costs), num_stages, num_devices)
    _check_numbers("costs", costs, names)
    _check_numbers("transfer_bytes", transfer_bytes, names[:-1])
    if memory_limit_bytes is None:
        memory, limit = [0] * len(costs), None
    else:
        _check_limit(memory_bytes, memory_limit_bytes, names)
        *memory, limit = to_integers([*memory_bytes, memory_limit_bytes])
    sums = PrefixSums(
        cost=prefix_sums(to_integers(costs) if any(costs) else [1] * len(costs)),
        memory=prefix_sums(memory),
        transfer=[0, *to_integers(transfer_bytes), 0],
    )
    cuts = solve(sums, num_stages, num_devices, limit)
    if limit is not None and memory_limit_bytes is not None:
        _check_device_memory(device_memory(sums.memory, cuts, num_devices), limit, num_stages, memory_limit_bytes)
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def from_sizes(sizes: Sequence[int], num_calls: int, num_stages: int) -> list[int]:
    """Validate the number of layer calls of each stage.

    Args:
        sizes: Number of layer calls of each stage.
        num_calls: Number of layer calls of the model.
        num_stages: Number of stages of the pipeline.

    Returns:
        The sizes as a list.

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If the number of sizes is not `num_stages`, a size is below 1, or the sum is not `num_calls`.

    Example:
        >>> from_sizes((3, 1), num_calls=4, num_stages=2)
        [3, 1]
    """
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(
                f"balance must list whole numbers, received {size!r} in {list(sizes)}; write the number of layer calls "
                "of each stage."
            )
    if len(sizes) != num_stages:
        raise ValueError(
            f"balance must have one number for each of the {num_stages} stages, received {len(sizes)}: "
            f"{list(sizes)}; add or remove numbers, or set num_stages={len(sizes)}."
        )
    for stage, size in enumerate(sizes):
        if size < 1:
            raise ValueError(
                f"balance must give each stage at least 1 layer call, received {size} for stage {stage} in "
                f"{list(sizes)}; use fewer stages, or move a layer call to stage {stage}."
            )
    if missing := num_calls - sum(sizes):
        raise ValueError(
            f"balance must add up to the {num_calls} layer calls of the model, received {list(sizes)}, which adds up "
            f"to {sum(sizes)}; {f'add {missing}' if missing > 0 else f'take {-missing} away'}."
        )
    return list(sizes)


def from_names(cut_before: Sequence[str], names: Sequence[str], num_stages: int) -> list[int]:
    """Return the number of layer calls of each stage from the names of the layers to cut before.

    Args:
        cut_before: Names of the first layer calls of stages 1, 2, ...
        names: Names of all layer calls.
        num_stages: Number of stages of the pipeline.

    Raises:
        ValueError: If a name is unknown, ambiguous, repeated, out of order or that of the first call, or if there are
            not `num_stages - 1` names.

    Example:
        >>> from_names(["block_2", "head"], ["embed", "block_1", "block_2", "block_3", "head"], num_stages=3)
        [2, 2, 1]
    """
    if len(cut_before) != num_stages - 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} layer names to cut before, received {len(cut_before)}: "
            f"{list(cut_before)}; name the first layer of each stage except stage 0, or set "
            f"num_stages={len(cut_before) + 1}."
        )
    cuts = [0, *(_position(name, names) for name in cut_before), len(names)]
    for (earlier, later), name in zip(itertools.pairwise(cuts[:-1]), cut_before, strict=True):
        if later == 0:
            raise ValueError(
                f"A cut must leave a layer before it, received {name!r}, the first of the model; name a later one, "
                f"such as {names[1] if len(names) > 1 else None!r}."
            )
        if later == earlier:
            raise ValueError(f"Layers to cut before must differ, received {name!r} twice; name another layer.")
        if later < earlier:
            raise ValueError(
                f"Layers to cut before must be in the order of the model, received {names[earlier]!r} before "
                f"{name!r}, which comes first; write {sorted(cut_before, key=list(names).index)}."
            )
    return [end - begin for begin, end in itertools.pairwise(cuts)]


# --- checks -----------------------------------------------------------------------------------------------------------


def _position(name: str, names: Sequence[str]) -> int:
    count = list(names).count(name)
    if count == 1:
        return list(names).index(name)
    if count > 1:
        raise ValueError(
            f"A layer to cut before must be applied once, received {name!r}, which the model applies {count} times; "
            "cut before a layer next to it, or list the number of layer calls of each stage."
        )
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the model has {_shortened(names)}."
    raise ValueError(f"Layers to cut before must be layers of the model, received {name!r}; {hint}")


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_counts(num_calls: int, num_stages: int, num_devices: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, received {num_stages}.")
    if num_stages > num_calls:
        raise ValueError(
            f"Each stage needs a layer call, received num_stages={num_stages} for a model with {num_calls}; use at "
            f"most {num_calls} stages, or a deeper model."
        )
    if num_devices < 1 or num_stages % num_devices:
        raise ValueError(
            f"num_stages must be a multiple of num_devices, received {num_stages} stages on {num_devices} devices; "
            "change one of them."
        )


def _check_numbers(argument: str, values: Sequence[float], names: Sequence[str]) -> None:
    if len(values) != len(names):
        raise ValueError(f"{argument} must have {len(names)} entries, received {len(values)}.")
    for name, value in zip(names, values, strict=True):
        if not 0 <= value < math.inf:
            raise ValueError(
                f"{argument} must be finite and not negative, received {value} for {name!r}; measure again, or use "
                "another balance."
            )


def _check_limit(memory_bytes: Sequence[float], limit_bytes: float, names: Sequence[str]) -> None:
    if not 0 < limit_bytes < math.inf:
        raise ValueError(
            f"memory_limit_bytes must be positive and finite, received {limit_bytes}; pass the memory of a device, or "
            "None for no limit."
        )
    _check_numbers("memory_bytes", memory_bytes, names)
    needed_bytes, name = max(zip(memory_bytes, names, strict=True))
    if needed_bytes > limit_bytes:
        raise ValueError(
            f"Each device has memory_limit_bytes={limit_bytes:,.0f}, and {name!r} alone needs {needed_bytes:,.0f}; use "
            f"smaller micro-batches or recompute=True, or raise the limit to {needed_bytes:,.0f} or more."
        )


def _check_device_memory(memory: Sequence[int], limit: int, num_stages: int, limit_bytes: float) -> None:
    """Raise an error if the smallest partition exceeds the limit; `memory` and `limit` are scaled integers."""
    if max(memory) > limit:
        needed_bytes = math.ceil(Fraction(max(memory), limit) * Fraction(limit_bytes))
        raise ValueError(
            f"Each device has memory_limit_bytes={limit_bytes:,.0f}, and the smallest partition found of {num_stages} "
            f"stages on {len(memory)} devices needs {needed_bytes:,} on device {memory.index(max(memory))}; use more "
            f"devices, smaller micro-batches or recompute=True, or raise the limit to {needed_bytes:,}."
        )
