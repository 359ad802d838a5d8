"""Links between devices, with latency and bandwidth, and the duration of an all-reduce over them. Pure Python."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

Algorithm = Literal["ring", "tree", "owner", "owners"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between two devices. A message takes the latency, plus its bytes divided by the bandwidth.

    Args:
        latency_seconds: Duration of an empty message.
        bytes_per_second: Bandwidth in one direction; may be infinite.

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
        """Return the duration of `num_messages` consecutive messages with `num_bytes` in total."""
        return num_messages * self.latency_seconds + num_bytes / self.bytes_per_second


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit latency and bandwidth to measured messages, by least squares of the relative errors.

    If the durations do not grow with the sizes, the bandwidth is that of the largest message.

    Args:
        sizes: Bytes of each message; at least two different sizes.
        seconds: Duration of each message, above 0.

    Raises:
        ValueError: If all sizes are equal, or a duration is not above 0.

    Example:
        >>> link = fit_link([1000, 3000], [0.5, 1.0])
        >>> round(link.latency_seconds, 6), round(link.bytes_per_second)
        (0.25, 4000)
    """
    if len(set(sizes)) < 2 or len(sizes) != len(seconds) or not all(0 < duration < math.inf for duration in seconds):
        raise ValueError(
            "A link is fitted to at least two sizes with a finite duration above 0 each, received the sizes "
            f"{list(sizes)} and the seconds {list(seconds)}; measure other sizes."
        )
    # Minimize sum(((latency + slope * size) / seconds - 1) ** 2).
    weights = [1 / duration**2 for duration in seconds]
    total = sum(weights)
    messages = list(zip(weights, sizes, seconds, strict=True))
    mean_size = sum(weight * size for weight, size, _ in messages) / total
    mean_seconds = sum(weight * duration for weight, _, duration in messages) / total
    slope = sum(weight * (size - mean_size) * (duration - mean_seconds) for weight, size, duration in messages) / sum(
        weight * (size - mean_size) ** 2 for weight, size, _ in messages
    )
    latency_seconds = mean_seconds - slope * mean_size
    if slope > 0 and latency_seconds >= 0:
        return Link(latency_seconds, 1 / slope)
    if slope > 0:  # the best line through the origin
        slope = sum(weight * size * duration for weight, size, duration in messages) / sum(
            weight * size**2 for weight, size, _ in messages
        )
        return Link(0.0, 1 / slope)
    largest, longest = max(zip(sizes, seconds, strict=True))
    return Link(0.0, largest / longest)


def all_reduce_seconds(algorithm: Algorithm, num_bytes: float, num_members: int, link: Link) -> float:
    """Return the duration of an all-reduce.

    Args:
        algorithm: "ring": every member sends 2(n-1) messages of 1/n of the bytes (TensorFlow's collectives, NCCL).
            "tree": sums go up and down two binary trees, each with half of the bytes; the number of consecutive
            messages grows with log n (NCCL). "owner": one member receives all tensors over its link, adds them, and
            sends the sum to each other member. "owners": each member does so for 1/n of the bytes (`tfpar.Hybrid` on
            one machine, where every weight has an owner).
        num_bytes: Bytes of the tensor of each member.
        num_members: Number of members, at least 1.
        link: The slowest link between two neighbours.

    Raises:
        ValueError: If the algorithm is unknown, or there is no member.

    Example:
        >>> link = Link(latency_seconds=0.001, bytes_per_second=1e9)
        >>> [round(all_reduce_seconds(name, 4e6, 4, link), 6) for name in ("ring", "tree", "owner", "owners")]
        [0.012, 0.012, 0.026, 0.008]
    """
    num_messages, multiple = _cost(algorithm, num_members)
    return link.seconds(multiple * num_bytes, num_messages) if num_bytes and num_members > 1 else 0.0


def link_of_all_reduce(
    sizes: Sequence[int], seconds: Sequence[float], num_members: int, algorithm: Algorithm = "ring"
) -> Link:
    """Fit latency and bandwidth to measured all-reduces.

    Args:
        sizes: Bytes of the tensor of each member; at least two different sizes.
        seconds: Duration of each all-reduce, above 0.
        num_members: Number of members, at least 2.
        algorithm: As for `all_reduce_seconds`.

    Raises:
        ValueError: If there are too few sizes or members, or a duration is not above 0.

    Example:
        >>> link = link_of_all_reduce([1000, 3000], [0.5, 1.0], num_members=2)
        >>> round(link.latency_seconds, 6), round(link.bytes_per_second)
        (0.125, 4000)
    """
    if num_members < 2:
        raise ValueError(f"An all-reduce over a link has at least 2 members, received {num_members}.")
    num_messages, multiple = _cost(algorithm, num_members)
    fitted = fit_link(sizes, seconds)
    return Link(fitted.latency_seconds / num_messages, fitted.bytes_per_second * multiple)


def _cost(algorithm: Algorithm, num_members: int) -> tuple[int, float]:
    """Return the number of consecutive messages, and the bytes over the busiest link as a multiple of the tensor's."""
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
