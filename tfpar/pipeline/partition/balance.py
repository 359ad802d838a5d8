"""How many layer calls each stage of a pipeline holds: by cost, by the user's own numbers, or by layer names.

The slowest stage sets the pace of a pipeline, so its cost is what a balance makes small. DeepSpeed's and torchgpipe's
balancers search around that optimum; over running sums the optimum itself is as cheap:

    costs          4  1  1  1  1  4      a stage takes what it can up to a bound; three stages fit under 4
    3 stages      |4||1  1  1  1||4|     and not under 3, so 4 is the best bound, found by halving

Among all splits that reach the bound, dynamic programming finds one with the least traffic across its cuts.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from tfpar.pipeline.partition.minmax_partition import Sums, device_memory, running, solve, whole


def balance_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    traffic_bytes: Sequence[float] = (),
    memory_bytes: Sequence[float] = (),
    memory_limit_bytes: float | None = None,
    num_devices: int | None = None,
    names: Sequence[str] = (),
) -> list[int]:
    """Split a sequence of calls into consecutive stages, so that the slowest stage costs as little as possible.

    Exact, ties included: costs are summed as whole numbers. Of the splits with the same slowest stage it returns one
    with the least traffic, of those one that is about the most even, and always the same one. Where all costs are
    zero, each call counts as one.

    A memory limit is always obeyed. The result is still exact where each stage has a device of its own. Where several
    stages share one, it is exact if the split without the limit on their sum happens to obey it, or if at most 20,000
    splits exist; else it is the best that moving one cut at a time finds from many starts, and a limit close to the
    least that is needed may be refused.

    Args:
        costs: Of each call, in any unit: seconds, operations, parameters, bytes.
        num_stages: From 1 to the number of calls.
        traffic_bytes: What crosses a cut behind each call but the last; empty for none.
        memory_bytes: What each call needs on its device; only a limit reads it.
        memory_limit_bytes: What a device may hold; None for no limit.
        num_devices: Stage s lies on device `s % num_devices`; None for a device a stage.
        names: Of the calls, for error messages.

    Returns:
        The number of calls of each stage, each at least 1, together all calls.

    Raises:
        ValueError: If there are more stages than calls, if a number is negative or not finite, or if no split within
            the memory limit is found; with the numbers.

    Example:
        >>> balance_layers([4, 1, 1, 1, 1, 4], num_stages=3)
        [1, 4, 1]
        >>> balance_layers([2, 2, 2], num_stages=2, traffic_bytes=[800, 100])
        [2, 1]
    """
    num_devices = num_stages if num_devices is None else num_devices
    names = names or [f"call {index}" for index in range(len(costs))]
    traffic_bytes = traffic_bytes if len(traffic_bytes) else [0] * (len(costs) - 1)
    _check_counts(len(costs), num_stages, num_devices)
    _check_numbers("costs", costs, names)
    _check_numbers("traffic_bytes", traffic_bytes, names[:-1])
    if memory_limit_bytes is None:
        memory, limit = [0] * len(costs), None
    else:
        _check_limit(memory_bytes, memory_limit_bytes, names)
        *memory, limit = whole([*memory_bytes, memory_limit_bytes])
    sums = Sums(
        cost=running(whole(costs) if any(costs) else [1] * len(costs)),
        memory=running(memory),
        traffic=[0, *whole(traffic_bytes), 0],
    )
    cuts = solve(sums, num_stages, num_devices, limit)
    if limit is not None and memory_limit_bytes is not None:
        _check_held(device_memory(sums.memory, cuts, num_devices), limit, num_stages, memory_limit_bytes)
    return [end - begin for begin, end in itertools.pairwise(cuts)]


def from_sizes(sizes: Sequence[int], num_calls: int, num_stages: int) -> list[int]:
    """Check the user's own number of calls a stage.

    Args:
        sizes: Of each stage, in order.
        num_calls: Of the model.
        num_stages: Of the pipeline.

    Returns:
        The sizes, as a list.

    Raises:
        TypeError: If a size is no whole number.
        ValueError: If there is not one for each stage, if one is below 1, or if they do not add up to `num_calls`.

    Example:
        >>> from_sizes((3, 1), num_calls=4, num_stages=2)
        [3, 1]
    """
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(
                f"balance must list whole numbers, received {size!r} in {list(sizes)}; write how many layer calls "
                "each stage holds."
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
    if sum(sizes) != num_calls:
        raise ValueError(
            f"balance must add up to the {num_calls} layer calls of the model, received {list(sizes)}, which adds up "
            f"to {sum(sizes)}; {_too_many_or_few(num_calls - sum(sizes))}."
        )
    return list(sizes)


def from_names(cut_before: Sequence[str], names: Sequence[str], num_stages: int) -> list[int]:
    """Return the number of calls a stage when a new stage begins with each of the named ones.

    Args:
        cut_before: Names of the calls with which stages 1, 2, ... begin, in the order of the model.
        names: Of all calls, in order.
        num_stages: One more than there are cuts.

    Returns:
        The number of calls of each stage.

    Raises:
        ValueError: If a name is not there, there more than once, that of the first call, repeated or out of order,
            or if the number of names is not `num_stages - 1`.

    Example:
        >>> from_names(["block_2", "head"], ["embed", "block_1", "block_2", "block_3", "head"], num_stages=3)
        [2, 2, 1]
    """
    if len(cut_before) != num_stages - 1:
        raise ValueError(
            f"{num_stages} stages need {num_stages - 1} layer names to cut before, received {len(cut_before)}: "
            f"{list(cut_before)}; name the layer with which each stage but the first begins, or set "
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
            raise ValueError(f"Each layer may be cut before once, received {name!r} twice; name another layer.")
        if later < earlier:
            raise ValueError(
                f"Layers to cut before must stand in the order of the model, received {names[earlier]!r} before "
                f"{name!r}, which comes first; write {sorted(cut_before, key=list(names).index)}."
            )
    return [end - begin for begin, end in itertools.pairwise(cuts)]


# --- checks -----------------------------------------------------------------------------------------------------------


def _too_many_or_few(missing: int) -> str:
    return f"add {missing}" if missing > 0 else f"take {-missing} away"


def _position(name: str, names: Sequence[str]) -> int:
    count = list(names).count(name)
    if count == 1:
        return list(names).index(name)
    if count > 1:
        raise ValueError(
            f"A layer to cut before must be applied once, received {name!r}, which the model applies {count} times; "
            "cut before a layer next to it, or list how many layer calls each stage holds."
        )
    close = difflib.get_close_matches(name, names, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"the model has {_first_of(names)}."
    raise ValueError(f"Layers to cut before must be layers of the model, received {name!r}; {hint}")


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_counts(num_calls: int, num_stages: int, num_devices: int) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages must be at least 1, received {num_stages}; 1 keeps the model whole.")
    if num_stages > num_calls:
        raise ValueError(
            f"Each stage needs a layer call, received num_stages={num_stages} for a model of {num_calls}; use at most "
            f"{num_calls} stages, or a deeper model."
        )
    if num_devices < 1 or num_stages % num_devices:
        raise ValueError(
            f"num_stages must be a multiple of num_devices, received {num_stages} stages on {num_devices} devices; "
            "change one of them."
        )


def _check_numbers(what: str, values: Sequence[float], names: Sequence[str]) -> None:
    if len(values) != len(names):
        raise ValueError(f"{what} must have {len(names)} entries, received {len(values)}; give one for each.")
    for name, value in zip(names, values, strict=True):
        if not 0 <= value < math.inf:
            raise ValueError(
                f"{what} must be finite and not negative, received {value} for {name!r}; measure again, or balance "
                "by something else."
            )


def _check_limit(memory_bytes: Sequence[float], limit_bytes: float, names: Sequence[str]) -> None:
    if not 0 < limit_bytes < math.inf:
        raise ValueError(
            f"memory_limit_bytes must be positive and finite, received {limit_bytes}; give what a device may hold, or "
            "None for no limit."
        )
    _check_numbers("memory_bytes", memory_bytes, names)
    need, name = max(zip(memory_bytes, names, strict=True))
    if need > limit_bytes:
        raise ValueError(
            f"A device may hold memory_limit_bytes={limit_bytes:,.0f}, and {name!r} alone needs {need:,.0f}; use "
            f"smaller micro-batches or recompute=True, or raise the limit to {need:,.0f} or more."
        )


def _check_held(held: Sequence[int], limit: int, num_stages: int, limit_bytes: float) -> None:
    """Refuse a split that is the lightest found and still too heavy; `held` and `limit` have a unit of their own."""
    if max(held) > limit:
        need = math.ceil(Fraction(max(held), limit) * Fraction(limit_bytes))
        raise ValueError(
            f"A device may hold memory_limit_bytes={limit_bytes:,.0f}, and the lightest split found of {num_stages} "
            f"stages over {len(held)} devices needs {need:,} on device {held.index(max(held))}; use more devices, "
            f"smaller micro-batches or recompute=True, or raise the limit to {need:,}."
        )
