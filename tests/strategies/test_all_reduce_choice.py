"""The all-reduce between workers, as a function of the GPUs of all replicas."""

from __future__ import annotations

import re
from typing import Any

import pytest

import tfpar
from tfpar import cluster
from tfpar.strategies.multi_worker import strategy as multi_worker
from tfpar.strategies.multi_worker import worker
from tfpar.strategies.multi_worker.all_reduce_choice import choose

# Two replicas a worker. Numbers are physical GPUs of any machine, 0 is a CPU.
OWN = [11, 12, 13, 14]
CPUS = [0, 0, 0, 0]
ONE_ON_A_CPU = [11, 12, 13, 0]
LOGICAL = [11, 12, 13, 13]
SHARED_BY_WORKERS = [11, 12, 12, 14]


@pytest.mark.parametrize(
    ("all_reduce", "cards", "expected"),
    [
        ("auto", OWN, "nccl"),
        ("nccl", OWN, "nccl"),
        ("ring", OWN, "ring"),
        ("auto", CPUS, "ring"),
        ("auto", ONE_ON_A_CPU, "ring"),
        ("auto", LOGICAL, "ring"),
        ("auto", SHARED_BY_WORKERS, "ring"),
        ("ring", SHARED_BY_WORKERS, "ring"),
    ],
)
def test_nccl_is_chosen_where_every_replica_has_a_gpu_of_its_own(
    all_reduce: Any, cards: list[int], expected: str
) -> None:
    assert choose(all_reduce, cards, num_workers=2) == expected


@pytest.mark.parametrize(
    ("cards", "problem"),
    [
        (ONE_ON_A_CPU, "worker 1 trains on a CPU"),
        (LOGICAL, "two replicas of worker 1 share one"),
        (SHARED_BY_WORKERS, "workers 0 and 1 share one"),
    ],
)
def test_nccl_is_refused_where_a_replica_has_no_gpu_of_its_own(cards: list[int], problem: str) -> None:
    message = (
        f"all_reduce='nccl' needs a GPU of its own for each replica, and {problem}. Give each worker its own, as "
        "python -m tfpar.launch does, or use all_reduce='auto'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        choose("nccl", cards, num_workers=2)


@pytest.mark.parametrize(("cards", "expected"), [([11, 12], "nccl"), ([11, 11], "ring")])
def test_gradients_travel_by_the_all_reduce_of_the_workers_gpus(
    cards: list[int], expected: str, monkeypatch: pytest.MonkeyPatch, logical_cpus: list[str]
) -> None:
    made: list[Any] = []

    class Group(multi_worker.Group):
        def __init__(
            self, devices: Any, num_members: int, implementation: Any = "ring", *others: Any, **options: Any
        ) -> None:
            made.append((num_members, implementation))
            super().__init__(devices, num_members, implementation, *others, **options)

    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(multi_worker, "Group", Group)
    monkeypatch.setattr(worker, "Group", Group)
    monkeypatch.setattr(cluster, "card_numbers", lambda names: cards)
    strategy = tfpar.MultiWorker(["CPU:0", "CPU:1"])
    assert made == [(1, "ring"), (2, expected)], "messages between hosts go by a ring"
    assert strategy._replicas.order == [0, 1], "known without NCCL, which these CPUs have not"
