"""Gradients of two replicas, summed on the owners of their weights, as an all-reduce sums them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar.reduction.gradients import sum_in_packs
from tfpar.strategies.multi_worker.collectives import GATHER_BYTES, Group
from tfpar.strategies.multi_worker.owner_sums import sums_on_owners

SHAPES = [(50, 4), (3,), (7, 11), (1,), (200,), (5, 5, 5), (90,)]
OWNERS = [0, 1, 1, 0, 1, 0, 0]
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
        (tf.float32, "float16", SHAPES),
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
        np.testing.assert_array_equal(found[owner][number], expected[owner][number])


def test_each_replica_sends_the_gradients_that_the_other_one_owns(logical_cpus: list[str]) -> None:
    group = Counted(logical_cpus[:2], 2)
    summed(group, tf.float32, on_owners=True)
    owned = [sum(int(np.prod(shape)) for shape, one in zip(SHAPES, OWNERS, strict=True) if one == of) for of in (0, 1)]
    assert group.sent_bytes == 4 * max(owned), "the shorter row is filled with zeros"


def test_gradients_that_an_all_gather_cannot_send_are_left_to_the_all_reduce(logical_cpus: list[str]) -> None:
    rows = tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    gradients = [tf.zeros([2]), None, rows, tf.zeros([]), tf.zeros([0]), tf.zeros([2], tf.bfloat16), tf.zeros([3])]
    group = Group(logical_cpus[:2], 2)
    # The last one has no owner: it is a loss.
    assert [*sums_on_owners(gradients, [0, 1, 0, 1, 0, 1], group, 0, 0, PACK_BYTES)] == [0]
    assert sums_on_owners(gradients, [0] * 6, group, 0, 0, PACK_BYTES, "bfloat16") == {}


def test_more_replicas_than_two_all_reduce() -> None:
    assert sums_on_owners([tf.zeros([2])], [0], Group(["CPU:0"], 3), 0, 0, PACK_BYTES) == {}
