"""What one trainer trains on GPUs, and what is asked of it. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Workload = Literal["resnet50", "transformer", "tiny"]
Precision = Literal["float32", "mixed_bfloat16"]
TrainerName = Literal["tfpar", "pipeline", "keras", "torch", "torch_pipeline"]
Quantity = Literal["speed", "parity"]

# The programs of PyTorch's trainers.
PEERS = {"torch": "benchmarks.gpus.torch_peer", "torch_pipeline": "benchmarks.gpus.torch_pipeline"}


@dataclasses.dataclass(frozen=True)
class GpuSetting:
    """What is trained, by whom and on which devices.

    Args:
        name: What the table calls the trainer.
        workload: Model and data, see `benchmarks.gpus.models`.
        trainer: `tfpar.SingleDevice` or, on several devices, `tfpar.Mirrored`; `tfpar.Pipeline` with a stage a device;
            Keras' `fit`; PyTorch, on several devices `DistributedDataParallel`; or its `torch.distributed.pipelining`.
        batch_size: Rows of the global batch.
        devices: Names such as `GPU:0`; more than the machine has are logical devices of the first.
        precision: Keras' dtype policy, or the same with `torch.autocast`; float32 products run in TensorFloat-32.
        jit_compile: The argument of Keras' `compile`; True is `torch.compile` for PyTorch.
        fused: The argument of `tfpar.Trainer`.
        layout_optimizer: Whether TensorFlow may turn convolutions into NCHW; None for tfpar's choice.
        launches_steps: Whether each step is launched while the one before runs; else the steps are a loop.
        pins_memory: Whether batches lie in pinned memory of the host.
        num_microbatches: Micro-batches of a pipeline.
        quantity: "speed", or "parity": the largest difference from one device, by `tfpar.check_parity`.
        num_laps: Timed groups of steps; the first step and the group after it are not timed.
        steps_per_lap: Steps of a group.
        limit_seconds: The most that the setting may take, compilation included.
    """

    name: str
    workload: Workload
    trainer: TrainerName
    batch_size: int
    devices: tuple[str, ...]
    precision: Precision = "float32"
    jit_compile: bool | Literal["auto"] = "auto"
    fused: bool = True
    layout_optimizer: bool | None = None
    launches_steps: bool = True
    pins_memory: bool = True
    num_microbatches: int = 1
    quantity: Quantity = "speed"
    num_laps: int = 3
    steps_per_lap: int = 20
    limit_seconds: float = 100.0

    @property
    def module(self) -> str:
        """The program that measures it."""
        return PEERS.get(self.trainer, "benchmarks.gpus.worker")

    @property
    def num_processes(self) -> int:
        """Processes that train together: PyTorch has one for each device."""
        return len(self.devices) if self.trainer in PEERS else 1

    @property
    def label(self) -> str:
        """The setting in a line."""
        quantity = "parity of " if self.quantity == "parity" else ""
        return f"{quantity}{self.workload}, {self.precision}: {self.name}"


def from_json(held: Mapping[str, Any]) -> GpuSetting:
    """Return a setting from its fields, as JSON holds them."""
    return GpuSetting(**{**held, "devices": tuple(held["devices"])})
