"""Balances: optimal partitions compared with brute force, given sizes and names, invalid arguments."""

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tfpar.pipeline.partition.balance import balance_layers, from_names, from_sizes

# --- optimal ----------------------------------------------------------------------------------------------------------


def partitions(num_calls: int, num_stages: int) -> Iterator[list[range]]:
    """Yield all partitions of a sequence of calls into stages that are not empty."""
    for inner in itertools.combinations(range(1, num_calls), num_stages - 1):
        cuts = [0, *inner, num_calls]
        yield [range(begin, end) for begin, end in itertools.pairwise(cuts)]


def stages_of(sizes: list[int]) -> list[range]:
    cuts = list(itertools.accumulate(sizes, initial=0))
    return [range(begin, end) for begin, end in itertools.pairwise(cuts)]


class Case:
    """A random sequence of calls with integer costs, so that ties are frequent and sums are exact."""

    def __init__(self, generator: random.Random) -> None:
        self.num_calls = generator.randint(1, 9)
        self.num_stages = generator.randint(1, self.num_calls)
        divisors = [number for number in range(1, self.num_stages + 1) if self.num_stages % number == 0]
        self.num_devices = generator.choice(divisors)
        largest = generator.choice([1, 3, 10, 1000])
        self.costs = [generator.randint(1, largest) for _ in range(self.num_calls)]
        self.transfer = [generator.randint(0, generator.choice([2, 100])) for _ in range(self.num_calls - 1)]
        self.memory = [generator.randint(0, 9) for _ in range(self.num_calls)]

    def score(self, stages: list[range]) -> tuple[int, int]:
        """Return the cost of the slowest stage, and the transfers."""
        slowest = max(sum(self.costs[call] for call in stage) for stage in stages)
        return slowest, sum(self.transfer[stage[-1]] for stage in stages[:-1])

    def peak_memory(self, stages: list[range]) -> int:
        """Return the largest memory of a device."""
        memory = [sum(self.memory[call] for call in stage) for stage in stages]
        return max(sum(memory[device :: self.num_devices]) for device in range(self.num_devices))


def cases(count: int) -> list[Case]:
    generator = random.Random(4)
    return [Case(generator) for _ in range(count)]


def test_the_slowest_stage_and_then_the_transfers_are_those_of_brute_force() -> None:
    for case in cases(1500):
        sizes = balance_layers(case.costs, case.num_stages, transfer_bytes=case.transfer)
        assert len(sizes) == case.num_stages
        assert min(sizes) >= 1
        assert sum(sizes) == case.num_calls
        best = min(case.score(stages) for stages in partitions(case.num_calls, case.num_stages))
        assert case.score(stages_of(sizes)) == best, vars(case)


def test_a_memory_limit_gives_the_best_partition_within_it_or_an_error_with_the_minimum() -> None:
    refused, binding = 0, 0
    for index, case in enumerate(cases(1500)):
        least = min(map(case.peak_memory, partitions(case.num_calls, case.num_stages)))
        limit = max(1, least + index % 4 - 1)
        arguments: dict[str, Any] = {
            "transfer_bytes": case.transfer,
            "memory_bytes": case.memory,
            "memory_limit_bytes": limit,
            "num_devices": case.num_devices,
        }
        if least > limit:
            refused += 1
            needed = max(case.memory) if max(case.memory) > limit else least
            with pytest.raises(ValueError, match=rf"raise the limit to {needed}\b"):
                balance_layers(case.costs, case.num_stages, **arguments)
            continue
        sizes = balance_layers(case.costs, case.num_stages, **arguments)
        within = [stages for stages in partitions(case.num_calls, case.num_stages) if case.peak_memory(stages) <= limit]
        assert case.peak_memory(stages_of(sizes)) <= limit
        assert case.score(stages_of(sizes)) == min(map(case.score, within)), vars(case)
        binding += case.peak_memory(stages_of(balance_layers(case.costs, case.num_stages))) > limit
    assert refused > 300, "limits below the least needed must occur"
    assert binding > 100, "limits that change the partition must occur"


def test_local_search_obeys_a_limit_with_several_stages_on_a_device() -> None:
    generator = random.Random(0)
    memory = [6000, *(generator.randint(50, 150) for _ in range(119))]
    limit = 1.05 * sum(memory) / 2
    costs = [generator.random() for _ in memory]
    sizes = balance_layers(costs, 6, memory_bytes=memory, memory_limit_bytes=limit, num_devices=2)
    limited = [sum(memory[call] for call in stage) for stage in stages_of(sizes)]
    assert max(sum(limited[0::2]), sum(limited[1::2])) <= limit
    unlimited = [sum(memory[call] for call in stage) for stage in stages_of(balance_layers(costs, 6))]
    assert max(sum(unlimited[0::2]), sum(unlimited[1::2])) > limit, "the limit must bind"


def slowest(costs: list[int], sizes: list[int]) -> int:
    return max(sum(costs[call] for call in stage) for stage in stages_of(sizes))


def test_two_thousand_calls_reach_the_lower_bound() -> None:
    generator = random.Random(0)
    costs: list[int] = []
    for _ in range(8):
        stage = [generator.randint(1, 1000) for _ in range(249)]
        costs += [*stage, 200_000 - sum(stage)]
    assert slowest(costs, balance_layers(costs, 8)) == 200_000


def test_equal_sums_of_floats_in_another_order_tie() -> None:
    costs = [0.1, 0.7, 0.2, 0.2, 0.7, 0.1]
    assert sum(costs[:3]) != sum(costs[3:]), "in floating point the halves differ"
    assert balance_layers([*costs, *costs], 4, transfer_bytes=[9, 9, 1, 9, 9, 1, 9, 9, 1, 9, 9]) == [3, 3, 3, 3]


