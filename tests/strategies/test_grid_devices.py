"""The devices of grids over several workers: their orders, and which grids fit."""

from __future__ import annotations

import json
import re
from typing import Any
from unittest import mock

import pytest

import tfpar
from tests.strategies.test_hybrid import wide
from tfpar import config, strategies
from tfpar.strategies import grid_devices
from tfpar.workers import remote_devices

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def lent(*sizes: int, kind: str = "CPU") -> list[list[str]]:
    """Return the devices of workers."""
    return [
        [f"/job:worker/replica:0/task:{rank}/device:{kind}:{index}" for index in range(size)]
        for rank, size in enumerate(sizes)
    ]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the devices of a job's workers, which need not run."""

    def begin(*sizes: int) -> None:
        addresses = [f"host{rank}:2222" for rank in range(len(sizes))]
        task = {"type": "worker", "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": task}))
        connected = remote_devices.RemoteDevices(lent(*sizes), watch=mock.Mock())
        monkeypatch.setattr(remote_devices, "connect", lambda *_: connected)

    return begin


def pipeline(num_stages: int = 2, schedule: str = "1f1b", **settings: Any) -> tfpar.Pipeline:
    return tfpar.Pipeline(num_stages, 2, schedule, across_workers=True, **settings)


@pytest.mark.parametrize(
    ("num_replicas", "per_replica", "sizes", "orders"),
    [
        (2, 2, (2, 2), [["0/CPU:0", "0/CPU:1", "1/CPU:0", "1/CPU:1"], ["0/CPU:0", "1/CPU:0", "0/CPU:1", "1/CPU:1"]]),
        (2, 2, (3, 2), [["0/CPU:0", "0/CPU:1", "1/CPU:0", "1/CPU:1"], ["0/CPU:0", "1/CPU:0", "0/CPU:1", "1/CPU:1"]]),
        (2, 1, (1, 1), [["0/CPU:0", "1/CPU:0"]]),
        (1, 4, (2, 2), [["0/CPU:0", "0/CPU:1", "1/CPU:0", "1/CPU:1"]]),
    ],
)
def test_a_grid_takes_as_many_devices_of_each_worker_in_each_order_of_its_own(
    num_replicas: int, per_replica: int, sizes: tuple[int, ...], orders: list[list[str]]
) -> None:
    devices = grid_devices.WorkerDevices(["a:1", "b:2"], lent(*sizes))
    found = grid_devices.across_workers(num_replicas, per_replica, devices, None)
    assert [[tfpar.cluster.short_name(one) for one in order] for order in found] == orders


@pytest.mark.parametrize(
    ("sizes", "num_stages", "num_replicas", "part"),
    [
        (
            (2, 2), 2, 4,
            "a device for each of 4 replicas x 2 devices of the pipeline, 8 in all, as many of each worker, received "
            "2 workers x 2 devices. Grids that fit are 4 x 1, 2 x 2, 1 x 4.",
        ),
        ((2, 1), 2, 2, "received 2 of worker 0 (host0:2222), 1 of worker 1 (host1:2222). Grids that fit are 2 x 1, 1"),
    ],
)  # fmt: skip
def test_a_grid_that_workers_cannot_share_is_refused(
    workers: Any, sizes: tuple[int, ...], num_stages: int, num_replicas: int, part: str
) -> None:
    workers(*sizes)
    with pytest.raises(ValueError, match=re.escape(part)):
        tfpar.Hybrid(pipeline(num_stages), num_replicas)


@pytest.mark.parametrize(
    ("sizes", "num_stages", "part"),
    [
        (
            (2, 2), 3,
            "A pipeline across workers needs 3 devices, as many of each worker, received 2 workers x 2 devices. Set "
            "num_stages to a multiple of 2 up to 4, or train replicas of it with tfpar.Hybrid: grids that fit are",
        ),
        ((2, 1), 4, "received 2 of worker 0 (host0:2222), 1 of worker 1 (host1:2222). Set"),
    ],
)  # fmt: skip
def test_stages_that_workers_cannot_share_are_refused_unless_replicas_fit(
    workers: Any, sizes: tuple[int, ...], num_stages: int, part: str
) -> None:
    workers(*sizes)
    strategy = pipeline(num_stages)
    with pytest.raises(ValueError, match=re.escape(part)):
        tfpar.Trainer(wide, strategy)


