"""Gradients of two replicas, summed on the owners of their weights, as an all-reduce sums them."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfpar.reduction.gradients import sum_in_packs
from tfpar.reduction.weight_owners import largest_first
from tfpar.strategies.multi_worker.collectives import GATHER_BYTES, Group
from tfpar.strategies.multi_worker.owner_sums import packs_in_order, sums_on_owners
from tfpar.strategies.multi_worker.weight_exchange import num_elements

SHAPES = [(50, 4), (3,), (7, 11), (1,), (200,), (5, 5, 5), (90,)]
SIZES = [math.prod(shape) for shape in SHAPES]
OWNERS = largest_first(SIZES, 2)
PACK_BYTES = 512


class Counted(Group):
    """A group that counts the bytes which the first member sends."""

    sent_bytes = 0

    def all_gather_equal_shapes(self, tensor: tf.Tensor, member: int = 0) -> tf.Tensor:
        self.sent_bytes += int(tensor.shape.num_elements()) * tensor.dtype.size * (member == 0)
        return super().all_gather_equal_shapes(tensor, member)


def summed(
    group: Group, dtype: Any, compression: str | None = None, *, on_owners: bool, shapes: Any = SHAPES
) -> list[list[tf.Tensor]]:
    """Return the sums on both members of a group in this process."""
    pack_bytes = PACK_BYTES if shapes is SHAPES else GATHER_BYTES

    @tf.function(autograph=False)
    def both() -> list[list[tf.Tensor]]:
        found = []
        for member in (0, 1):
            with tf.device(f"CPU:{member}"):
                random = np.random.default_rng(member)
                gradients = [tf.constant(random.normal(size=shape), dtype) for shape in shapes]
                own_sums = (
                    sums_on_owners(gradients, OWNERS[: len(shapes)], group, member, member, pack_bytes, compression)
                    if on_owners
                    else None
                )
                reduce = lambda message, member=member: group.all_reduce(message, member)  # noqa: E731
                found.append(sum_in_packs(gradients, reduce, pack_bytes, compression, own_sums))
        return found

    return both()


@pytest.mark.parametrize(
    ("dtype", "compression", "shapes"),
    [
        (tf.float32, None, SHAPES),
        (tf.float64, None, SHAPES),
        (tf.float16, None, SHAPES),
        (tf.bfloat16, None, SHAPES),
        (tf.float32, "bfloat16", SHAPES),
        (tf.float32, None, [(2 * GATHER_BYTES // 4,)]),  # by a ring
    ],
)
def test_owners_have_the_bits_of_an_all_reduce(
    dtype: Any, compression: str | None, shapes: Any, logical_cpus: list[str]
) -> None:
    groups = [Group(logical_cpus[:2], 2) for _ in range(2)]
    expected = summed(groups[0], dtype, compression, on_owners=False, shapes=shapes)
    found = summed(groups[1], dtype, compression, on_owners=True, shapes=shapes)
    for number, owner in enumerate(OWNERS[: len(shapes)]):
        assert found[owner][number].dtype == dtype
        assert tf.reduce_all(found[owner][number] == expected[owner][number])


def test_replicas_send_less_than_all_gradients(logical_cpus: list[str]) -> None:
    group = Counted(logical_cpus[:2], 2)
    summed(group, tf.float32, on_owners=True)
    assert sum(SIZES) / 2 <= group.sent_bytes / 4 < 0.8 * sum(SIZES), "an all-reduce sends all of them"


def test_gradients_that_an_all_gather_cannot_send_are_left_to_the_all_reduce(logical_cpus: list[str]) -> None:
    rows = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    gradients = [tf.zeros([2]), None, rows, tf.zeros([]), tf.zeros([0]), tf.zeros([2], tf.complex64), tf.zeros([3])]
    # The last one has no owner: it is a loss.
    found = sums_on_owners(gradients, [0, 1, 0, 1, 0, 1], Group(logical_cpus[:2], 2), 0, 0, PACK_BYTES)
    assert [*found] == [0]


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=20), st.integers(1, 12)
)
def test_each_element_is_sent_once_and_in_order(gradients: list[tuple[int, int]], most_elements: int) -> None:
    sizes, senders = zip(*gradients, strict=True)
    packs = packs_in_order(sizes, senders, most_elements)
    for sender in (0, 1):
        rows = [pack[sender] for pack in packs]
        assert all(num_elements(row) <= most_elements for row in rows)
        found = [(one.weight, element) for row in rows for one in row for element in range(one.start, one.stop)]
        assert found == [
            (number, element) for number, (size, of) in enumerate(gradients) if of == sender for element in range(size)
        ]


def test_layers_of_both_owners_send_half_of_an_all_reduce() -> None:
    packs = packs_in_order([64] * 8, [0, 1, 1, 0] * 2, most_elements=16)
    assert sum(max(map(num_elements, pack)) for pack in packs) == 64 * 8 / 2


def test_a_large_last_layer_does_not_wait_for_the_layers_before_it() -> None:
    packs = packs_in_order([1000] + [50] * 10, [0] + [1] * 10, most_elements=16)
    at_once = [pack for pack in packs if all(piece.weight == 0 for row in pack for piece in row)]
    assert packs[: len(at_once)] == at_once
    assert sum(num_elements(pack[0]) for pack in at_once) > 1000 - 1500 / 8 - 16


def test_more_replicas_than_two_all_reduce() -> None:
    assert sums_on_owners([tf.zeros([2])], [0], Group(["CPU:0"], 3), 0, 0, PACK_BYTES) == {}
