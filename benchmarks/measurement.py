"""What one process of a speed experiment trains, and what it measures. No TensorFlow here."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

Workload = Literal[
    "host_bound",
    "cnn",
    "dense",
    "dense_adam",
    "resnet20",
    "blocks",
    "embedding",
    "mobilenet",
    "masked_mean",
    "weighted_mean",
]
TrainerName = Literal["keras", "tfpar", "tf_keras", "torch"]
Compression = Literal["bfloat16"]
CheckpointWriting = Literal["asynchronous", "synchronous"]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one process trains and measures.

    Args:
        workload: Model and data, see `benchmarks.workloads`.
        trainer: Who trains: Keras' `fit`, tfpar's, that of legacy tf_keras, or PyTorch.
        batch_size: Global batch size.
        num_steps: Steps of the timed call of `fit`.
        num_warm_up_steps: Steps of the call before, which compiles and is not timed.
        num_replicas: Logical CPUs that share each global batch; 1 for no strategy.
        cores: Processor cores that the process may use; None for all.
        intra_op_threads: Threads inside one operation; None for TensorFlow's choice.
        inter_op_threads: Operations at a time; None for TensorFlow's choice.
        steps_per_execution: The argument of Keras' `compile`; tfpar chooses the number automatically.
        num_workers: Processes that train together, one core and one thread each; 1 for a single process.
        compression: The argument of `tfpar.MultiWorker`.
        checkpoints: How tfpar writes a checkpoint every second; None for no checkpoints.
        rate: The rate of the network between the workers, such as "1gbit"; None for the loopback.
        fused: The argument of `tfpar.Trainer`.
        commit: The commit whose tfpar trains, see `benchmarks.commits`; None for that of this folder.
    """

    workload: Workload
    trainer: TrainerName
    batch_size: int
    num_steps: int
    num_warm_up_steps: int
    num_replicas: int = 1
    cores: int | None = None
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    steps_per_execution: int = 1
    num_workers: int = 1
    compression: Compression | None = None
    checkpoints: CheckpointWriting | None = None
    rate: str | None = None
    fused: bool = True
    commit: str | None = None


class Timing(NamedTuple):
    """The times of one measurement.

    Args:
        training_seconds: From the call of `fit` to its `on_train_end`; this is what counts.
        return_seconds: From there until `fit` returned, which is no training (see `benchmarks.worker`).
        processor_seconds: The processor time of all threads in training; with a core for each process, the difference
            to `training_seconds` is waiting, for other workers or for other work on the machine.
    """

    training_seconds: float
    return_seconds: float
    processor_seconds: float = 0.0
