"""Messages between two members of a group; on CPUs at the same time as those between others.

member 0 ◄──► member 1
    ▲            ▲         each of them an all-gather in a group of two
    └► member 2 ◄┘

TensorFlow's all-to-all takes as long. It names a message by the ranks of two members without a separator, so that those
from 1 to 11 and from 11 to 1 have one name (2.21, `AllToAll::DispatchSend` in
tensorflow/core/common_runtime/all_to_all.cc).
"""

from __future__ import annotations

import functools
import itertools

import tensorflow as tf

from tfpar.strategies.multi_worker.collectives import Group


class Pairs:
    """The groups of two members of a group, for every two of them.

    All members must call `exchange` in an order in which each one's call for another comes as early as the other's.

    Args:
        group: The group.
        first: The number of its first member in this process.

    Example:
        >>> Pairs(Group(["CPU:0"], num_members=3), first=1).place_here(1)
        0
    """

    def __init__(self, group: Group, first: int) -> None:
        self.group, self._first = group, first

    @functools.cached_property
    def _groups(self) -> dict[tuple[int, int], Group]:
        """The groups, also those without a member here: all processes number the same ones."""
        if self.group.num_members == 2:
            return {(0, 1): self.group}
        here = dict(enumerate(self.group.devices, self._first))
        groups = {}
        for pair in itertools.combinations(range(self.group.num_members), 2):
            places = list(map(self.group.order.index, pair))
            order = [places.index(place) for place in sorted(places)]
            groups[pair] = Group([here[member] for member in pair if member in here], 2, order=order)
        return groups

    def exchange(self, tensor: tf.Tensor, member: int, other: int) -> tf.Tensor:
        """Send a tensor to another member, and return the one that it sends.

        Args:
            tensor: `[elements, ...]`; that of the other member has the same static shape and dtype.
            member: The number of the calling member.
            other: The number of the other one.
        """
        pair = min(member, other), max(member, other)
        of_this_process = [one for one in pair if 0 <= self.place_here(one) < len(self.group.devices)]
        rows = self._groups[pair].all_gather_equal_shapes(tensor, of_this_process.index(member))
        return tf.split(rows, 2)[pair.index(other)]

    def place_here(self, member: int) -> int:
        """Return the number of a member among those of this process."""
        return member - self._first
