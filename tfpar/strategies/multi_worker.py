"""Data parallelism over the worker processes of a job, on one machine or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from tfpar._compat import tf_distribute
from tfpar.cluster import tf_config
from tfpar.engines.replicas.replica_engine import averaged_steps, described_shares
from tfpar.engines.workers.collectives import PACK_BYTES, AllReduce
from tfpar.engines.workers.worker import addresses_of, config_of_job
from tfpar.engines.workers.worker_replicas import Compression, Settings, WorkerReplicas
from tfpar.layout import Layout, OwnSteps, Shard, check_batch_shares, check_own_steps, check_shard
from tfpar.messages import keyword_arguments
from tfpar.recomputation.choice import Recompute, check
from tfpar.strategies.base import Strategy
from tfpar.study.outputs import BatchDependentLayers, check_choice
from tfpar.workers import preflight


class MultiWorker(Strategy):
    """Data parallelism over several processes, based on `tf.distribute.MultiWorkerMirroredStrategy`.

    Every worker runs the same program, and the results are those of one device. The environment variable TF_CONFIG
    holds the addresses of all workers and the rank of this one; `python -m tfpar.launch` and Kubeflow set it, and under
    `srun` the variables of Slurm replace it. Without it the job has one worker. The chief, rank 0, decides for all
    workers and writes the files; its weights are broadcast before the first step.

    Args:
        devices: Devices of this worker, such as `["GPU:0"]`; None uses all GPUs or, without GPUs, all logical CPUs.
            Workers may have different numbers of them.
        all_reduce: Algorithm that sums gradients: `"ring"`, `"nccl"` (GPUs only), or `"auto"`, which is NCCL if every
            replica has a physical GPU of its own, else a ring.
        pack_bytes: Small gradients are sent together in packs of up to this many bytes, larger ones in slices of that
            size. None means 4 MiB, which measured fast.
        compression: `"bfloat16"` rounds gradients to 8 bits of precision for the all-reduce, which halves the bytes
            sent; None keeps their type.
        sync: `"step"` sums the gradients in every step, with the results of one device. `"average"` (local SGD) lets
            every replica update its own weights and averages them (see `tfpar.engines.workers.local_sgd`).
        every: Steps between two averages, with `sync="average"`.
        average_optimizer: With `sync="average"`, whether the optimizer's moments are averaged too. Otherwise each
            replica keeps its own, and a resumed run starts with the chief's.
        batch_dependent_layers: `"refuse"`: raise an error for layers whose output for an example depends on the other
            examples. `"gather"`: call such layers with the whole batch on every replica.
        shard: `"optimizer"`: shard the optimizer state over the replicas of all workers (ZeRO stages 1 and 2).
            `"weights"`: also shard weights and gradients (ZeRO stage 3, FSDP); the first process then runs all steps.
            None: replicate everything.
        batch_shares: Relative size of the per-replica batch of each device, of all workers by rank; or of the part of
            each worker, which its devices share equally. `[3, 1]` suits a worker that is three times as fast as the
            other. None: equal sizes for all devices.
        own_steps: How replicas run a model's own `train_step`. `"exact"`: with the results of one device, or an error
            if the step has none in parts. `"average"`: each on its examples, and gradients are averaged, as under
            `tf.distribute`; a step that compares examples then gives other weights.
        recompute: True: keep only the inputs of layers for the backward pass, which computes them again: less memory
            for more time, with the same results. A list: only of the layers with these names, patterns or classes,
            such as `["block_*", keras.layers.MultiHeadAttention]`.
        form_seconds: Time limit for all workers to connect.
        silence_seconds: Time without a heartbeat after which a worker counts as failed.

    Raises:
        TypeError: If `recompute` has the wrong type.
        ValueError: If TF_CONFIG is malformed, this process is an evaluator, or an argument is out of range.
        RuntimeError: If TensorFlow has already started.
        TimeoutError: If a worker does not connect in time; the message contains its address.

    Example:
        >>> strategy = tfpar.MultiWorker()  # right after the imports
        >>> trainer = tfpar.Trainer(build_model, strategy, seed=0)
        >>> trainer.fit(dataset, epochs=5)
    """

    @keyword_arguments.named
    def __init__(
        self,
        devices: Sequence[str] | None = None,
        all_reduce: AllReduce = "auto",
        pack_bytes: int | None = None,
        compression: Compression | None = None,
        sync: Literal["step", "average"] = "step",
        every: int = 1,
        average_optimizer: bool = True,
        batch_dependent_layers: BatchDependentLayers = "refuse",
        shard: Shard | None = None,
        batch_shares: Sequence[int] | None = None,
        own_steps: OwnSteps = "exact",
        recompute: Recompute = False,
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        preflight.check_options(all_reduce, pack_bytes, compression, form_seconds, silence_seconds)
        preflight.check_sync(sync, every, average_optimizer, compression, shard, batch_shares)
        recompute = check(recompute)
        check_choice(batch_dependent_layers)
        check_shard(shard)
        check_batch_shares(batch_shares)
        check_own_steps(own_steps, batch_shares)
        if shard == "weights":
            # Imported here: most users of replicas do not need the engine of stages.
            from tfpar.engines.stages.block_engine import BlockEngine, check_without_effect, devices_of_workers

            check_without_effect("all_reduce", all_reduce, "auto")
            check_without_effect("pack_bytes", pack_bytes, None)
            check_without_effect("compression", compression, None)
            check_without_effect("batch_dependent_layers", batch_dependent_layers, "refuse")
            check_without_effect("batch_shares", batch_shares, None)
            check_without_effect("own_steps", own_steps, "exact")
            used = devices_of_workers(devices, form_seconds, silence_seconds)
            layout = Layout(len(used.names), shard=shard, num_workers=used.num_workers, recompute=bool(recompute))
            super().__init__(layout, BlockEngine(used.names, used.watch, recompute))
            return
        job = config_of_job("MultiWorker")
        name = preflight.named("MultiWorker", shard)
        formed = preflight.form_cluster(job, devices, form_seconds, silence_seconds, name)
        settings = Settings(
            all_reduce, PACK_BYTES if pack_bytes is None else pack_bytes, compression, sync, every, average_optimizer,
            batch_dependent_layers, shard, None if batch_shares is None else tuple(batch_shares), own_steps, recompute,
        )  # fmt: skip
        self._set(WorkerReplicas(formed, addresses_of(job), 0 if job is None else job.rank, settings))

    @classmethod
    def of(cls, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> MultiWorker:
        """Wrap the `tf.distribute.MultiWorkerMirroredStrategy` in whose scope a model was built."""
        multi_worker = cls.__new__(cls)
        addresses = addresses_of(tf_config.from_environment(os.environ))
        multi_worker._set(WorkerReplicas(strategy, addresses, tf_distribute.worker_index(strategy), Settings()))
        return multi_worker

    def _set(self, engine: WorkerReplicas) -> None:
        layout = Layout(
            engine.num_replicas,
            shard=engine.shard,
            num_workers=engine.job.num_workers,
            recompute=bool(engine.recompute),
        )
        super().__init__(layout, engine)

    def describe(self) -> str:
        """Return a one-line description of the job and of this worker's devices."""
        workers = f"MultiWorker over {self.num_workers} worker{'s' * (self.num_workers > 1)}"
        if self.layout.shard == "weights":
            workers = f"MultiWorker over {self.layout.num_workers} worker{'s' * (self.layout.num_workers > 1)}"
            return f"{workers}, {self.layout.describe(self.device_names)}"
        sharded = (
            ", optimizer state sharded" * (self.layout.shard is not None) + ", recomputing" * self.layout.recompute
        )
        shares, names = described_shares(self.engine), ", ".join(self.device_names)
        replicas = f"{self.num_replicas} replicas{shares}{sharded}{averaged_steps(self.engine)}"
        return f"{workers}, {replicas}; this is worker {self.rank} on {names}"
