"""Gradients of replicas, summed on the owners of their weights, as an all-reduce sums them."""

from __future__ import annotations

import functools
import itertools
import math
import unittest.mock
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfpar._compat.tf_ring import Run
from tfpar.reduction.gradients import sum_in_packs
from tfpar.reduction.weight_division import largest_first
from tfpar.strategies.multi_worker.collectives import GATHER_BYTES, Group
from tfpar.strategies.multi_worker.owner_messages import blocks_of, length_of, packs_of_pair
from tfpar.strategies.multi_worker.owner_sums import _sum, sums_on_owners
from tfpar.strategies.multi_worker.pairs import Pairs
from tfpar.strategies.multi_worker.weight_exchange import num_elements

SHAPES = [(50, 4), (3,), (7, 11), (1,), (200,), (5, 5, 5), (90,), ()]
SIZES = [math.prod(shape) for shape in SHAPES]
PACK_BYTES = 512
NUM_MEMBERS = (2, 3, 4)


class Counted(Group):
    """A group that counts the bytes which its first member sends to the other."""

    sent_bytes = 0

    def all_gather_equal_shapes(self, tensor: tf.Tensor, member: int = 0) -> tf.Tensor:
        self.sent_bytes += int(tensor.shape.num_elements()) * tensor.dtype.size * (member == 0)
        return super().all_gather_equal_shapes(tensor, member)


def owners_of(shapes: Any, num_members: int) -> list[int | None]:
    """The owners of gradients; a scalar is a loss, which all need."""
    owners = largest_first([math.prod(shape) for shape in shapes], num_members)
    return [owner if shape else None for owner, shape in zip(owners, shapes, strict=True)]


def run_on(
    devices: list[str], gradients: list[list[tf.Tensor]], member_sums: Callable[[int, list[tf.Tensor]], Any]
) -> list[Any]:
    """Return the results of a function for each member and its gradients, on its device, in one graph."""

    @tf.function(autograph=False)
    def of_all(of_members: list[list[tf.Tensor]]) -> list[Any]:
        found = []
        for member, device in enumerate(devices):
            with tf.device(device):
                found.append(member_sums(member, of_members[member]))
        return found

    return of_all(gradients)


def gradients_of(member: int, dtype: Any, shapes: Any) -> list[tf.Tensor]:
    """Gradients whose sum depends on the order."""
    random = np.random.default_rng(member)
    return [tf.constant(random.normal(size=shape) * np.exp(2 * random.normal(size=shape)), dtype) for shape in shapes]


