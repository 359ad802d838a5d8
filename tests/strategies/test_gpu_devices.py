"""Refusals of devices and all-reduces on GPUs, before TensorFlow runs anything on them; the GPUs are made up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import tfpar
from tests.support import made_up_gpus
from tfpar import cluster
from tfpar.strategies import mirrored
from tfpar.strategies.mirrored import chosen_all_reduce

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, the first with two logical devices: GPU:0 and GPU:1 share it."""
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made_up_gpus.install(monkeypatch, [2, 1])


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (
            lambda: tfpar.MultiWorker(["CPU:0", "GPU:2"]),
            "MultiWorker needs devices of one kind, as its replicas compute equal parts of a batch, received ['CPU:0', "
            "'GPU:2']. Name GPUs only, or CPUs only.",
        ),
        (lambda: tfpar.Mirrored(["GPU:0", "GPU:7"]), "'GPU:2']. Name one that exists, or leave the argument out."),
        (lambda: tfpar.MultiWorker(["GPU:0", "GPU:0"]), "'GPU:2']. Name each device once."),
        (lambda: tfpar.Mirrored(["CPU:9"]), "'GPU:2']. tfpar.use_logical_cpus(n) makes n CPU devices."),
        (
            lambda: tfpar.Pipeline(num_stages=4, num_microbatches=8),
            "there are 3: ['GPU:0', 'GPU:1', 'GPU:2']. Use fewer stages.",
        ),
        (
            lambda: tfpar.Mirrored(all_reduce="nccl"),
            "all_reduce='nccl' needs a physical GPU for each replica, and ['GPU:0', 'GPU:1', 'GPU:2'] are logical "
            "devices of 2. Use 'reduction_to_one_device', or one device of each GPU.",
        ),
    ],
)
def test_devices_that_cannot_be_used_are_refused_with_what_helps(create: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        create()


@pytest.mark.parametrize(
    ("devices", "cards", "expected"),
    [
        (["GPU:0", "GPU:1"], [17, 29], "nccl"),
        (["GPU:0", "GPU:1"], [17, 17], "reduction_to_one_device"),
        (["GPU:0"], [17], "reduction_to_one_device"),
        (["CPU:0", "CPU:1"], [0, 0], "reduction_to_one_device"),
    ],
)
def test_auto_is_nccl_where_each_replica_has_a_gpu_of_its_own(
    devices: list[str], cards: list[int], expected: str
) -> None:
    """Never TensorFlow's default: its collectives crash for the second model of a process."""
    assert chosen_all_reduce("auto", devices, cards) == expected


@pytest.mark.parametrize(
    ("all_reduce", "devices", "pack_bytes"),
    [
        ("nccl", ["GPU:0", "GPU:2"], 32 << 20),
        ("hierarchical_copy", ["GPU:0", "GPU:2"], 32 << 20),
        ("auto", ["GPU:0", "GPU:1"], None),
        ("auto", ["CPU:0", "CPU:1"], None),
    ],
)
def test_gradients_on_gpus_are_packed_by_size_and_type(
    all_reduce: mirrored.AllReduce, devices: list[str], pack_bytes: int | None
) -> None:
    """TensorFlow's own packs concatenate all gradients, of one type only."""
    operations = mirrored._cross_device_ops(all_reduce, devices)
    assert getattr(operations, "_num_packs", 0) == 0
    assert mirrored.default_pack_bytes(operations) == pack_bytes


@pytest.mark.parametrize(
    "create",
    [
        lambda: tfpar.Mirrored(["GPU:0", "GPU:7"]),
        lambda: tfpar.MultiWorker(["GPU:7"]),
        lambda: tfpar.SingleDevice("GPU:7"),
        lambda: tfpar.Pipeline(2, 2, devices=["GPU:0", "GPU:7"]),
    ],
    ids=["Mirrored", "MultiWorker", "SingleDevice", "Pipeline"],
)
def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do(
    create: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match=r"received \[.*'GPU:7'\]\. There are: .*'GPU:0', 'GPU:1', 'GPU:2'\]\. Name one that exists"
    ):
        create()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4,5 is set: this process sees these GPUs only, and num"):
        create()


def test_logical_gpus_of_one_card_have_its_number_and_cpus_have_none() -> None:
    first, second, third, cpu = cluster.card_numbers(["GPU:0", "GPU:1", "GPU:2", "CPU:1"])
    assert first == second != third
    assert min(first, third) > cpu == 0
    assert max(first, third) < 1 << 63
