"""Each device is examined in a process of its own, and one with a fault is found and named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support import doctor_faults
from tfpar.checks import devices
from tfpar.checks.processes import Outcome
from tfpar.checks.report import Check
from tfpar.cluster.gpu import gpus

NO_GPUS = gpus.VisibleGpus(())
ONE_GPU = gpus.VisibleGpus((gpus.Gpu("0", "GPU-1", 0, 80000),))
# A child starts TensorFlow.
pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_devices_that_flip_a_bit_hang_or_crash_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor_faults.inject(monkeypatch, "crash CPU:0, flip CPU:1, hang CPU:2")
    monkeypatch.setattr(devices, "SECONDS", 20.0)
    checks = by_name(devices.each(["CPU:0", "CPU:1", "CPU:2"], NO_GPUS, at_once=3))
    assert "its process ended by SIGSEGV" in checks["CPU:0"].figure
    assert "the product is wrong in 1 of 65,536 values" in checks["CPU:1"].figure
    assert "CPU:1" in checks["CPU:1"].way_out
    assert checks["CPU:2"].figure == "it hung: no answer within 20 s in the convolution"
    assert [check.status for check in checks.values()] == ["WRONG", "WRONG", "WRONG"]


@pytest.mark.extended
def test_a_copy_that_flips_a_bit_and_a_device_that_sleeps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor_faults.inject(monkeypatch, "flip_copy CPU:1, sleep CPU:2")
    checks = by_name(devices.together(["CPU:0", "CPU:1", "CPU:2"], NO_GPUS))
    wrong = [name for name, check in checks.items() if check.status == "WRONG"]
    assert wrong == ["copy CPU:0 to CPU:1", "copy CPU:2 to CPU:1"]
    assert "1 of 1,048,576 words arrive with other bits" in checks[wrong[0]].figure
    assert "equal bits in 4 ordered pairs" in checks["copies"].figure
    assert checks["speed of CPU:2"].status == "slow"


def seen(errors: str = "", **changes: object) -> Outcome:
    result = {"num_cpus": 1, "gpus": [], "built_with_cuda": True, "cuda": "12.5", "cudnn": "9", "started": []}
    return Outcome({**result, **changes}, errors=errors)


@pytest.mark.parametrize(
    ("outcome", "reason", "way_out"),
    [
        (seen(built_with_cuda=False), "built without CUDA", "tfpar[cuda]"),
        (seen("W0 Cannot dlopen some GPU libraries. Please"), "cannot load CUDA's libraries (Cannot", "and-cuda"),
        (seen("Could not find cuda drivers\nfailed call to cuInit: x (303)"), "no libcuda.so.1", "--gpus all"),
        (seen("kernel version 550.1 does not match DSO 560.2"), "driver and its library differ", "restart"),
        (seen("failed call to cuInit: INTERNAL: CUDA error: x"), "CUDA does not start", "CUDA 12.5"),
        (seen(), "CUDA does not start (without a message)", "CUDA 12.5"),
    ],
)
def test_a_gpu_that_tensorflow_does_not_see_is_explained(outcome: Outcome, reason: str, way_out: str) -> None:
    check, number = devices.seen(ONE_GPU, outcome)
    assert (check.status, number) == ("WRONG", 0)
    assert reason in check.figure
    assert way_out in check.way_out


@pytest.mark.parametrize(
    ("available", "problem", "number", "way_out"),
    [
        (NO_GPUS, "its process ended by SIGILL after 1 s", 0, "python -c 'import tensorflow'"),
        (ONE_GPU, "it hung: no answer within 60 s", 1, "Each GPU is started alone"),
    ],
)
def test_a_tensorflow_that_does_not_start_is_wrong(
    available: gpus.VisibleGpus, problem: str, number: int, way_out: str
) -> None:
    check, num_gpus = devices.seen(available, Outcome(None, problem))
    assert (check.status, num_gpus) == ("WRONG", number)
    assert problem in check.figure
    assert way_out in check.way_out


def test_a_device_is_examined_alone() -> None:
    on_cpu = devices.on_device("model_tasks.step", "CPU:0", ONE_GPU)
    assert on_cpu.environment == {"CUDA_VISIBLE_DEVICES": "-1"}
    two = gpus.VisibleGpus((gpus.Gpu("3"), gpus.Gpu("GPU-8f3c1a2e")), is_users=True)
    task = devices.on_device("device_tasks.examine", "GPU:1", two)
    assert task.environment == {"CUDA_VISIBLE_DEVICES": "GPU-8f3c1a2e"}
    assert task.arguments == {"device": "GPU:0"}


def test_devices_that_fail_are_not_started_with_the_others() -> None:
    three = gpus.VisibleGpus((gpus.Gpu("4"), gpus.Gpu("5"), gpus.Gpu("6")), is_users=True)
    variables, names = devices.visible(["GPU:0", "GPU:2"], three)
    assert variables == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert names == {"GPU:0": "GPU:0", "GPU:2": "GPU:1"}
    assert devices.visible(["CPU:1"], NO_GPUS) == ({}, {"CPU:1": "CPU:1"})


def result(num_wrong: int = 0, seconds: float = 1.0, algorithm: str = "nccl", **wrong: Any) -> Outcome:
    copy = {"source": "GPU:0", "target": "GPU:1", "num_wrong": 0, "num_words": 8, "gb_per_second": 20.0}
    sizes = [{"num_bytes": 4096, "seconds": 1e-4, "wrong": [], **wrong}]
    return Outcome(
        {
            "seconds": {"GPU:0": 1.0, "GPU:1": seconds, "GPU:2": 1.0},
            "copies": [copy, {**copy, "source": "host", "num_wrong": num_wrong}],
            "all_reduce": {"algorithm": algorithm, "sizes": sizes},
        }
    )


@pytest.mark.parametrize(
    ("outcome", "status", "name", "figure", "way_out"),
    [
        (result(), "ok", "all-reduce", "NCCL: 4 KiB in 0.10 ms", ""),
        (result(seconds=1.2), "slow", "speed of GPU:3", "1.20 times the median", "clocks, heat"),
        (result(num_wrong=2), "WRONG", "copy host to GPU:3", "2 of 8 words arrive with other bits", "leave GPU:3 out"),
        (result(wrong=["GPU:1"]), "WRONG", "all-reduce", "wrong sums by NCCL on GPU:3", "Try NCCL_P2P_DISABLE=1, and"),
        (
            result(wrong=["GPU:1"], algorithm="reduction_to_one_device"),
            *("WRONG", "all-reduce", "wrong sums by reduction to one device on GPU:3", "Leave GPU:3 out"),
        ),
    ],
)
def test_gpus_are_named_as_they_are_here(outcome: Outcome, status: str, name: str, figure: str, way_out: str) -> None:
    checks = by_name(devices.measured(outcome, {"GPU:0": "GPU:0", "GPU:1": "GPU:3", "GPU:2": "GPU:4"}))
    assert checks[name].status == status
    assert figure in checks[name].figure
    assert way_out in checks[name].way_out
    assert [check.name for check in checks.values() if check.status not in ("ok", status)] == []


@pytest.mark.parametrize(
    ("problem", "stage", "way_out"),
    [
        ("it hung", "the copy from GPU:0 to GPU:1", "NCCL_P2P_DISABLE=1"),
        ("ImportError: no such backend", "the start of TensorFlow", "It stopped at the start of TensorFlow."),
    ],
)
def test_a_process_of_devices_together_that_fails_says_where(problem: str, stage: str, way_out: str) -> None:
    (check,) = devices.measured(Outcome(None, problem, stage=stage), {})
    assert (check.status, check.figure) == ("WRONG", f"{problem} at {stage}")
    assert way_out in check.way_out
    assert ("Peer-to-peer" in check.way_out) == ("copy" in stage)
