"""GPUs start with memory growth, unless the user has chosen otherwise; the GPUs are made up."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tfpar  # noqa: F401  (its import installs the default)

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


def test_a_choice_for_some_of_the_gpus_is_tensorflows_error_as_before() -> None:
    with pytest.raises(ValueError, match="Memory growth cannot differ between GPU devices"):
        gpu_options([False, None])


@pytest.mark.slow_start
@pytest.mark.parametrize("imports", ["tensorflow, tfpar", "tfpar, tensorflow"])
def test_the_default_comes_with_tfpar_before_or_after_tensorflow(imports: str) -> None:
    program = f"import {imports}\nfrom tensorflow.python.eager.context import Context\n"
    check = "assert 'tfpar' in Context._compute_gpu_options.__code__.co_filename"
    subprocess.run([sys.executable, "-c", program + check], check=True)
