"""Links between devices, as latency and bandwidth, and the duration of an all-reduce over them. Pure Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

Algorithm = Literal["ring", "tree", "owner", "owners"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between two devices: a message takes its latency, and its bytes divided by the bandwidth.

    Args:
        latency_seconds: Duration of a message without bytes.
        bytes_per_second: Bandwidth in one direction; infinite for a link whose messages take their latency only.

    Raises:
        ValueError: If the latency is negative or not finite, or the bandwidth is not above 0.

    Example:
        >>> Link(latency_seconds=0.001, bytes_per_second=1e9).seconds(num_bytes=1e6)
        0.002
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_seconds < math.inf and self.bytes_per_second > 0):
            raise ValueError(
                "A link has a finite latency of at least 0 seconds and a bandwidth above 0 bytes per second, received "
                f"{self.latency_seconds} and {self.bytes_per_second}; measure again."
            )

    def seconds(self, num_bytes: float, num_messages: int = 1) -> float:
        """Return the duration of some messages, one after another.

        Args:
            num_bytes: Bytes of all messages together.
            num_messages: Number of messages.
        """
        return num_messages * self.latency_seconds + num_bytes / self.bytes_per_second


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Return the link whose messages come closest to measured durations, by the squares of the relative errors.

    Args:
        sizes: Bytes of each message; at least two different sizes.
        seconds: The duration of each, above 0.

    Returns:
        The link. If the durations do not grow with the bytes, it has the bandwidth of the largest message alone, so
        that a larger message is not predicted to be free.

    Raises:
        ValueError: If there are fewer than two sizes, or a duration is not above 0.

    Example:
        >>> link = fit_link([1000, 3000], [0.5, 1.0])
        >>> round(link.latency_seconds, 6), round(link.bytes_per_second)
        (0.25, 4000)
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds) or not all(0 < one < math.inf for one in seconds):
        raise ValueError(
            "A link is fitted to at least two sizes with a finite duration above 0 each, received the sizes "
            f"{list(sizes)} and the seconds {list(seconds)}; measure other sizes."
        )
    # Minimize sum(((latency + slope * size) / seconds - 1) ** 2).
    weights = [1 / one**2 for one in seconds]
    total = sum(weights)
    mean_size = sum(weight * size for weight, size in zip(weights, sizes, strict=True)) / total
    mean_seconds = sum(weight * one for weight, one in zip(weights, seconds, strict=True)) / total
    triples = list(zip(weights, sizes, seconds, strict=True))
    slope = sum(weight * (size - mean_size) * (one - mean_seconds) for weight, size, one in triples) / sum(
        weight * (size - mean_size) ** 2 for weight, size, _ in triples
    )
    latency_seconds = mean_seconds - slope * mean_size
    if slope > 0 and latency_seconds >= 0:
        return Link(latency_seconds, 1 / slope)
    if slope > 0:  # the best line through the origin
        slope = sum(weight * size * one for weight, size, one in triples) / sum(
            weight * size**2 for weight, size, _ in triples
        )
        return Link(0.0, 1 / slope)
    largest, longest = max(zip(sizes, seconds, strict=True))
    return Link(0.0, largest / longest)


def all_reduce_seconds(algorithm: Algorithm, num_bytes: float, num_members: int, link: Link) -> float:
    """Return the duration of an all-reduce.

    Args:
        algorithm: "ring": every member sends 2(n-1) messages of 1/n of the bytes, one after another (TensorFlow's
            collectives, NCCL). "tree": the sums go up two binary trees of half of the bytes each, and down again, so
            that the number of messages in a row grows with the logarithm of the members (NCCL). "owner": one member
            receives the tensors of all others over its link, adds them, and sends each the sum. "owners": each member
            does so with 1/n of the bytes (`tfpar.Hybrid` on one machine, where every weight has an owner).
        num_bytes: Bytes of the tensor of one member; nothing is sent for 0.
        num_members: Number of members; nothing is sent for 1.
        link: The slowest link between two neighbours.

    Raises:
        ValueError: If there is no such algorithm, or no member.

    Example:
        >>> link = Link(latency_seconds=0.001, bytes_per_second=1e9)
        >>> [round(all_reduce_seconds(one, 4e6, 4, link), 6) for one in ("ring", "tree", "owner", "owners")]
        [0.012, 0.012, 0.026, 0.008]
    """
    num_messages, share = _cost(algorithm, num_members)
    return link.seconds(share * num_bytes, num_messages) if num_bytes and num_members > 1 else 0.0


def link_of_all_reduce(
    sizes: Sequence[int], seconds: Sequence[float], num_members: int, algorithm: Algorithm = "ring"
) -> Link:
    """Return the link that explains the measured durations of all-reduces.

    Args:
        sizes: Bytes of the tensor of one member, at least two different sizes.
        seconds: The duration of each.
        num_members: Number of members, at least 2.
        algorithm: As for `all_reduce_seconds`.

    Raises:
        ValueError: If there are too few sizes or members.

    Example:
        >>> link = link_of_all_reduce([1000, 3000], [0.5, 1.0], num_members=2)
        >>> round(link.latency_seconds, 6), round(link.bytes_per_second)
        (0.125, 4000)
    """
    if num_members < 2:
        raise ValueError(f"An all-reduce over a link has at least 2 members, received {num_members}.")
    num_messages, share = _cost(algorithm, num_members)
    fitted = fit_link(sizes, seconds)
    return Link(fitted.latency_seconds / num_messages, fitted.bytes_per_second * share)


def _cost(algorithm: Algorithm, num_members: int) -> tuple[int, float]:
    """Return the number of messages one after another, and the bytes that cross the busiest link, as multiples."""
    if num_members < 1:
        raise ValueError(f"An all-reduce has at least 1 member, received {num_members}.")
    others = num_members - 1
    if algorithm == "ring":
        return 2 * others, 2 * others / num_members
    if algorithm == "tree":
        return 2 * math.ceil(math.log2(num_members)), 2.0
    if algorithm == "owner":
        return 2, 2.0 * others
    if algorithm == "owners":
        return 2, 2 * others / num_members
    raise ValueError(f"algorithm must be ring, tree, owner or owners, received {algorithm!r}.")
