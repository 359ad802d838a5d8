"""The search for the best cuts of a sequence of calls, over running sums of whole numbers.

    position   0   1   2   3   4   5
               | a | b | c | d | e |        cuts [0, 2, 5]: stage 0 holds a and b, stage 1 the rest

A stage lies between two positions, so what it costs is a difference of two running sums. Whole numbers, since sums of
floats depend on their order and would tell apart stages that cost the same.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

MAX_TRIED_SPLITS = 20_000
SEARCHED_CALLS = 10_000

_Key = tuple[int, int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Sums:
    """What the calls before each of the positions 0 to `num_calls` add up to, and what crosses a cut there.

    Args:
        cost: Of the calls before each position, from 0.
        memory: Likewise.
        traffic: Across a cut at each position; 0 at both ends, where none is made.
    """

    cost: list[int]
    memory: list[int]
    traffic: list[int]

    @property
    def num_calls(self) -> int:
        """How many calls lie between the first and the last position."""
        return len(self.cost) - 1


def whole(values: Sequence[float]) -> list[int]:
    """Return whole numbers in exactly the proportions of the values.

    Example:
        >>> whole([0.5, 2, 0.25])
        [2, 8, 1]
    """
    ratios = [(value if isinstance(value, int) else float(value)).as_integer_ratio() for value in values]
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def running(values: Sequence[int]) -> list[int]:
    """Return the sums of the first 0, 1, ... of the values.

    Example:
        >>> running([3, 1, 2])
        [0, 3, 4, 6]
    """
    return list(itertools.accumulate(values, initial=0))


def device_memory(memory: list[int], cuts: Sequence[int], num_devices: int) -> list[int]:
    """Return what each device holds when stage s lies on device `s % num_devices`.

    Args:
        memory: Running sums.
        cuts: Positions from 0 to the number of calls.
    """
    held = [memory[end] - memory[begin] for begin, end in itertools.pairwise(cuts)]
    return [sum(held[device::num_devices]) for device in range(num_devices)]


def solve(sums: Sums, num_stages: int, num_devices: int, limit: int | None) -> list[int]:
    """Return the positions at which the stages begin and end, the first 0 and the last `num_calls`.

    Args:
        sums: The calls.
        num_stages: At most the number of calls.
        num_devices: Divides `num_stages`.
        limit: Of the memory of a device, in the unit of `sums.memory`; None for none.

    Returns:
        Cuts within the limit; where none are found, those that exceed it least.
    """
    limit = sums.memory[-1] if limit is None else limit

    def key(cuts: Sequence[int]) -> _Key:
        excess = [max(0, held - limit) for held in device_memory(sums.memory, cuts, num_devices)]
        stages = [sums.cost[end] - sums.cost[begin] for begin, end in itertools.pairwise(cuts)]
        traffic = sum(sums.traffic[cut] for cut in cuts)
        sizes = [end - begin for begin, end in itertools.pairwise(cuts)]
        # Squares of excess fall already when a full device passes a part on, which its neighbour then passes on.
        return max(excess), _squares(excess), max(stages), traffic, _squares(stages), _squares(sizes)

    found = _solve(sums, num_stages, limit)
    if found is None or key(found)[0] > 0:
        lightest = _solve(dataclasses.replace(sums, cost=sums.memory), num_stages, sums.memory[-1])
        assert lightest is not None, "there are at least as many calls as stages"
        if num_devices == num_stages:
            return lightest
        if math.comb(sums.num_calls - 1, num_stages - 1) <= MAX_TRIED_SPLITS:
            inner = itertools.combinations(range(1, sums.num_calls), num_stages - 1)
            return min(([0, *cuts, sums.num_calls] for cuts in inner), key=key)
        starts = [found or lightest, lightest, *_random_cuts(sums.num_calls, num_stages)]
        found = min((_descend(start, key) for start in starts), key=key)
    return _descend(found, key)


def _squares(values: Sequence[int]) -> int:
    return sum(value**2 for value in values)


def _random_cuts(num_calls: int, num_stages: int) -> list[list[int]]:
    """Always the same ones; fewer where there are many calls, so that the search takes about as long."""
    generator = random.Random(0)
    count = SEARCHED_CALLS // num_calls
    return [[0, *sorted(generator.sample(range(1, num_calls), num_stages - 1)), num_calls] for _ in range(count)]


def _descend(cuts: list[int], key: Callable[[Sequence[int]], _Key]) -> list[int]:
    """Move one cut at a time to where it is best, until none moves."""
    while True:
        before = key(cuts)
        for index in range(1, len(cuts) - 1):
            moved = range(cuts[index - 1] + 1, cuts[index + 1])
            cuts = min(([*cuts[:index], cut, *cuts[index + 1 :]] for cut in moved), key=key)
        if key(cuts) == before:
            return cuts


# --- each stage with its own memory: exact ----------------------------------------------------------------------------


def _solve(sums: Sums, num_stages: int, cap: int) -> list[int] | None:
    """Return the best cuts with at most `cap` of memory a stage, or None if there are none."""
    low, high = 0, sums.cost[-1]
    if not _fits(sums, high, cap, num_stages):
        return None
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, middle, cap, num_stages):
            high = middle
        else:
            low = middle + 1
    return _least_traffic(sums, low, cap, num_stages)


def _fits(sums: Sums, bound: int, cap: int, num_stages: int) -> bool:
    """Whether stages that each take as many calls as they can reach the end.

    Fewer stages than asked for are enough: any of them can be cut further, which makes no stage larger.
    """
    position = 0
    for _ in range(num_stages):
        by_cost = bisect.bisect_right(sums.cost, sums.cost[position] + bound)
        by_memory = bisect.bisect_right(sums.memory, sums.memory[position] + cap)
        position = min(by_cost, by_memory) - 1
    return position == sums.num_calls


def _least_traffic(sums: Sums, bound: int, cap: int, num_stages: int) -> list[int]:
    """Return the cuts with the least traffic among those whose stages keep to `bound` and `cap`."""
    first_begins = [
        max(bisect.bisect_left(sums.cost, cost - bound), bisect.bisect_left(sums.memory, memory - cap))
        for cost, memory in zip(sums.cost, sums.memory, strict=True)
    ]
    # least[s][end]: the least traffic with which s stages hold the calls before `end`; None where they cannot.
    least: list[list[int | None]] = [[0, *[None] * sums.num_calls]]
    for _ in range(num_stages):
        least.append(_one_more_stage(least[-1], sums.traffic, first_begins))
    return _walk_back(sums, least, first_begins)


def _one_more_stage(before: list[int | None], traffic: list[int], first_begins: list[int]) -> list[int | None]:
    """Add a stage behind each split, in time linear in the calls: both ends of the range of begins only move on."""
    row: list[int | None] = [None]
    candidates: collections.deque[tuple[int, int]] = collections.deque()  # rising in traffic and in position
    for end in range(1, len(before)):
        value = before[end - 1]
        if value is not None:
            value += traffic[end - 1]
            while candidates and candidates[-1][0] >= value:
                candidates.pop()
            candidates.append((value, end - 1))
        while candidates and candidates[0][1] < first_begins[end]:
            candidates.popleft()
        row.append(candidates[0][0] if candidates else None)
    return row


def _walk_back(sums: Sums, least: list[list[int | None]], first_begins: list[int]) -> list[int]:
    """Read one split from the table; where several are best, its cuts lie in the middle of what is possible."""
    cuts = [sums.num_calls]
    for stage in range(len(least) - 1, 0, -1):
        end = cuts[-1]
        values = ((begin, least[stage - 1][begin]) for begin in range(first_begins[end], end))
        begins = [b for b, value in values if value is not None and value + sums.traffic[b] == least[stage][end]]
        cuts.append(begins[len(begins) // 2])
    return cuts[::-1]
