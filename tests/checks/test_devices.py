"""Each device is examined in a process of its own, and one with a fault is found and named."""

from __future__ import annotations

import pytest

from tests.support import faulty_devices
from tfpar.checks import child_processes, devices, together
from tfpar.checks.check import Check
from tfpar.checks.child_processes import Outcome
from tfpar.cluster import gpus

NAMES = ["CPU:0", "CPU:1"]
NO_GPUS = gpus.Found(())
ONE_GPU = gpus.Found((gpus.Gpu("0", "GPU-1", 0, 80000),))
# A child starts TensorFlow.
pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(child_processes, "PROGRAM", faulty_devices.__name__)
    monkeypatch.setenv(faulty_devices.VARIABLE, request.param)


def wrong(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.figure for name, check in checks.items() if check.status == "WRONG"}


@pytest.mark.parametrize("fault", ["flip CPU:1"], indirect=True)
def test_a_device_that_flips_a_bit_is_named(fault: None) -> None:
    found = devices.examine(NAMES, NO_GPUS, at_once=2)
    assert list(wrong(found)) == ["CPU:1"]
    assert "the product is wrong in 1 of 65,536 values" in found["CPU:1"].figure
    assert "CPU:1" in found["CPU:1"].way_out
    assert found["CPU:0"].figure.startswith("product, convolution, XLA right")


@pytest.mark.parametrize(
    ("fault", "figure"),
    [
        ("hang CPU:1", "it hung: no answer within 15 s in the convolution"),
        ("crash CPU:1", "its process ended by SIGSEGV"),
    ],
    indirect=["fault"],
)
def test_a_device_that_hangs_or_crashes_is_named(fault: None, figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DEVICE_SECONDS", 15.0)
    found = devices.examine(["CPU:1"], NO_GPUS, at_once=1)
    assert figure in wrong(found)["CPU:1"]


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["flip_copy CPU:1"], indirect=True)
def test_a_copy_that_flips_a_bit_is_named(fault: None) -> None:
    found = {check.name: check for check in together.measure(NAMES, NO_GPUS)}
    assert list(wrong(found)) == ["copy CPU:0 to CPU:1"]
    assert "1 of 1,048,576 words arrive with other bits" in found["copy CPU:0 to CPU:1"].figure


@pytest.mark.extended
@pytest.mark.parametrize("fault", ["sleep CPU:2"], indirect=True)
def test_a_device_that_sleeps_is_named(fault: None) -> None:
    found = [check for check in together.measure([*NAMES, "CPU:2"], NO_GPUS) if check.name.startswith("speed")]
    assert ("speed of CPU:2", "slow") in [(check.name, check.status) for check in found]


def seen(**changes: object) -> Outcome:
    result = {"num_cpus": 1, "gpus": [], "built_with_cuda": True, "cuda": "12.5", "cudnn": "9", "started": []}
    return Outcome({**result, **{name: value for name, value in changes.items() if name != "errors"}}, "", "", "",
                   str(changes.get("errors", "")))  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "reason", "way_out"),
    [
        (seen(built_with_cuda=False), "built without CUDA", "tfpar[cuda]"),
        (seen(errors="W0 Cannot dlopen some GPU libraries. Please"), "cannot load CUDA's libraries", "and-cuda"),
        (seen(errors="Could not find cuda drivers\nfailed call to cuInit: x (303)"), "no libcuda.so.1", "--gpus all"),
        (seen(errors="kernel version 550.1 does not match DSO 560.2"), "driver and its library differ", "restart"),
        (seen(errors="failed call to cuInit: INTERNAL: CUDA error: x"), "CUDA does not start", "CUDA 12.5"),
    ],
)
def test_a_gpu_that_tensorflow_does_not_see_is_explained(outcome: Outcome, reason: str, way_out: str) -> None:
    check, number = devices.judged_sight(ONE_GPU, outcome)
    assert (check.status, number) == ("WRONG", 0)
    assert reason in check.figure
    assert way_out in check.way_out


def test_a_tensorflow_that_does_not_start_is_wrong() -> None:
    check, _ = devices.judged_sight(NO_GPUS, Outcome(None, "its process ended by SIGILL after 1 s"))
    assert check.status == "WRONG"
    assert "SIGILL" in check.figure


