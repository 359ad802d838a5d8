"""Data parallelism over several processes, on one machine or on many: the workers of a TF_CONFIG job."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_determinism, tf_distribute
from tfpar.cluster import tf_config
from tfpar.data import Sharded
from tfpar.layout import Layout, Shard
from tfpar.messages import keyword_arguments
from tfpar.per_model import PerModel
from tfpar.reduction import objective
from tfpar.reduction.replicas import local_replica_id
from tfpar.reduction.verdict import Verdict
from tfpar.strategies.batch_parts import split_into_parts
from tfpar.strategies.data_parallel import DataParallel
from tfpar.strategies.distributed import Distributed
from tfpar.strategies.fully_sharded import check_without_effect, over_workers
from tfpar.strategies.multi_worker import preflight, sufficient_factors
from tfpar.strategies.multi_worker.collectives import PACK_BYTES, AllReduce, Group, order_of_members
from tfpar.strategies.multi_worker.local_sgd import LocalSGD
from tfpar.strategies.multi_worker.metric_sums import MetricSums
from tfpar.strategies.multi_worker.outputs import all_gather_outputs
from tfpar.strategies.multi_worker.shard_messages import CollectiveCommunicator
from tfpar.strategies.multi_worker.worker import Worker, addresses_of, config_of_job
from tfpar.strategies.optimizer_shards import LocalCommunicator, OptimizerShards
from tfpar.study.outputs import BatchDependentLayers
from tfpar.study.study import Engine

Compression = Literal["bfloat16"]


class MultiWorker(Worker, DataParallel):
    """Train in several processes with `tf.distribute.MultiWorkerMirroredStrategy`, equal to one device.

    Every worker runs the same program. The variable TF_CONFIG holds the addresses of all workers and the rank of this
    one; `python -m tfpar.launch` and Kubeflow set it, and under `srun` the variables of Slurm replace it.
    Without it the job has one worker. The chief, rank 0, decides for all workers and writes the files; its weights are
    broadcast before the first step.

    Args:
        devices: This worker's devices, such as `["GPU:0"]`; None for all GPUs, or else all logical CPUs. Every worker
            has the same number of them.
        all_reduce: How gradients are summed: `"ring"`, on GPUs `"nccl"`, or `"auto"` for NCCL where every replica has
            a GPU of its own, else a ring.
        pack_bytes: Small gradients are sent together in packs of up to this many bytes, larger ones in slices of that
            size; None for 4 MiB, which was fast in measurements.
        compression: `"bfloat16"` rounds gradients to 8 bits of precision for the all-reduce, which halves its bytes;
            None keeps their type.
        sync: `"step"` sums the gradients of every step, with one device's result; with `"average"` every replica
            updates its own weights, and their weights are averaged (see `tfpar.strategies.multi_worker.local_sgd`).
        every: With `sync="average"`, the steps from one average to the next.
        average_optimizer: With `sync="average"`, whether the optimizer's moments are averaged too; otherwise each
            replica keeps its own, and a resumed run begins with the chief's.
        batch_dependent_layers: The treatment of layers in which examples depend on each other: `"refuse"` them before
            the first step, or `"gather"` the batch, so that every replica computes them on all of it.
        shard: `"optimizer"` divides the optimizer's state over the replicas of all workers (see
            `tfpar.strategies.optimizer_shards`), `"weights"` also the weights and gradients, and the first
            process runs all steps (see `tfpar.strategies.fully_sharded`); None keeps all of it on each.
        form_seconds: The time limit for all workers to connect.
        silence_seconds: The time without a heartbeat after which a worker counts as failed.

    Raises:
        ValueError: If TF_CONFIG is malformed, or this process is an evaluator, or an argument is out of range.
        RuntimeError: If TensorFlow has started already.
        TimeoutError: If a worker does not connect in time; the message names its address.

    Example:
        >>> strategy = tfpar.MultiWorker()  # right after the imports
        >>> trainer = tfpar.Trainer(build_model, strategy, seed=0)
        >>> trainer.fit(dataset, epochs=5)
    """

    # Between two calls the workers reduce metrics and vote on the next call, which takes milliseconds.
    seconds_per_call = 0.5

    @keyword_arguments.named
    def __new__(
        cls,
        devices: Sequence[str] | None = None,
        all_reduce: AllReduce = "auto",
        pack_bytes: int | None = None,
        compression: Compression | None = None,
        sync: Literal["step", "average"] = "step",
        every: int = 1,
        average_optimizer: bool = True,
        batch_dependent_layers: BatchDependentLayers = "refuse",
        shard: Shard | None = None,
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> MultiWorker:
        """Return the strategy: with sharded weights one that runs a model in blocks."""
        if shard != "weights":
            return super().__new__(cls)
        preflight.check_sync(sync, every, average_optimizer, compression, shard)
        check_without_effect("all_reduce", all_reduce, "auto")
        check_without_effect("pack_bytes", pack_bytes, None)
        check_without_effect("compression", compression, None)
        check_without_effect("batch_dependent_layers", batch_dependent_layers, "refuse")
        return cast("MultiWorker", over_workers(devices, form_seconds, silence_seconds))

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
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        preflight.check_options(all_reduce, pack_bytes, compression, form_seconds, silence_seconds)
        pack_bytes = PACK_BYTES if pack_bytes is None else pack_bytes
        options = preflight.checked(
            pack_bytes, compression, sync, every, average_optimizer, batch_dependent_layers, shard
        )
        name = preflight.named("MultiWorker", shard)
        job = config_of_job(type(self).__name__)
        strategy = preflight.form_cluster(job, devices, form_seconds, silence_seconds, name)
        self._all_reduce, self._compression = all_reduce, compression
        self._averaging = LocalSGD(every, average_optimizer) if sync == "average" else None
        self.steps_multiple = every
        rank = 0 if job is None else job.rank
        self._join(strategy, addresses_of(job), rank, pack_bytes, batch_dependent_layers, options)
        if shard is not None and self.num_replicas > 1:
            self.divides_state = self.num_workers > 1
            collective = CollectiveCommunicator(self.rank, self._hosts, lambda device: self._replicas, pack_bytes)
            communicator = collective if self.divides_state else LocalCommunicator()
            self._shards = OptimizerShards(self.job, communicator, strategy.extended.worker_devices)
            self.layout = dataclasses.replace(self.layout, shard="optimizer")

    @classmethod
    def of(cls, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> MultiWorker:
        """Wrap a `tf.distribute.MultiWorkerMirroredStrategy` in whose scope a model was built."""
        worker = cls.__new__(cls)
        job = tf_config.from_environment(os.environ)
        worker._all_reduce, worker._compression, worker._averaging = "auto", None, None
        worker._join(strategy, addresses_of(job), tf_distribute.worker_index(strategy), PACK_BYTES, "refuse", {})
        return worker

    def _join(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        addresses: tuple[str, ...],
        rank: int,
        pack_bytes: int,
        batch_dependent_layers: BatchDependentLayers,
        options: dict[str, str],
    ) -> None:
        """Set up the communication between the workers, whose options must be equal."""
        super().__init__(strategy, pack_bytes, batch_dependent_layers)
        self.devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        self._connect(addresses, rank, self.devices[0], {"number of devices": str(len(self.devices)), **options})
        self.layout = Layout(self.num_replicas, num_workers=self.num_workers)
        self._metrics = MetricSums(strategy, self._hosts, self.rank, self.num_replicas)
        tf_distribute.communicate_through(strategy, self._reduce)
        chosen = self._agreed_all_reduce(self._all_reduce, self.device_names)
        devices, num_replicas = strategy.extended.worker_devices, self.num_replicas
        order = order_of_members(devices, num_replicas, self.rank * len(devices))
        self._replicas = Group(devices, num_replicas, chosen, pack_bytes, self._hosts, order)
        self._num_rows: PerModel[float] = PerModel()
        # Processors of different models round matmuls differently: then every worker receives the reduced sum.
        processor = sufficient_factors.processor()
        differ = self.job.sum([processor != self.job.agree(processor)])[0]
        self._uses_factors = self.num_replicas > 1 and sufficient_factors.are_used(
            [device.device_type for device in self.devices], differ == 0, tf_determinism.is_enabled(), self._bandwidth
        )

    def _bandwidth(self) -> float:
        """Return the bytes per second of an all-reduce, as the chief measures it."""
        measured = sufficient_factors.bandwidth(self._replicas, self._num_local_replicas)
        return float(self.job.agree(measured))

    def _reduce(self, gradient: Any, replica: int) -> Any:
        """Sum a gradient over all replicas; concatenate the rows of indexed slices, of which there are few."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self._replicas.all_reduce(gradient, replica)
        rows = self._replicas.all_gather([gradient.values, gradient.indices], replica)
        return tf.IndexedSlices(*rows, gradient.dense_shape)

    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the rows of all replicas, which may have different numbers of them."""
        return self._replicas.all_gather([rows], local_replica_id())[0]

    @property
    def device_names(self) -> list[str]:
        """The devices of this worker."""
        return [f"{device.device_type}:{device.device_index}" for device in self.devices]

    def describe(self) -> str:
        """Return one line with the rank and the devices of this worker."""
        names = ", ".join(self.device_names)
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        sharded = ", optimizer state sharded" if self._shards is not None else ""
        of_all = f"MultiWorker over {workers}, {self.num_replicas} replicas{sharded}"
        return f"{of_all}; this is worker {self.rank} on {names}"

    def _distribute_shards(self, sharded: Sharded) -> Distributed:
        """Return the batches of this worker's shards, split into per-replica batches."""

        @tf.autograph.experimental.do_not_convert
        def split(rows: Any, num_rows: tf.Tensor) -> Any:
            """Split the local batch; a padding batch has the weight 0."""
            parts, sizes, example_weight, _ = split_into_parts(
                rows, data.num_rows(rows), self._num_local_replicas, slice(None)
            )
            is_some = num_rows > 0
            return parts, tf.where(is_some, sizes, 0), tf.where(is_some, example_weight, 0.0), None, None

        part = sharded.local_batches(self.rank, self.num_workers)
        return Distributed(part.map(split, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE), uneven_end=True)

    def num_examples(self, element: Any, distributed: Distributed) -> tf.Tensor:
        """Return the size of the global batch, an int64 scalar."""
        if not distributed.uneven_end:
            return super().num_examples(element, distributed)
        return self._hosts.all_reduce(tf.reduce_sum(tf.cast(element[1], tf.int64)))

    def has_more(self, upcoming: tf.experimental.Optional, distributed: Distributed) -> tf.Tensor:
        """Return whether any worker has examples in the upcoming element, a boolean scalar."""
        if not distributed.uneven_end:
            return super().has_more(upcoming, distributed)
        return self.num_examples(upcoming.get_value(), distributed) > 0

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Find out how replicas give the whole batch, by the chief's verdict, or refuse the model."""
        preflight.check_eager(model, self._num_local_replicas)
        if self._averaging is not None and objective.objectives_of(model):
            raise ValueError(
                f"sync='average' averages one optimizer's state, and {type(model).__name__} has objectives with "
                "optimizers of their own. Leave sync out."
            )
        super().study(model, batch, kind)
        (self._num_rows[model],) = self.job.sum([float(data.num_rows(batch))])

    def _engine(self, kind: str) -> Engine:
        # With local SGD a replica trains on its own examples, also in layers that mix them.
        return super()._engine(kind)._replace(accepts_mixing=self._averaging is not None and kind == "train")

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Return the chief's verdict, or what follows from those of all workers where they differ."""
        message = verdict.to_json().encode()
        if self.job.first(Verdict.of_json(self.job.broadcast(message).decode()) != verdict) is None:
            return verdict
        ranks = range(self.num_workers)
        chiefs, *others = (Verdict.of_json(self.job.broadcast(message, rank).decode()) for rank in ranks)
        return chiefs.merged(others)

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on the parts of a global batch; return the global loss, a scalar.

        Local SGD has no global loss: it returns 0, and the logs show whether the loss is finite.
        """
        if self._averaging is None:
            return super().train_step(model, batch)
        self._runs_of(model).train_locally(model, batch, self._apply)
        self._averaging.after_step(model, self._strategy, self._replicas)
        return tf.constant(0.0)

    def end_call(self, model: keras.Model) -> None:
        """Average the replicas' moving statistics, or with local SGD their weights."""
        if self._averaging is None:
            super().end_call(model)
        else:
            self._averaging.end_call(model, self._strategy, self._replicas)

    def _sum_gradients(
        self,
        model: keras.Model,
        gradients: Sequence[Any],
        forward: Any,
        example_weight: tf.Tensor,
        num_counted: tf.Tensor,
        number: int = 0,
        own_sums: Mapping[int, Callable[[], tf.Tensor]] | None = None,
    ) -> list[Any]:
        """Sum gradients over all replicas, those of large Dense kernels by all-gather of their sufficient factors."""
        num_rows, num_threads = int(self._num_rows[model]), sufficient_factors.num_threads()
        found = [
            sufficient_factors.sufficient_factors_of(gradient, num_rows, num_threads) if self._uses_factors else None
            for gradient in gradients
        ]
        by_factors = {index: pair for index, pair in enumerate(found) if pair is not None}
        others = [None if index in by_factors else gradient for index, gradient in enumerate(gradients)]
        products = sufficient_factors.products(
            self._replicas, local_replica_id(), list(by_factors.values()), forward[0]
        )
        own_sums = dict(zip(by_factors, products, strict=True))
        return super()._sum_gradients(model, others, forward, example_weight, num_counted, number, own_sums)

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch, on every worker."""
        *batch, _ = batch

        def gather(outputs: Any) -> Any:
            return all_gather_outputs(outputs, batch[2], batch[3], self.num_replicas)

        return self._runs_of(model).predict(model, batch, gather)[0]

    def metric_results(self, model: keras.Model) -> dict[str, tf.Tensor]:
        """Return the logs over the examples of all workers."""
        return self._metrics.results(model)

    def _gather(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Return the metric states of the replicas of all workers."""
        return self._metrics.all_gather(parts)

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`; the chief's first replica holds all of a sum over replicas."""
        if tf_distribute.is_summed_on_read(variable):
            self._metrics.assign_local_sum(
                variable, value if self.is_chief else np.zeros(variable.shape, variable.dtype)
            )
        else:
            super().assign(variable, value)
