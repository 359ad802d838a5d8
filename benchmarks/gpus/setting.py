"""What one turn of an experiment on GPUs trains. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from typing import Literal

Workload = Literal["resnet50", "transformer", "tiny"]
TrainerName = Literal["tfpar", "pipeline", "keras", "torch", "torch_pipeline"]

# The programs of PyTorch's trainers.
PEERS = {"torch": "benchmarks.gpus.torch_peer", "torch_pipeline": "benchmarks.gpus.torch_pipeline"}


@dataclasses.dataclass(frozen=True)
class GpuSetting:
    """What is trained in one turn, by whom and on which devices.

    Args:
        workload: Model and data, see `benchmarks.gpus.models`.
        trainer: `tfpar.SingleDevice` or, on several devices, `tfpar.Mirrored`; `tfpar.Pipeline` with a stage a device;
            Keras' `fit`; PyTorch, on several devices `DistributedDataParallel`; or its `torch.distributed.pipelining`.
        batch_size: Rows of the global batch.
        devices: Names such as `GPU:0`.
        jit_compile: Whether XLA compiles the steps; `torch.compile` for PyTorch.
        num_microbatches: Micro-batches of a pipeline.
        num_laps: Timed groups of steps; the group before them compiles and is not timed.
        steps_per_lap: Steps of a group.
    """

    workload: Workload
    trainer: TrainerName
    batch_size: int
    devices: tuple[str, ...]
    jit_compile: bool = False
    num_microbatches: int = 1
    num_laps: int = 3
    steps_per_lap: int = 50

    @property
    def num_processes(self) -> int:
        """Processes of a turn: PyTorch has one for each device."""
        return len(self.devices) if self.trainer in PEERS else 1
