"""A job with one worker, and options that are refused before TensorFlow forms a job."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import multi_worker_cases as cases
from tests.support import small
from tests.support.multi_worker_cases import Trained, assert_same, keras_fit
from tests.support.ports import free_addresses
from tfpar import cluster
from tfpar.cluster import tf_config
from tfpar.engines.workers import worker, worker_replicas
from tfpar.engines.workers.all_reduce_choice import choose
from tfpar.workers.job_roles import warn_of_other_launcher

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]], ids=len)
def test_without_tf_config_the_job_has_one_worker(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = tfpar.MultiWorker(devices)
    assert strategy.describe().startswith(f"MultiWorker over 1 worker, {len(devices)} replicas")
    trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
    history = trainer.fit(small.data(), epochs=2, verbose=0).history
    assert_same(Trained(history, cases.state(trainer.model)), keras_fit(small.data()))


def test_after_tensorflow_has_started_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config.to_tf_config(free_addresses(2), 0))
    with pytest.raises(RuntimeError, match=r"MultiWorker\(\) must come before TensorFlow's first operation"):
        tfpar.MultiWorker(form_seconds=3)


def test_an_evaluator_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TF_CONFIG", '{"cluster": {"worker": ["localhost:1234"]}, "task": {"type": "evaluator", "index": 0}}'
    )
    with pytest.raises(ValueError, match="TF_CONFIG makes this process an evaluator"):
        tfpar.MultiWorker()


def test_eager_steps_on_several_devices_of_a_worker_are_refused() -> None:
    """They waited for each other without end."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    trainer = tfpar.Trainer(build, tfpar.MultiWorker(["CPU:0", "CPU:1"]), seed=0)
    with pytest.raises(ValueError, match="With run_eagerly=True a worker can have one device, received one with 2"):
        trainer.predict(np.zeros([4, 5], "float32"), verbose=0)
    with pytest.raises(ValueError, match="With run_eagerly=True a worker can have one device"):
        trainer.fit(np.zeros([4, 5], "float32"), np.zeros([4, 3], "float32"), verbose=0)


# What a process does by its role in a job: workers that another launcher started train alone, with a warning


VARIABLES = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]


@pytest.mark.parametrize("name", VARIABLES)
def test_the_processes_of_another_launcher_are_counted(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"a model of its own: {name}='4' counts several .*python -m tfpar\.launch"):
        warn_of_other_launcher({name: "4"})


@pytest.mark.parametrize("name", VARIABLES)
def test_one_process_is_not(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_launcher({name: "1"})


@pytest.mark.parametrize("shard", [None, "weights"])
def test_several_workers_without_a_job_are_warned_of(
    shard: str | None, monkeypatch: pytest.MonkeyPatch, logical_cpus: list[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="WORLD_SIZE='2' counts several processes"):
        tfpar.MultiWorker(devices=logical_cpus[:1], shard=shard)


# The all-reduce between workers, as a function of the GPUs of all replicas


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
    assert choose(all_reduce, cards, workers=[0, 0, 1, 1]) == expected


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
        choose("nccl", cards, workers=[0, 0, 1, 1])


@pytest.mark.parametrize(("cards", "expected"), [([11, 12], "nccl"), ([11, 11], "ring")])
def test_gradients_travel_by_the_all_reduce_of_the_workers_gpus(
    cards: list[int], expected: str, monkeypatch: pytest.MonkeyPatch, logical_cpus: list[str]
) -> None:
    made: list[Any] = []

    class Group(worker_replicas.Group):
        def __init__(
            self, devices: Any, num_members: int, implementation: Any = "ring", *others: Any, **options: Any
        ) -> None:
            made.append((num_members, implementation))
            super().__init__(devices, num_members, implementation, *others, **options)

    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(worker_replicas, "Group", Group)
    monkeypatch.setattr(worker, "Group", Group)
    monkeypatch.setattr(cluster, "card_numbers", lambda names: cards)
    strategy = tfpar.MultiWorker(["CPU:0", "CPU:1"])
    assert made == [(1, "ring"), (2, expected)], "messages between hosts go by a ring"
    assert strategy.engine._replicas.order == [0, 1], "known without NCCL, which these CPUs have not"