def test_each_replica_may_be_on_some_of_the_workers(workers: Any) -> None:
    workers(*[1] * 12)
    described = ", ".join(f"worker {rank} CPU:0" for rank in range(12))
    expected = f"Hybrid of 6 replicas of 2 stages on {described}, 2 micro-batches, 1f1b"
    assert tfpar.Hybrid(pipeline(), 6).describe() == expected


@pytest.mark.parametrize(
    ("devices", "part"),
    [
        (["CPU:0", "CPU:1"], "each after the rank of its worker, received ['CPU:0', 'CPU:1']. There are: ['0/CPU:0'"),
        (["0/CPU:0", "2/CPU:0"], "There are: ['0/CPU:0', '0/CPU:1', '1/CPU:0', '1/CPU:1']"),
        (["0/CPU:0", "0/CPU:0"], "devices must name different devices of the workers"),
    ],
)
def test_names_that_no_worker_has_are_refused(workers: Any, devices: list[str], part: str) -> None:
    workers(2, 2)
    with pytest.raises(ValueError, match=re.escape(part)):
        pipeline(devices=devices)


def test_replicas_on_devices_of_two_kinds_are_refused(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers(1, 1)
    mixed = remote_devices.RemoteDevices([lent(1)[0], lent(1, 1, kind="GPU")[1]], watch=mock.Mock())
    monkeypatch.setattr(remote_devices, "connect", lambda *_: mixed)
    with pipeline().scope():
        pass  # stages may be on devices of two kinds
    with pytest.raises(ValueError, match=re.escape("devices of one kind, as its replicas compute equal parts")):
        tfpar.Hybrid(pipeline(1), 2)


def test_an_evaluator_of_a_job_lends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "evaluator", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(environment))
    with pytest.raises(ValueError, match=r"Pipeline\(across_workers=True\) trains with the chief .* an evaluator"):
        pipeline()


def test_devices_are_named_after_their_worker(workers: Any) -> None:
    workers(2, 2)
    named = pipeline(devices=["1/CPU:1", "0/CPU:0"])
    assert named.describe() == "Pipeline of 2 stages on worker 1 CPU:1, worker 0 CPU:0, 2 micro-batches, 1f1b"
    assert tfpar.Hybrid(named).devices == named.devices
    grid = tfpar.Hybrid(pipeline(), 2, ["1/CPU:1", "0/CPU:0", "1/cpu:0", "0/CPU:1"])
    assert [tfpar.cluster.short_name(one) for one in grid.devices] == ["1/CPU:1", "0/CPU:0", "1/CPU:0", "0/CPU:1"]
    with pytest.raises(ValueError, match=re.escape("2 replicas x 2 devices of the pipeline, 4 in all, received 2")):
        tfpar.Hybrid(pipeline(), 2, ["1/CPU:1", "0/CPU:0"])


def test_the_all_reduce_between_workers_has_no_choice_in_a_grid_over_all_of_them(workers: Any) -> None:
    workers(2, 2)
    with pytest.raises(
        ValueError, match="received 'ring' with across_workers=True: the gradients of a weight are added"
    ):
        tfpar.Hybrid(pipeline(), 2, all_reduce="ring")


def test_settings_become_a_grid_over_workers(workers: Any) -> None:
    workers(2, 2)
    devices = ("1/CPU:0", "1/CPU:1", "0/CPU:0", "0/CPU:1")
    settings = config.Hybrid(num_replicas=2, num_stages=2, num_microbatches=2, across_workers=True, devices=devices)
    described = "worker 0 CPU:0 CPU:1, worker 1 CPU:0 CPU:1"
    strategy = strategies.from_settings(settings)
    assert strategy.describe() == f"Hybrid of 2 replicas of 2 stages on {described}, 2 micro-batches, 1f1b"
    assert [tfpar.cluster.short_name(one) for one in strategy.devices] == list(devices)