def summed(
    group: Group,
    devices: list[str],
    dtype: Any = tf.float32,
    compression: str | None = None,
    shapes: Any = SHAPES,
    *,
    on_owners: bool,
) -> list[list[tf.Tensor]]:
    """Return the sums on all members of a group in this process."""
    pack_bytes = GATHER_BYTES if len(shapes) == 1 else PACK_BYTES
    pairs, owners = Pairs(group, 0), owners_of(shapes, len(devices))

    def member_sums(member: int, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        def of_packs(packs: Any) -> Any:
            return sums_on_owners(gradients, owners, packs, pairs, member, pack_bytes, compression)

        all_reduce = functools.partial(group.all_reduce, member=member)
        return sum_in_packs(gradients, all_reduce, pack_bytes, compression, of_packs=of_packs if on_owners else None)

    gradients = [gradients_of(member, dtype, shapes) for member in range(len(devices))]
    return run_on(devices, gradients, member_sums)


@pytest.mark.parametrize("num_members", NUM_MEMBERS)
@pytest.mark.parametrize(
    ("dtype", "compression", "shapes"),
    [
        (tf.float32, None, SHAPES),
        (tf.float64, None, SHAPES),
        (tf.float16, None, SHAPES),
        (tf.bfloat16, None, SHAPES),
        (tf.float32, "bfloat16", SHAPES),
        (tf.float32, None, [(2 * GATHER_BYTES // 4,)]),  # by a ring, also of two
    ],
)
def test_owners_have_the_bits_of_an_all_reduce(
    num_members: int, dtype: Any, compression: str | None, shapes: Any, logical_cpus: list[str]
) -> None:
    devices = logical_cpus[:num_members]
    expected = summed(Group(devices, num_members), devices, dtype, compression, shapes, on_owners=False)
    found = summed(Group(devices, num_members), devices, dtype, compression, shapes, on_owners=True)
    for number, owner in enumerate(owners_of(shapes, num_members)):
        for member in range(num_members) if owner is None else [owner]:
            assert found[member][number].dtype == dtype
            assert tf.reduce_all(found[member][number] == expected[member][number])


@pytest.mark.parametrize("num_members", [3, 4])
@pytest.mark.parametrize("num_elements", [1, 47, 48, 49, 100_000, 3 << 20, (9 << 20) + 17, 40_000_000])
def test_a_ring_adds_in_the_known_order(num_members: int, num_elements: int, logical_cpus: list[str]) -> None:
    devices = logical_cpus[:num_members]
    group = Group(devices, num_members)
    (terms,) = gradients_of(0, tf.float32, [(num_elements,)])
    values = [np.roll(terms.numpy(), member) for member in range(num_members)]
    total = run_on(devices, values, lambda member, value: group.all_reduce(value, member))[0].numpy()
    runs = group.order_of_sum(num_elements, tf.float32)
    assert runs is not None
    assert [runs[0].start, *(run.stop for run in runs)] == [*(run.start for run in runs), num_elements]
    for start, stop, members in runs:
        expected = functools.reduce(np.add, (values[member][start:stop] for member in members))
        np.testing.assert_array_equal(total[start:stop], expected)


@pytest.mark.parametrize("num_members", NUM_MEMBERS)
def test_replicas_send_half_of_an_all_reduce(num_members: int, logical_cpus: list[str], monkeypatch: Any) -> None:
    groups: list[Counted] = []

    def counted(*arguments: Any, **others: Any) -> Counted:
        groups.append(Counted(*arguments, **others))
        return groups[-1]

    monkeypatch.setattr("tfpar.strategies.multi_worker.pairs.Group", counted)
    devices = logical_cpus[:num_members]
    shapes = [(24,)] * 48
    summed(counted(devices, num_members), devices, shapes=shapes, on_owners=True)
    of_first = sum(group.sent_bytes for group in groups if devices[0] in group.devices)
    of_one_way = 4 * 96 * 12 * (num_members - 1) / num_members
    assert of_one_way <= of_first < 1.2 * of_one_way, "an all-reduce sends it twice"


def test_gradients_that_are_no_dense_numbers_are_left_to_the_all_reduce(logical_cpus: list[str]) -> None:
    rows = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    gradients = [tf.zeros([2]), None, rows, tf.zeros([0]), tf.zeros([2], tf.complex64), tf.zeros([])]
    packs = [[5], [4], [3], [2], [1], [0]]
    pairs = Pairs(Group(logical_cpus[:2], 2), 0)
    found = sums_on_owners(gradients, [0, 1, 0, 1, 0, None], packs, pairs, 0, PACK_BYTES)
    assert sorted(found) == [0, 5]


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=20), st.integers(1, 12)
)
def test_each_element_of_two_owners_is_sent_once_and_in_order(
    gradients: list[tuple[int, int]], most_elements: int
) -> None:
    sizes, owners = zip(*gradients, strict=True)
    blocks = blocks_of(dict(enumerate(sizes)), most_elements)
    of_blocks = [owners[block.weight] for block in blocks]
    packs = packs_of_pair(blocks, of_blocks, (1, 3), most_elements)
    for place, owner in enumerate((1, 3)):
        rows = [pack[place] for pack in packs]
        assert all(num_elements(row) <= most_elements for row in rows)
        found = [(one.weight, element) for row in rows for one in row for element in range(one.start, one.stop)]
        assert found == [
            (number, element)
            for number, block in enumerate(blocks)
            if of_blocks[number] == owner
            for element in range(block.stop - block.start)
        ]


@pytest.mark.parametrize("num_owners", [2, 3, 8, 16])
def test_equal_layers_send_half_of_an_all_reduce_and_hardly_wait_for_each_other(num_owners: int) -> None:
    blocks = blocks_of(dict.fromkeys(range(12 * num_owners), 64), 16)
    owners = largest_first([64] * 12 * num_owners, num_owners)
    of_blocks = [owners[block.weight] for block in blocks]
    pairs = itertools.combinations(range(num_owners), 2)
    packs = {pair: packs_of_pair(blocks, of_blocks, pair, most=16) for pair in pairs}
    sent = sum(sum(map(length_of, of_pair)) for pair, of_pair in packs.items() if 0 in pair)
    assert sent == 64 * 12 * (num_owners - 1)
    for pair, of_pair in packs.items():
        chosen = [number for number, owner in enumerate(of_blocks) if owner in pair]
        for pack in of_pair:  # from the first to the last of its blocks in the backward pass
            places = [chosen.index(piece.weight) for row in pack for piece in row]
            assert max(places) - min(places) <= len(chosen) / 4


def test_a_large_last_layer_does_not_wait_for_the_layers_before_it() -> None:
    blocks = blocks_of({0: 1000, **dict.fromkeys(range(1, 11), 50)}, 16)
    packs = packs_of_pair(blocks, [int(block.weight > 0) for block in blocks], (0, 1), most=16)
    at_once = [pack for pack in packs if not pack[1]]
    assert packs[: len(at_once)] == at_once
    assert sum(num_elements(pack[0]) for pack in at_once) > 1000 - 1500 / 8 - 16


@pytest.mark.parametrize(
    ("sizes", "num_members", "num_here", "less"),
    [
        ([64] * 8, 2, 1, True),
        ([64] * 8, 8, 1, True),
        ([640, 64, 64], 2, 1, True),
        ([640, *[64] * 7], 8, 1, False),  # the owner of the first one would send as many zeros to each of seven
        ([64] * 8, 4, 2, True),
        ([64] * 8, 8, 4, False),
    ],
)
def test_gradients_are_summed_on_owners_only_where_processes_send_less(
    sizes: list[int], num_members: int, num_here: int, less: bool
) -> None:
    owners = largest_first(sizes, num_members)
    devices = [f"CPU:{number}" for number in range(num_here)]
    pairs = Pairs(Group(devices, num_members), 0)
    gradients = [tf.zeros([size]) for size in sizes]
    found = sums_on_owners(gradients, owners, [range(len(sizes))], pairs, 0, PACK_BYTES)
    assert [*found] == ([*range(len(sizes))] if less else [])


@pytest.mark.parametrize("graph", [False, True])
def test_many_replicas_are_added_in_order_in_a_graph_and_without(graph: bool) -> None:
    terms = [gradients_of(member, tf.float32, [(1000,)])[0] for member in range(11)]
    members = (*range(4, 11), *range(4))
    total = (tf.function(_sum) if graph else _sum)(terms, [Run(0, 1000, members)])
    expected = functools.reduce(np.add, (terms[member].numpy() for member in members))
    np.testing.assert_array_equal(total, expected)


def test_members_of_workers_in_another_order_are_known(logical_cpus: list[str]) -> None:
    """TensorFlow has worker 2 before worker 1; each has two members."""
    group = Group(logical_cpus[:2], 6, order=[0, 1, 4, 5, 2, 3])
    runs = group.order_of_sum(96 * 6, tf.float32)
    assert runs is not None
    assert runs[0].members == (0, 1, 4, 5, 2, 3)
    pairs = Pairs(group, 0)
    assert pairs._groups[2, 4].order == [1, 0]
    assert pairs._groups[0, 4].order == [0, 1]
    assert pairs._groups[4, 5].order == [0, 1]


@pytest.mark.parametrize(("device", "implementation"), [("CPU:0", "nccl"), ("GPU:0", "ring")])
def test_more_than_two_replicas_on_gpus_all_reduce(device: str, implementation: Any) -> None:
    with unittest.mock.patch("tfpar.strategies.multi_worker.collectives._tokens", return_value=[]):
        pairs = Pairs(Group([device], 3, implementation), 0)
    assert sums_on_owners([tf.zeros([2])], [0], [[0]], pairs, 0, PACK_BYTES) == {}
