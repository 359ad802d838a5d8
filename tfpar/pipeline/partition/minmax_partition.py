"""Minimax partition of a sequence of calls: the cuts that minimize the cost of the slowest stage.

    position   0   1   2   3   4   5
               | a | b | c | d | e |        cuts [0, 2, 5]: stage 0 is a and b, stage 1 is c, d and e

A stage lies between two positions, so its cost is the difference of two prefix sums. The sums are integers, because
rounding would make stages of equal cost differ.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

MAX_ENUMERATED_PARTITIONS = 20_000
LOCAL_SEARCH_BUDGET = 10_000  # starting points times calls

_Key = tuple[int, int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class PrefixSums:
    """Sums over the calls before each position from 0 to `num_calls`.

    Args:
        cost: Sum of the costs of the calls before each position.
        memory: Sum of their memory.
        transfer: Size of the transfer across a cut at each position (not a sum); 0 at both ends.

    Example:
        >>> PrefixSums(cost=prefix_sums([3, 1, 2]), memory=[0, 0, 0, 0], transfer=[0, 5, 5, 0]).num_calls
        3
    """

    cost: list[int]
    memory: list[int]
    transfer: list[int]

    @property
    def num_calls(self) -> int:
        """The number of calls."""
        return len(self.cost) - 1


def to_integers(values: Sequence[float]) -> list[int]:
    """Scale finite numbers to integers in exactly the same proportions.

    Example:
        >>> to_integers([0.5, 2, 0.25])
        [2, 8, 1]
    """
    ratios = [(value if isinstance(value, int) else float(value)).as_integer_ratio() for value in values]
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def prefix_sums(values: Sequence[int]) -> list[int]:
    """Return the sums of the first 0, 1, 2, ... values.

    Example:
        >>> prefix_sums([3, 1, 2])
        [0, 3, 4, 6]
    """
    return list(itertools.accumulate(values, initial=0))


def device_memory(memory: list[int], cuts: Sequence[int], num_devices: int) -> list[int]:
    """Return the memory of each device.

    Args:
        memory: Prefix sums of the memory of the calls.
        cuts: Positions of the cuts, from 0 to the number of calls.
        num_devices: Number of devices. Stage s runs on device `s % num_devices`.

    Example:
        >>> device_memory(prefix_sums([3, 1, 2]), cuts=[0, 1, 3], num_devices=2)
        [3, 3]
    """
    per_stage = [memory[end] - memory[begin] for begin, end in itertools.pairwise(cuts)]
    return [sum(per_stage[device::num_devices]) for device in range(num_devices)]


def solve(sums: PrefixSums, num_stages: int, num_devices: int, limit: int | None) -> list[int]:
    """Find the cuts that minimize the cost of the slowest stage.

    Args:
        sums: Prefix sums over the calls.
        num_stages: Number of stages, at most the number of calls.
        num_devices: Number of devices, a divisor of `num_stages`.
        limit: Memory of a device in the unit of `sums.memory`; None for no limit.

    Returns:
        The positions of the cuts, from 0 to the number of calls. If none within the limit are found, those that exceed
        it least.

    Example:
        >>> costs = prefix_sums([4, 1, 1, 1, 1, 4])
        >>> solve(PrefixSums(costs, [0] * 7, [0] * 7), num_stages=3, num_devices=3, limit=None)
        [0, 1, 5, 6]
    """
    limit = sums.memory[-1] if limit is None else limit

    def key(cuts: Sequence[int]) -> _Key:
        excess = [max(0, memory - limit) for memory in device_memory(sums.memory, cuts, num_devices)]
        costs = [sums.cost[end] - sums.cost[begin] for begin, end in itertools.pairwise(cuts)]
        transfer = sum(sums.transfer[cut] for cut in cuts)
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        # Moving a call off a full device reduces the sum of squares, even if it does not reduce the maximum.
        return max(excess), _squares(excess), max(costs), transfer, _squares(costs), _squares(sizes)

    best = _solve_with_stage_limit(sums, num_stages, limit)
    if best is None or key(best)[0] > 0:
        smallest = _solve_with_stage_limit(dataclasses.replace(sums, cost=sums.memory), num_stages, sums.memory[-1])
        assert smallest is not None, "there are at least as many calls as stages"
        if num_devices == num_stages:
            return smallest
        if math.comb(sums.num_calls - 1, num_stages - 1) <= MAX_ENUMERATED_PARTITIONS:
            inner = itertools.combinations(range(1, sums.num_calls), num_stages - 1)
            return min(([0, *cuts, sums.num_calls] for cuts in inner), key=key)
        starts = [best or smallest, smallest, *_random_cuts(sums.num_calls, num_stages)]
        best = min((_local_search(start, key) for start in starts), key=key)
    return _local_search(best, key)


def _squares(values: Sequence[int]) -> int:
    return sum(value**2 for value in values)


def _random_cuts(num_calls: int, num_stages: int) -> list[list[int]]:
    """Return reproducible random starting points of the local search; fewer for more calls."""
    generator = random.Random(0)
    count = LOCAL_SEARCH_BUDGET // num_calls
    return [[0, *sorted(generator.sample(range(1, num_calls), num_stages - 1)), num_calls] for _ in range(count)]


def _local_search(cuts: list[int], key: Callable[[Sequence[int]], _Key]) -> list[int]:
    """Move one cut at a time to its best position, until no move improves the key."""
    while True:
        before = key(cuts)
        for index in range(1, len(cuts) - 1):
            moved = range(cuts[index - 1] + 1, cuts[index + 1])
            cuts = min(([*cuts[:index], cut, *cuts[index + 1 :]] for cut in moved), key=key)
        if key(cuts) == before:
            return cuts


# --- exact, with a limit on the memory of each stage ------------------------------------------------------------------


def _solve_with_stage_limit(sums: PrefixSums, num_stages: int, limit: int) -> list[int] | None:
    """Return the best cuts with at most `limit` memory on each stage, or None if there are none."""
    low, high = 0, sums.cost[-1]
    if not _fits(sums, high, limit, num_stages):
        return None
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, middle, limit, num_stages):
            high = middle
        else:
            low = middle + 1
    return _least_transfer(sums, low, limit, num_stages)


def _fits(sums: PrefixSums, bound: int, limit: int, num_stages: int) -> bool:
    """Return whether `num_stages` stages within `bound` and `limit` suffice.

    Each stage takes as many calls as fit. If fewer stages suffice, additional cuts make no stage larger.
    """
    position = 0
    for _ in range(num_stages):
        by_cost = bisect.bisect_right(sums.cost, sums.cost[position] + bound)
        by_memory = bisect.bisect_right(sums.memory, sums.memory[position] + limit)
        position = min(by_cost, by_memory) - 1
    return position == sums.num_calls


def _least_transfer(sums: PrefixSums, bound: int, limit: int, num_stages: int) -> list[int]:
    """Return the cuts with the smallest transfers among those with all stages within `bound` and `limit`."""
    # For each end of a stage, the earliest begin within the bound and the limit.
    first_begins = [
        max(bisect.bisect_left(sums.cost, cost - bound), bisect.bisect_left(sums.memory, memory - limit))
        for cost, memory in zip(sums.cost, sums.memory, strict=True)
    ]
    # least[s][end]: the smallest transfers of s stages over the calls before `end`; None if there are no such stages.
    least: list[list[int | None]] = [[0, *[None] * sums.num_calls]]
    for _ in range(num_stages):
        least.append(_add_stage(least[-1], sums.transfer, first_begins))
    return _backtrack(sums, least, first_begins)


def _add_stage(previous: list[int | None], transfer: list[int], first_begins: list[int]) -> list[int | None]:
    """Return the next row of the table in linear time, as sliding-window minima."""
    row: list[int | None] = [None]
    candidates: collections.deque[tuple[int, int]] = collections.deque()  # ascending in transfer and in position
    for end in range(1, len(previous)):
        value = previous[end - 1]
        if value is not None:
            value += transfer[end - 1]
            while candidates and candidates[-1][0] >= value:
                candidates.pop()
            candidates.append((value, end - 1))
        while candidates and candidates[0][1] < first_begins[end]:
            candidates.popleft()
        row.append(candidates[0][0] if candidates else None)
    return row


def _backtrack(sums: PrefixSums, least: list[list[int | None]], first_begins: list[int]) -> list[int]:
    """Read optimal cuts from the table, from last to first. Of several optimal cuts, take the middle one."""
    cuts = [sums.num_calls]
    for stage in range(len(least) - 1, 0, -1):
        end = cuts[-1]
        values = ((begin, least[stage - 1][begin]) for begin in range(first_begins[end], end))
        begins = [b for b, value in values if value is not None and value + sums.transfer[b] == least[stage][end]]
        cuts.append(begins[len(begins) // 2])
    return cuts[::-1]