def test_transfers_decide_between_partitions_of_equal_cost() -> None:
    assert balance_layers([2, 2, 2], 2, transfer_bytes=[800, 100]) == [2, 1]
    assert balance_layers([2, 2, 2], 2, transfer_bytes=[100, 800]) == [1, 2]
    assert balance_layers([2, 2, 2, 2], 2, transfer_bytes=[0, 900, 0]) == [2, 2], "costs come first"


def test_sizes_of_equal_partitions_are_about_even() -> None:
    assert balance_layers([10, 1, 1, 1, 1, 1, 1], 3) == [1, 3, 3]
    assert balance_layers([5.0, 0, 0, 0, 0, 0, 0], 2) == [3, 4], "calls without cost are spread"


@pytest.mark.parametrize(("num_calls", "num_stages", "expected"), [(8, 4, [2, 2, 2, 2]), (5, 5, [1] * 5), (7, 1, [7])])
def test_calls_without_any_cost_count_as_one_each(num_calls: int, num_stages: int, expected: list[int]) -> None:
    assert balance_layers([0.0] * num_calls, num_stages) == expected
    assert balance_layers([0.0] * num_calls, num_stages, transfer_bytes=range(num_calls - 1)) == expected


# --- sizes and names --------------------------------------------------------------------------------------------------

NAMES = ["embed", "block_1", "block_2", "block_3", "head"]


def test_given_sizes_are_used() -> None:
    assert from_sizes((3, 1, 1), num_calls=5, num_stages=3) == [3, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3, 2], r"one number for each of the 3 stages, received 2: \[3, 2\]; add .* or set num_stages=2"),
        ([3, 0, 2], r"at least 1 layer call, received 0 for stage 1 in \[3, 0, 2\]; use fewer stages"),
        ([4, 2, -1], r"at least 1 layer call, received -1 for stage 2"),
        ([3, 1, 2], r"add up to the 5 layer calls .*, which adds up to 6; take 1 away"),
        ([1, 1, 1], r"add up to the 5 layer calls .*, which adds up to 3; add 2"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_sizes(sizes, num_calls=5, num_stages=3)


@pytest.mark.parametrize("size", [2.0, True, "2"])
def test_sizes_are_whole_numbers(size: Any) -> None:
    with pytest.raises(TypeError, match=r"balance must list whole numbers, received .*; write the number of layer"):
        from_sizes([3, size], num_calls=5, num_stages=2)


def test_stages_begin_with_the_named_layers() -> None:
    assert from_names(["block_2", "head"], NAMES, num_stages=3) == [2, 2, 1]
    assert from_names([], NAMES, num_stages=1) == [5]


@pytest.mark.parametrize(
    ("cut_before", "message"),
    [
        (["blok_1", "head"], "must be layers of the model, received 'blok_1'; did you mean 'block_1' or 'block_"),
        (["???", "head"], "received '\\?\\?\\?'; the model has 'embed', 'block_1', 'block_2', 'block_3', 'head'"),
        (["head", "block_1"], r"order of the model, received 'head' before 'block_1'.* write \['block_1', 'head'\]"),
        (["block_1", "block_1"], "must differ, received 'block_1' twice"),
        (["embed", "head"], "leave a layer before it, received 'embed', the first of the model; .* such as 'block_1'"),
        (["block_1"], r"3 stages need 2 layer names to cut before, received 1: \['block_1'\]; .* num_stages=2"),
        (["block_1", "block_2", "head"], "3 stages need 2 layer names to cut before, received 3: .* num_stages=4"),
    ],
)
def test_invalid_names_are_refused(cut_before: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_names(cut_before, NAMES, num_stages=3)


def test_a_cut_before_a_layer_that_is_used_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="applied once, received 'embed', which the model applies 2 times; cut before"):
        from_names(["embed"], ["embed", "block", "embed"], num_stages=2)


# --- invalid arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 4}, "needs a layer call, received num_stages=4 for a model with 3; use at most 3 stages"),
        ({"num_devices": 3}, "multiple of num_devices, received 2 stages on 3 devices"),
        ({"costs": [1, float("nan"), 1]}, "costs must be finite and not negative, received nan for 'conv'"),
        ({"transfer_bytes": [1, -1]}, "transfer_bytes must be finite and not negative, received -1 for 'conv'"),
        ({"memory_limit_bytes": 10}, "memory_bytes must have 3 entries, received 0"),
        (
            {"memory_bytes": [1, 1, 1], "memory_limit_bytes": 0},
            "memory_limit_bytes must be positive and finite, received 0; .* or None for no limit",
        ),
        (
            {"memory_bytes": [1, 9000, 1], "memory_limit_bytes": 8000},
            "memory_limit_bytes=8,000, and 'conv' alone needs 9,000; .* raise the limit to 9,000 or more",
        ),
        (
            {"memory_bytes": [5000, 5000, 5000], "memory_limit_bytes": 8000},
            "memory_limit_bytes=8,000, and the smallest partition found of 2 stages on 2 devices needs 10,000 on "
            "device [01]; use more devices, .* raise the limit to 10,000",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    given = {"costs": [1, 1, 1], "num_stages": 2, "names": ["input", "conv", "head"], **arguments}
    with pytest.raises(ValueError, match=message):
        balance_layers(**given)


def test_balances_and_pictures_import_no_tensorflow() -> None:
    modules = "tfpar.pipeline.partition.balance, tfpar.pipeline.analysis.timeline_plot"
    program = f"import sys, {modules}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
