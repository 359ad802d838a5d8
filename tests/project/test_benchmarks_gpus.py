"""The experiments on GPUs: their settings for any number of GPUs, and one tiny run of each kind on CPUs."""

import importlib.util
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import rich.console

from benchmarks import harness, report
from benchmarks.gpus import experiments, torch_pipeline
from benchmarks.gpus.setting import GpuSetting, TrainerName
from benchmarks.gpus.worker import figures, has_torch, measure
from benchmarks.machine import describe_machine
from tests import ROOT
from tests.support import stand_ins
from tests.support.extent import sampled

TINY = GpuSetting("tiny", "tfpar", batch_size=4, devices=(), num_laps=1, steps_per_lap=2)


def names(num_devices: int, with_torch: bool = False) -> list[str]:
    devices = [f"GPU:{index}" for index in range(num_devices)]
    return [one.name for one in experiments.experiments(devices, with_torch=with_torch)]


def test_one_gpu_is_compared_with_keras_and_several_also_with_each_other() -> None:
    assert names(1) == ["gpu_one_device_resnet50", "gpu_one_device_transformer"]
    scaling = ["gpu_scaling_resnet50", "gpu_scaling_transformer", "gpu_pipeline_transformer"]
    assert names(2) == names(1) + scaling


@pytest.mark.parametrize(("number", "expected"), [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_scaling_takes_powers_of_two_and_all_devices_with_the_same_batch_each(number: int, expected: list[int]) -> None:
    devices = [f"GPU:{index}" for index in range(number)]
    (scaling,) = [one for one in experiments.experiments(devices, [TINY], with_torch=False) if "scaling" in one.name]
    ours = [one for one in scaling.settings.values() if one.trainer == "tfpar"]
    assert [len(one.devices) for one in ours] == expected
    assert {one.batch_size / len(one.devices) for one in scaling.settings.values()} == {4}


@pytest.mark.parametrize("with_torch", [False, True])
def test_the_targets_name_settings_and_pytorch_is_compared_where_it_is(with_torch: bool) -> None:
    found = experiments.experiments(["GPU:0", "GPU:1"], with_torch=with_torch)
    for one in found:
        assert {name for target in one.findings for name in (*target.ours, *target.theirs)} == {*one.settings}
    trainers = {one.name: {setting.trainer for setting in one.settings.values()} for one in found}
    assert ("torch_pipeline" in trainers.pop("gpu_pipeline_transformer")) == with_torch
    assert all(("torch" in some) == with_torch for some in trainers.values())


def test_the_lap_that_compiles_is_no_step() -> None:
    assert figures([0, 9, 9, 11, 11, 13, 13, 14], 2) == {"step_seconds": 1.0, "first_lap_seconds": 9}


def test_the_table_is_markdown_with_a_row_for_each_ratio() -> None:
    one = experiments.experiments(["GPU:0"], [TINY], with_torch=False)[0]
    speeds = iter([300.0, 200.0, 500.0, 400.0])
    result = harness.run_rounds(replace(one, measure=lambda setting: {"examples_per_second": next(speeds)}), 1)
    printed = io.StringIO()
    assert experiments.as_markdown(result).splitlines()[2:] == [
        "| tiny, batch 4, on GPU:0 | tfpar: 300 examples/s | Keras fit, jit_compile=False: 200 examples/s | 1.50 |",
        "| tiny, batch 4, on GPU:0 | tfpar, XLA: 500 examples/s | Keras fit, XLA: 400 examples/s | 1.25 |",
        "| tiny, batch 4, on GPU:0 | tfpar, XLA: 500 examples/s | tfpar: 300 examples/s | 1.67 |",
        "| tiny, batch 4, on GPU:0 | | PyTorch is not installed, or sees no GPU | |",
    ]
    report.print_result(result, rich.console.Console(file=printed, width=200))
    assert "gpu_one_device_tiny" in printed.getvalue()


def test_the_machine_names_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gpus" not in describe_machine()
    monkeypatch.setenv("PATH", stand_ins.nvidia_smi(tmp_path, "NVIDIA X, 580.1\nNVIDIA X, 580.1\n"))
    assert describe_machine()["gpus"] == "NVIDIA X, 580.1; NVIDIA X, 580.1"


@pytest.mark.multi_process
def test_without_a_gpu_the_command_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "benchmarks", "gpu"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("python -m benchmarks gpu measures GPUs, and this process sees none. Run it on")


TRAINERS = {
    "one device, XLA": replace(TINY, devices=("CPU:0",), jit_compile=True),
    "Keras": replace(TINY, trainer="keras", devices=("CPU:0",)),
    "mirrored": replace(TINY, devices=("CPU:0", "CPU:1")),
    "pipeline": replace(TINY, trainer="pipeline", devices=("CPU:0", "CPU:1"), num_microbatches=2),
}


@pytest.mark.multi_process
@pytest.mark.slow_start
@pytest.mark.parametrize("trainer", sampled(TRAINERS, of_ci=("Keras", "pipeline")))
def test_each_trainer_runs_on_cpus(trainer: str) -> None:
    output = measure(TRAINERS[trainer])
    assert output["examples_per_second"] == pytest.approx(4 / output["step_seconds"])
    assert output["first_lap_seconds"] > 0


@pytest.mark.multi_process
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("trainer", ["torch", "torch_pipeline"])
def test_pytorch_runs_on_cpus(trainer: TrainerName) -> None:
    output = measure(replace(TINY, trainer=trainer, devices=("CPU:0", "CPU:1"), num_microbatches=2))
    assert output["examples_per_second"] == pytest.approx(4 / output["step_seconds"])


@pytest.mark.parametrize(("number", "sizes"), [(1, [12]), (2, [6, 6]), (5, [2, 2, 3, 2, 3])])
def test_the_layers_are_cut_evenly_into_the_stages_of_pytorch(number: int, sizes: list[int]) -> None:
    layers = list(range(12))
    stages = [torch_pipeline.share(layers, stage, number) for stage in range(number)]
    assert [layer for stage in stages for layer in stage] == layers
    assert [len(stage) for stage in stages] == sizes


def test_a_pytorch_that_sees_no_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert not has_torch()
