"""The memory of GPUs that training can use; the GPUs are made up."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfpar  # noqa: F401  (its import installs the default)
from tests.support import made_up_gpus, stand_ins
from tfpar import cluster
from tfpar.cluster.gpu.gpu_memory import RESERVED_BYTES

pytestmark = pytest.mark.usefixtures("logical_cpus")

MIB = 1 << 20


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tf.config.PhysicalDevice]:
    """Two GPUs of 81,559 MiB; of the second 70,000 MiB are in use, 100 bytes of them by this process, without use."""
    found = made_up_gpus.install(monkeypatch, [1, 1])
    rows = stand_ins.table(2).replace(f"1, {stand_ins.uuid(1)}, 5 MiB", f"1, {stand_ins.uuid(1)}, 70000 MiB")
    monkeypatch.setenv("PATH", stand_ins.nvidia_smi(tmp_path, rows))
    for name in ("CUDA_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"):
        monkeypatch.delenv(name, raising=False)
    growth = dict.fromkeys(found)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", growth.__getitem__)
    memory = {"GPU:0": {"current": 40, "peak": 40}, "GPU:1": {"current": 900, "peak": 1000}}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", memory.__getitem__)
    return found


@pytest.mark.usefixtures("gpus")
def test_the_gpu_with_the_least_free_memory_counts() -> None:
    first, second = (81559 - 5) * MIB - RESERVED_BYTES, (81559 - 70000) * MIB - RESERVED_BYTES + 100
    assert cluster.free_bytes(["GPU:0"]) == first
    assert cluster.free_bytes(["GPU:0", "GPU:1"]) == second < first
    assert cluster.free_bytes(["CPU:0"]) is None


@pytest.mark.usefixtures("gpus")
def test_a_full_gpu_has_little_memory_and_not_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", stand_ins.nvidia_smi(tmp_path, stand_ins.table(2, used_mib=81559)))
    assert cluster.free_bytes(["GPU:0"]) == 1


def test_the_visible_gpus_are_numbered_from_0(
    gpus: list[tf.config.PhysicalDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert cluster.free_bytes(["GPU:0"]) == (81559 - 70000) * MIB - RESERVED_BYTES
    assert len(gpus) == 2


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("why", ["no nvidia-smi", "no answer", "invalid list", "all taken at the start"])
def test_memory_that_is_unknown_is_no_limit(why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if why == "no nvidia-smi":
        monkeypatch.setenv("PATH", "/nowhere")
    elif why == "no answer":
        monkeypatch.setenv("PATH", stand_ins.nvidia_smi(tmp_path, "Failed to initialize NVML", code=1))
    elif why == "invalid list":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "cuda:0")
    else:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    assert cluster.free_bytes(["GPU:0"]) is None


def test_without_growth_the_free_memory_says_nothing(
    gpus: list[tf.config.PhysicalDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: gpu != gpus[0])
    assert cluster.free_bytes(["GPU:0"]) is None
    assert cluster.free_bytes(["GPU:1"]) is not None


def test_a_logical_gpu_has_the_memory_that_was_configured(
    gpus: list[tf.config.PhysicalDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=limit) for limit in (1024, 2048)]
    configured = {gpus[0]: halves, gpus[1]: None}
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", configured.__getitem__)
    monkeypatch.setenv("PATH", "/nowhere")
    assert cluster.free_bytes(["GPU:0", "GPU:1"]) == 1024 * MIB
    assert cluster.free_bytes(["GPU:2"]) is None


# GPUs start with memory growth, unless the user has chosen otherwise; the GPUs are made up


CPU, *GPUS = (tf.config.PhysicalDevice(f"/physical_device:{name}", name[:3]) for name in ("CPU:0", "GPU:0", "GPU:1"))
LIMITED = [tf.config.LogicalDeviceConfiguration(memory_limit=1024)] * 2
SPLIT_CPU = {CPU: [tf.config.LogicalDeviceConfiguration()] * 2}


def gpu_options(growth: list[bool | None], logical: dict[Any, Any] | None = None) -> Any:
    """The options with which TensorFlow would start on two GPUs."""
    machine = types.SimpleNamespace(
        _memory_growth_map=dict(zip(GPUS, growth, strict=False)),
        _virtual_device_map=logical or {},
        _visible_device_list=[CPU, *GPUS] if growth else [CPU],
        list_physical_devices=lambda kind: GPUS[: len(growth)],
    )
    machine._compute_device_options = types.MethodType(context.Context._compute_device_options, machine)
    return context.Context._compute_gpu_options(machine)


@pytest.mark.parametrize(
    ("growth", "logical", "expected"),
    [
        ([None, None], {}, True),
        ([None, None], SPLIT_CPU, True),
        ([False, False], {}, False),
        ([True, True], {}, True),
        ([None, None], {GPUS[0]: LIMITED}, False),
    ],
    ids=["no choice", "logical CPUs only", "off", "on", "memory limits"],
)
def test_memory_grows_unless_the_user_has_chosen(
    growth: list[bool | None], logical: dict[Any, Any], expected: bool
) -> None:
    assert gpu_options(growth, logical).allow_growth is expected


def test_the_host_has_pinned_memory_where_there_are_gpus() -> None:
    assert gpu_options([False, False]).force_gpu_compatible
    assert not gpu_options([]).force_gpu_compatible


def test_a_choice_for_some_of_the_gpus_is_tensorflows_error_as_before() -> None:
    with pytest.raises(ValueError, match="Memory growth cannot differ between GPU devices"):
        gpu_options([False, None])


@pytest.mark.few(1)
@pytest.mark.slow_start
@pytest.mark.parametrize("imports", ["tensorflow, tfpar", "tfpar, tensorflow"])
def test_the_default_comes_with_tfpar_before_or_after_tensorflow(imports: str) -> None:
    program = f"import {imports}\nfrom tensorflow.python.eager.context import Context\n"
    check = "assert 'tfpar' in Context._compute_gpu_options.__code__.co_filename"
    subprocess.run([sys.executable, "-c", program + check], check=True)
