"""GPUs divided over the workers of a launcher, without a process: shares, variables, the plan, refusals."""

from __future__ import annotations

import re

import pytest

from tests.support import stand_ins
from tfpar.cluster.gpu import gpus
from tfpar.cluster.gpu.gpus import Gpu, VisibleGpus
from tfpar.launcher.gpu_division import GpuDivision, divide
from tfpar.launcher.worker import worker_environment


def machine(num_gpus: int, used_mib: int = 5) -> VisibleGpus:
    """GPUs that nvidia-smi lists."""
    return VisibleGpus(gpus.parse(stand_ins.table(num_gpus, used_mib)))


def divided(found: VisibleGpus, num_workers: int, gpus_per_worker: int | None = None) -> GpuDivision:
    """A division that exists."""
    division = divide(found, num_workers, gpus_per_worker)
    assert division is not None
    return division


@pytest.mark.parametrize(
    ("num_gpus", "num_workers", "gpus_per_worker", "expected"),
    [
        (4, 2, None, ["0,1", "2,3"]),
        (5, 2, None, ["0,1", "2,3"]),
        (8, 2, 1, ["0", "1"]),
        (1, 1, None, ["0"]),
        (2, 2, 0, ["-1", "-1"]),
    ],
)
def test_each_worker_has_gpus_of_its_own(
    num_gpus: int, num_workers: int, gpus_per_worker: int | None, expected: list[str]
) -> None:
    division = divided(machine(num_gpus), num_workers, gpus_per_worker)
    assert [division.variables(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(num_workers)] == expected


def test_numbers_of_nvidia_smi_come_with_its_order_and_the_users_own_without() -> None:
    assert divided(machine(2), 2).variables(1) == {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    users = VisibleGpus((Gpu("3"), Gpu("MIG-1")), is_users=True)
    assert divided(users, 2).variables(1) == {"CUDA_VISIBLE_DEVICES": "MIG-1"}


def test_a_worker_gets_its_share_of_the_users_list_in_place_of_the_list() -> None:
    division = divided(VisibleGpus((Gpu("3"), Gpu("1")), is_users=True), 2)
    given = {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    environment = worker_environment(1, ["127.0.0.1:1", "127.0.0.1:2"], 1, "new", given, division)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_without_gpus_the_environment_stays_as_it_is() -> None:
    assert divide(VisibleGpus(()), 2, None) is None
    assert divide(VisibleGpus(()), 2, 0) is None
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(0, ["127.0.0.1:1"], 1, "new", {}, None)


@pytest.mark.parametrize(
    ("found", "gpus_per_worker", "expected"),
    [
        (
            machine(3),
            2,
            "--gpus_per_worker must be at most 1 for 2 workers, as there are 3 GPUs, received 2. Leave it out for an "
            "equal share, or start fewer workers.",
        ),
        (
            VisibleGpus((Gpu("5"),), is_users=True),
            1,
            "--gpus_per_worker must be at most 0 for 2 workers, as there is 1 GPU in CUDA_VISIBLE_DEVICES, received 1. "
            "Leave it out for an equal share, or start fewer workers.",
        ),
        (
            VisibleGpus(()),
            1,
            "--gpus_per_worker must be at most 0 for 2 workers, as there are 0 GPUs, received 1. Leave it out for an "
            "equal share.",
        ),
        (
            machine(1),
            None,
            "Each worker needs a GPU of its own, received --num_workers 2, and there is 1 GPU. Start at most 1, or "
            "train on CPUs with --gpus_per_worker 0.",
        ),
    ],
    ids=["too many", "too many of the user's", "no GPU", "fewer GPUs than workers"],
)
def test_more_gpus_than_there_are_is_refused(found: VisibleGpus, gpus_per_worker: int | None, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        divide(found, 2, gpus_per_worker)


def test_the_plan_names_the_gpus_of_each_worker_and_those_of_none() -> None:
    assert divided(machine(5), 2).lines() == ["worker 0: GPUs 0, 1", "worker 1: GPUs 2, 3", "given to no worker: GPU 4"]
    assert divided(machine(3), 2, 0).lines() == [], "the user asked for it"
    users = VisibleGpus((Gpu("3"), Gpu(stand_ins.uuid(1)), Gpu("MIG-GPU-8f3c1a2e-93f1-4c1b/1/0")), is_users=True)
    assert divided(users, 1).lines() == ["worker 0: GPU 3, GPU-00000001..0000, MIG-GPU-8f3c../1/0"]


def test_a_gpu_that_another_process_fills_is_named_with_its_free_memory() -> None:
    rows = f"0, {stand_ins.uuid(0)}, 5 MiB, 81559 MiB\n1, {stand_ins.uuid(1)}, 70000 MiB, 81559 MiB\n"
    text = " ".join(line.strip() for line in divided(VisibleGpus(gpus.parse(rows)), 2).lines())
    assert text == (
        "worker 0: GPU 0 worker 1: GPU 1 warning: other processes use the memory of GPU 1, of which 11,559 of 81,559 "
        "MiB are free. End them, or leave it out with CUDA_VISIBLE_DEVICES."
    )


def test_every_line_of_the_plan_fits_into_80_columns() -> None:
    long = [f"MIG-{'0' * 30}{index:04}" for index in range(32)]
    found = VisibleGpus(tuple(Gpu(name, None, 9, 10) for name in long), True, f"nvidia-smi failed ({'x ' * 40}x)")
    lines = divided(found, 2).lines()
    assert max(map(len, lines)) <= 80 - len("[launch] ")
    assert "x), so the free memory of the GPUs is not known." in " ".join(line.strip() for line in lines)
