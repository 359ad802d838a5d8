"""The experiments on GPUs as data, for the GPUs that there are: one device, scaling, pipelines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpus.setting import PEERS, GpuSetting
from benchmarks.gpus.worker import has_torch, measure
from benchmarks.harness import Experiment, Result, Target, shown
from tfpar.cluster import gpus

NAME = "gpu"
SUMMARY = "On the GPUs of this machine: one device against Keras and XLA, scaling, pipelines, PyTorch if installed"
_FIGURE = "examples_per_second"
# A batch for one device.
_RESNET50 = GpuSetting("resnet50", "tfpar", batch_size=64, devices=())
_TRANSFORMER = GpuSetting("transformer", "tfpar", batch_size=16, devices=())
_MICROBATCHES_PER_STAGE = 4


def devices_here() -> list[str]:
    """Return the names of the GPUs that this process may use.

    Raises:
        ValueError: If there is none.
    """
    found = gpus.find(os.environ).gpus
    if not found:
        raise ValueError(
            f"python -m benchmarks {NAME} measures GPUs, and this process sees none. Run it on a machine with one, or "
            "choose an experiment on CPUs."
        )
    return [f"GPU:{index}" for index in range(len(found))]


def experiments(
    devices: Sequence[str],
    workloads: Sequence[GpuSetting] = (_RESNET50, _TRANSFORMER),
    with_torch: bool | None = None,
) -> list[Experiment]:
    """Return the experiments for some devices.

    Args:
        devices: Names such as `GPU:0`; scaling and pipelines need at least two.
        workloads: Settings with the workload and the batch of one device; the last one also runs in pipelines.
        with_torch: Whether to compare with PyTorch; None if it is installed.

    Example:
        >>> [experiment.name for experiment in experiments(["GPU:0"])]
        ['gpu_one_device_resnet50', 'gpu_one_device_transformer']
    """
    with_torch = has_torch() if with_torch is None else with_torch
    found = [_one_device(workload, devices[0], with_torch) for workload in workloads]
    if len(devices) > 1:
        found += [_scaling(workload, devices, with_torch) for workload in workloads]
        found.append(_pipeline(workloads[-1], devices, with_torch))
    return found


def _one_device(workload: GpuSetting, device: str, with_torch: bool) -> Experiment:
    ours = replace(workload, devices=(device,))
    settings = {
        "tfpar": ours,
        "Keras fit, jit_compile=False": replace(ours, trainer="keras"),
        "tfpar, XLA": replace(ours, jit_compile=True),
        "Keras fit, XLA": replace(ours, trainer="keras", jit_compile=True),
    }
    findings = [
        Target(("tfpar",), ("Keras fit, jit_compile=False",), 1.0),
        Target(("tfpar, XLA",), ("Keras fit, XLA",), 1.0),
        Target(("tfpar, XLA",), ("tfpar",), 1.0),
    ]
    if with_torch:
        settings |= {
            "PyTorch": replace(ours, trainer="torch"),
            "PyTorch, torch.compile": replace(ours, trainer="torch", jit_compile=True),
        }
        findings.append(Target(("tfpar", "tfpar, XLA"), ("PyTorch", "PyTorch, torch.compile")))
    summary = f"{workload.workload}, batch {workload.batch_size}, on {device}"
    return _experiment(f"one_device_{workload.workload}", summary, settings, findings)


def _scaling(workload: GpuSetting, devices: Sequence[str], with_torch: bool) -> Experiment:
    """Give each device the same batch, on one, two, four … and all devices."""
    numbers = sorted({1, len(devices), *(2**power for power in range(1, len(devices).bit_length()))})
    numbers = [number for number in numbers if number <= len(devices)]

    def on(number: int) -> GpuSetting:
        return replace(workload, devices=tuple(devices[:number]), batch_size=number * workload.batch_size)

    names = {number: f"tfpar, {number} device{'s' * (number > 1)}" for number in numbers}
    settings = {name: on(number) for number, name in names.items()}
    # Scaling efficiency is the ratio by the number of devices.
    findings = [Target((names[number],), (names[1],), 0.9 * number) for number in numbers[1:]]
    most = on(len(devices))
    settings["Keras fit, MirroredStrategy"] = replace(most, trainer="keras")
    findings.append(Target((names[len(devices)],), ("Keras fit, MirroredStrategy",), 1.0))
    if with_torch:
        settings["PyTorch DDP"] = replace(most, trainer="torch")
        findings.append(Target((names[len(devices)],), ("PyTorch DDP",)))
    summary = f"{workload.workload}, batch {workload.batch_size} a device, on up to {len(devices)} devices"
    return _experiment(f"scaling_{workload.workload}", summary, settings, findings)


def _pipeline(workload: GpuSetting, devices: Sequence[str], with_torch: bool) -> Experiment:
    num_microbatches = _MICROBATCHES_PER_STAGE * len(devices)
    batch_size = workload.batch_size * num_microbatches
    whole = replace(workload, devices=tuple(devices), batch_size=batch_size, num_microbatches=num_microbatches)
    ours, one = f"tfpar.Pipeline, {len(devices)} stages", "tfpar.Pipeline, 1 stage"
    settings = {
        ours: replace(whole, trainer="pipeline"),
        one: replace(whole, trainer="pipeline", devices=(devices[0],)),
    }
    # The share of 1F1B's time that is no bubble, and a tenth less.
    share = num_microbatches / (num_microbatches + len(devices) - 1)
    findings = [Target((ours,), (one,), 0.9 * share * len(devices))]
    if with_torch:
        theirs = "torch.distributed.pipelining"
        settings[theirs] = replace(whole, trainer="torch_pipeline")
        findings.append(Target((ours,), (theirs,)))
    summary = f"{workload.workload}, {num_microbatches} micro-batches of {workload.batch_size}, 1F1B"
    return _experiment(f"pipeline_{workload.workload}", summary, settings, findings)


def _experiment(name: str, summary: str, settings: dict[str, GpuSetting], findings: Sequence[Target]) -> Experiment:
    return Experiment(f"{NAME}_{name}", summary, _FIGURE, settings, measure, tuple(findings))


def as_markdown(result: Result) -> str:
    """Return the ratios of an experiment as rows of the table in `docs/benchmarks.md`.

    Args:
        result: All rounds.
    """
    rows = []
    for finding in result.findings:
        ours, theirs = finding.text.split(" / ")
        speeds = [f"{name}: {shown(_FIGURE, result.median(name, _FIGURE))[1]} examples/s" for name in (ours, theirs)]
        rows.append(f"| {result.experiment.summary} | {speeds[0]} | {speeds[1]} | {result.found(finding):.2f} |")
    if not any(setting.trainer in PEERS for setting in result.experiment.settings.values()):
        rows.append(f"| {result.experiment.summary} | | PyTorch is not installed, or sees no GPU | |")
    return "\n".join(["| Experiment | tfpar | compared with | ratio |", "|---|---|---|---|", *rows])
