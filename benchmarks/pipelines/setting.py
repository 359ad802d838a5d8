"""What one turn of a pipeline experiment trains and measures. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from typing import Literal

Workload = Literal["mlp", "transformer", "wide", "resnet50"]
TrainerName = Literal[
    "pipeline", "one_device", "keras", "torch", "hybrid", "multi_worker", "mirrored", "sharded_weights", "torch_sharded"
]
Quantity = Literal["laps", "prediction", "memory", "first_step", "parts"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is trained in one turn, by whom, and what is asked.

    Args:
        workload: Model and data, see `benchmarks.pipelines.examples`.
        trainer: `tfpar.Pipeline`, `tfpar.SingleDevice` (the whole batch at once), Keras' `fit`,
            `torch.distributed.pipelining` in one process a stage, over several workers `tfpar.Hybrid` or
            `tfpar.MultiWorker`, or on several devices `tfpar.Mirrored`, also with `shard="weights"`, or PyTorch's
            `fully_shard` in one process a device.
        num_microbatches: Micro-batches of a step, of all replicas; of a trainer without any they only make the batch.
        microbatch_size: Rows of a micro-batch.
        schedule: Name of the schedule.
        num_stages: Stages.
        num_devices: Logical CPUs of each worker, of one core and one thread each.
        num_workers: Workers of tfpar, of one core each; the stages of `tfpar.Pipeline` are divided over several.
        recompute: Whether stages keep only their inputs.
        balance: What `tfpar.Pipeline` balances the stages by.
        quantity: "laps" is the time of a step, "prediction" also that of the simulator, "memory" the
            most bytes of a step, "first_step" the seconds until the first step is done, with all cores and
            TensorFlow's own choice of threads, "parts" the seconds and bytes of one stage of several equal ones.
        num_laps: Timed groups of steps; the group before them compiles and is not timed.
        steps_per_lap: Steps of a group.
    """

    workload: Workload
    trainer: TrainerName
    num_microbatches: int
    microbatch_size: int
    schedule: str = "1f1b"
    num_stages: int = 2
    num_devices: int = 2
    num_workers: int = 1
    recompute: bool = False
    balance: str = "time"
    quantity: Quantity = "laps"
    num_laps: int = 5
    steps_per_lap: int = 20

    @property
    def num_peer_processes(self) -> int:
        """Processes of PyTorch."""
        return self.num_devices if self.trainer == "torch_sharded" else self.num_stages

    @property
    def batch_size(self) -> int:
        """Rows of the global batch."""
        return self.num_microbatches * self.microbatch_size
