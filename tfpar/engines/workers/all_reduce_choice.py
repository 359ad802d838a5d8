"""The choice of the all-reduce: NCCL if each replica has a physical GPU of its own, else a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from tfpar import cluster
from tfpar.engines.workers.collectives import AllReduce, Group


def agreed(all_reduce: AllReduce, devices: Sequence[str], hosts: Group, rank: int) -> Literal["ring", "nccl"]:
    """Choose the all-reduce together with the other workers, which must all call this.

    Args:
        all_reduce: The argument of the strategy.
        devices: Devices of the replicas of this worker.
        hosts: A device of each worker.
        rank: Rank of this worker.

    Raises:
        ValueError: As for `choose`.

    Example:
        >>> agreed("auto", ["CPU:0"], Group(["CPU:0"], num_members=1), rank=0)
        'ring'
    """
    own = tf.constant(cluster.card_numbers(devices), tf.int64)
    cards, workers = hosts.all_gather([own, tf.fill([len(devices)], rank)])
    return choose(all_reduce, cards.numpy().tolist(), workers.numpy().tolist())


def choose(all_reduce: AllReduce, cards: Sequence[int], workers: Sequence[int]) -> Literal["ring", "nccl"]:
    """Choose the all-reduce for the devices of all replicas.

    TensorFlow 2.21 itself uses a ring for `"auto"`, through the memory of the hosts even between GPUs
    (`tensorflow/core/common_runtime/collective_param_resolver_local.cc`).

    Args:
        all_reduce: The argument of the strategy.
        cards: Number of the physical GPU of each replica, by rank; 0 for a CPU.
        workers: Rank of the worker of each replica.

    Raises:
        ValueError: If `all_reduce="nccl"` and a replica has no GPU of its own.

    Example:
        >>> choose("auto", [17, 29], workers=[0, 1]), choose("auto", [17, 17], workers=[0, 1])
        ('nccl', 'ring')
    """
    if all_reduce == "ring":
        return "ring"
    problem = _problem(cards, workers)
    if problem is None:
        return "nccl"
    if all_reduce == "nccl":
        raise ValueError(
            f"all_reduce='nccl' needs a GPU of its own for each replica, and {problem}. Give each worker its own, as "
            "python -m tfpar.launch does, or use all_reduce='auto'."
        )
    return "ring"


def _problem(cards: Sequence[int], workers: Sequence[int]) -> str | None:
    """Explain in a clause why NCCL cannot connect the replicas; None if it can."""
    first: dict[int, int] = {}  # the first worker on each GPU
    for card, worker in zip(cards, workers, strict=True):
        if card == 0:
            return f"worker {worker} trains on a CPU"
        if card in first:
            other = first[card]
            return (
                f"two replicas of worker {worker} share one"
                if other == worker
                else (f"workers {other} and {worker} share one")
            )
        first[card] = worker
    return None
