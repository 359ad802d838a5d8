"""Who trains on the GPUs of a machine, in the order of their turns: what says most comes first."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import peers
from benchmarks.gpus.setting import PEERS, GpuSetting, Precision
from tfpar.cluster.gpu import gpus

NAME = "gpu"
SUMMARY = "On the GPUs of this machine, within --budget_seconds: Keras, tfpar, PyTorch, XLA, precision, stages"
Turn = tuple[GpuSetting, ...]  # measured in one process after the other, or in one for each device
# A batch for one device.
_TRANSFORMER = GpuSetting("", "transformer", "tfpar", batch_size=16, devices=())
_RESNET50 = GpuSetting("", "resnet50", "tfpar", batch_size=64, devices=())
_PRECISIONS: tuple[Precision, ...] = ("float32", "mixed_bfloat16")
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


def turns(
    devices: Sequence[str],
    workloads: Sequence[GpuSetting] = (_TRANSFORMER, _RESNET50),
    with_torch: bool | None = None,
) -> list[Turn]:
    """Return the turns on some devices.

    Args:
        devices: Names such as `GPU:0`. Of a single one, two logical devices have stages and replicas.
        workloads: Models with the batch of one device; the first one also runs in pipelines.
        with_torch: Whether to compare with PyTorch; None if it is installed.

    Example:
        >>> [turn[0].name for turn in turns(["GPU:0"])][:2]
        ['Keras fit', 'tfpar']
    """
    is_installed = importlib.util.find_spec("torch") is not None or peers.folder("torch").exists()
    with_torch = is_installed if with_torch is None else with_torch
    on_one = [
        replace(workload, devices=(devices[0],), precision=precision)
        for precision in _PRECISIONS
        for workload in workloads
    ]
    found = [
        _turn(on_one, "Keras fit", trainer="keras"),
        _turn(on_one, "tfpar"),
        _turn(on_one, "PyTorch", trainer="torch"),
        _turn(on_one, "tfpar, no XLA", jit_compile=False),
        _turn(on_one, "PyTorch, torch.compile", trainer="torch", jit_compile=True),
        *(_scaling(workloads, devices) if len(devices) > 1 else ()),
        _stages(workloads[0], devices if len(devices) > 1 else [devices[0], devices[0].replace(":0", ":1")]),
        _turn(on_one, "tfpar, no XLA, fused=False", jit_compile=False, fused=False),
        _turn(on_one, "Keras fit, no XLA", trainer="keras", jit_compile=False),
        _turn(on_one, "tfpar, no XLA, loop of steps", jit_compile=False, launches_steps=False),
        _turn(on_one, "tfpar, no XLA, layout optimizer", jit_compile=False, layout_optimizer=True),
        _turn(on_one, "tfpar, no XLA, no layout optimizer", jit_compile=False, layout_optimizer=False),
        _turn(on_one, "tfpar, no XLA, memory not pinned", jit_compile=False, pins_memory=False),
    ]
    return [turn for turn in found if with_torch or turn[0].trainer not in PEERS]


def _turn(settings: Sequence[GpuSetting], name: str, **changes: Any) -> Turn:
    return tuple(replace(setting, name=name, **changes) for setting in settings)


def _scaling(workloads: Sequence[GpuSetting], devices: Sequence[str]) -> list[Turn]:
    """Give each device the same batch, on two, four … and all devices."""
    number, stages = len(devices), _pipeline(workloads[0], devices)

    def on(number: int) -> list[GpuSetting]:
        return [replace(one, devices=tuple(devices[:number]), batch_size=number * one.batch_size) for one in workloads]

    powers = (2**power for power in range(1, number.bit_length()))
    return [
        *(_turn(on(some), f"tfpar.Mirrored, {some} devices") for some in sorted({number, *powers})),
        _turn(on(number), f"Keras fit, MirroredStrategy, {number} devices", trainer="keras"),
        _turn(on(number), f"PyTorch DDP, {number} devices", trainer="torch"),
        _turn([stages], f"torch.distributed.pipelining, {number} stages", trainer="torch_pipeline"),
    ]


def _stages(workload: GpuSetting, devices: Sequence[str]) -> Turn:
    """Compare stages and replicas with one device: their results, then their speed."""
    two = replace(workload, devices=tuple(devices[:2]))
    parity = replace(two, workload="tiny", batch_size=8, quantity="parity")
    stages = _pipeline(workload, devices)
    return (
        replace(parity, name="tfpar.Mirrored, 2 devices"),
        replace(parity, name="tfpar.Pipeline, 2 stages", trainer="pipeline", num_microbatches=2),
        stages,
        replace(stages, name="tfpar.Pipeline, 1 stage", devices=(devices[0],)),
        replace(two, name="tfpar.Mirrored, 2 devices, a half each"),
    )


def _pipeline(workload: GpuSetting, devices: Sequence[str]) -> GpuSetting:
    num_microbatches = _MICROBATCHES_PER_STAGE * len(devices)
    return replace(
        workload,
        name=f"tfpar.Pipeline, {len(devices)} stages",
        trainer="pipeline",
        devices=tuple(devices),
        batch_size=workload.batch_size * num_microbatches,
        num_microbatches=num_microbatches,
        steps_per_lap=5,
    )