def test_gpus_are_examined_one_by_one_if_they_do_not_start_together() -> None:
    check, number = devices.judged_sight(ONE_GPU, Outcome(None, "it hung: no answer within 60 s"))
    assert (check.status, number) == ("WRONG", 1)
    assert "each GPU is started by itself" in check.way_out


def test_a_device_is_examined_alone() -> None:
    on_cpu = devices.alone("step", {}, "CPU:0", ONE_GPU, 1.0)
    assert on_cpu.environment == {"CUDA_VISIBLE_DEVICES": "-1"}
    two = gpus.Found((gpus.Gpu("3"), gpus.Gpu("GPU-8f3c1a2e")), is_users=True)
    task = devices.alone("examine", {}, "GPU:1", two, 1.0)
    assert task.environment == {"CUDA_VISIBLE_DEVICES": "GPU-8f3c1a2e"}
    assert task.arguments == {"device": "GPU:0"}


def test_devices_that_fail_are_not_started_with_the_others() -> None:
    three = gpus.Found((gpus.Gpu("4"), gpus.Gpu("5"), gpus.Gpu("6")), is_users=True)
    variables, names = devices.together(["GPU:0", "GPU:2"], three)
    assert variables == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert names == {"GPU:0": "GPU:0", "GPU:2": "GPU:1"}
    assert devices.together(["CPU:1"], NO_GPUS) == ({}, {"CPU:1": "CPU:1"})


def result(**changes: object) -> Outcome:
    copy = {"source": "GPU:0", "target": "GPU:1", "num_wrong": 0, "num_words": 8, "gb_per_second": 20.0}
    sizes = [{"num_bytes": 4096, "seconds": 1e-4, "wrong": changes.get("wrong", [])}]
    return Outcome(
        {
            "seconds": {"GPU:0": 1.0, "GPU:1": changes.get("seconds", 1.0), "GPU:2": 1.0},
            "copies": [copy, {**copy, "source": "host", "num_wrong": changes.get("num_wrong", 0)}],
            "all_reduce": {"algorithm": changes.get("algorithm", "nccl"), "sizes": sizes},
        }
    )


@pytest.mark.parametrize(
    ("changes", "status", "name", "figure"),
    [
        ({}, "ok", "all-reduce", "NCCL: 4 KiB in 0.10 ms"),
        ({"seconds": 1.2}, "slow", "speed of GPU:3", "1.20 times the median"),
        ({"num_wrong": 2}, "WRONG", "copy host to GPU:3", "2 of 8 words arrive with other bits"),
        ({"wrong": ["GPU:1"]}, "WRONG", "all-reduce", "wrong sums by NCCL on GPU:3"),
    ],
)
def test_gpus_are_named_as_they_are_here(changes: dict[str, object], status: str, name: str, figure: str) -> None:
    found = {check.name: check for check in together.judged(result(**changes), {"GPU:0": "GPU:0", "GPU:1": "GPU:3",
                                                                               "GPU:2": "GPU:4"})}  # fmt: skip
    assert found[name].status == status
    assert figure in found[name].figure
    assert [check.name for check in found.values() if check.status not in ("ok", status)] == []


@pytest.mark.parametrize(
    ("algorithm", "way_out"),
    [
        ("nccl", "Try NCCL_P2P_DISABLE=1, and Mirrored(all_reduce='hierarchical_copy')."),
        ("reduction_to_one_device", "Leave GPU:1 out of the strategy's devices, and have it examined."),
    ],
)
def test_the_way_out_of_a_wrong_sum_suits_its_algorithm(algorithm: str, way_out: str) -> None:
    names = {f"GPU:{number}": f"GPU:{number}" for number in range(3)}
    (check,) = [one for one in together.judged(result(wrong=["GPU:1"], algorithm=algorithm), names) if one.way_out]
    assert (check.name, check.way_out) == ("all-reduce", way_out)


def test_a_process_of_devices_together_that_hangs_says_where() -> None:
    (check,) = together.judged(
        Outcome(None, "it hung: no answer within 60 s", stage="the copy from GPU:0 to GPU:1"), {}
    )
    assert check.status == "WRONG"
    assert "the copy from GPU:0 to GPU:1" in check.figure
    assert "NCCL_P2P_DISABLE=1" in check.way_out


def test_a_process_of_devices_that_does_not_begin_is_no_matter_of_copies() -> None:
    (check,) = together.judged(Outcome(None, "ImportError: no such backend", stage="the start of TensorFlow"), {})
    assert check.way_out == "It stopped at the start of TensorFlow."
