"""The engine of `MultiWorker`: every process runs the same step, which sums gradients over all workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_determinism, tf_distribute
from tfpar.data import Sharded
from tfpar.engines.distributed import Distributed
from tfpar.engines.optimizer_shards import LocalCommunicator, OptimizerShards
from tfpar.engines.replicas.gradient_sums import ReplicaGradients
from tfpar.engines.replicas.per_replica_batches import per_replica_batches
from tfpar.engines.replicas.replica_engine import ReplicaEngine, local_batch
from tfpar.engines.workers import sufficient_factors
from tfpar.engines.workers.collectives import PACK_BYTES, AllReduce, Group, order_of_members
from tfpar.engines.workers.local_sgd import LocalSGD
from tfpar.engines.workers.metric_sums import MetricSums
from tfpar.engines.workers.outputs import all_gather_outputs
from tfpar.engines.workers.shard_messages import CollectiveCommunicator
from tfpar.engines.workers.worker import Worker
from tfpar.layout import OwnSteps, Shard, shares_of_replicas
from tfpar.per_model import PerModel
from tfpar.recomputation.choice import Recompute
from tfpar.reduction import objective, own_step
from tfpar.reduction.replicas import local_replica_id
from tfpar.reduction.verdict import Verdict
from tfpar.study.outputs import BatchDependentLayers
from tfpar.study.study import Abilities
from tfpar.workers import preflight

Compression = Literal["bfloat16"]


class Settings(NamedTuple):
    """The arguments of `MultiWorker` that do not concern devices or time limits."""

    all_reduce: AllReduce = "auto"
    pack_bytes: int = PACK_BYTES
    compression: Compression | None = None
    sync: Literal["step", "average"] = "step"
    every: int = 1
    average_optimizer: bool = True
    batch_dependent_layers: BatchDependentLayers = "refuse"
    shard: Shard | None = None
    batch_shares: tuple[int, ...] | None = None
    own_steps: OwnSteps = "exact"
    recompute: Recompute = False


class WorkerReplicas(Worker, ReplicaEngine):
    """The engine of `MultiWorker`, on a `tf.distribute.MultiWorkerMirroredStrategy`.

    Args:
        strategy: The `tf.distribute` strategy.
        addresses: Addresses of all workers, by rank.
        rank: Rank of this worker.
        settings: Settings, which must be equal on all workers.

    Attributes:
        num_devices: Number of devices of each worker.
    """

    # Between two calls the workers sum metrics and vote on the next call, which takes milliseconds.
    seconds_per_call = 0.5

    def __init__(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        addresses: tuple[str, ...],
        rank: int,
        settings: Settings,
    ) -> None:
        pack_bytes = settings.pack_bytes
        super().__init__(strategy, pack_bytes, settings.batch_dependent_layers, recompute=settings.recompute)
        self._compression, self.steps_multiple = settings.compression, settings.every
        self.averages_own_steps = settings.own_steps == "average"
        averages = settings.sync == "average"
        self._averaging = LocalSGD(settings.every, settings.average_optimizer) if averages else None
        self.devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        facts = {name: str(value) for name, value in settings._asdict().items() if name != "all_reduce"}
        self._connect(addresses, rank, self.devices[0], facts)
        self._number_replicas(settings.batch_shares)
        self._metrics = MetricSums(strategy, self._hosts, self.first_replica, self.num_replicas)
        tf_distribute.communicate_through(strategy, self._reduce)
        chosen = self._agreed_all_reduce(settings.all_reduce, self.device_names)
        devices, num_replicas = strategy.extended.worker_devices, self.num_replicas
        order = order_of_members(devices, num_replicas, self.first_replica)
        first = None if len({*self.num_devices}) == 1 else self.first_replica
        self._replicas = Group(devices, num_replicas, chosen, pack_bytes, self._hosts, order, first)
        self._num_rows: PerModel[float] = PerModel()
        self._uses_factors = self._may_use_factors()
        self.shard = settings.shard if num_replicas > 1 else None
        if self.shard is not None:
            self.divides_state = self.job.num_workers > 1
            collective = CollectiveCommunicator(
                self.first_replica, self._hosts, lambda device: self._replicas, pack_bytes
            )
            communicator = collective if self.divides_state else LocalCommunicator()
            self._shards = OptimizerShards(self.job, communicator, devices, self.num_devices)

    def _number_replicas(self, batch_shares: Sequence[int] | None) -> None:
        """Assign numbers to the replicas of all workers, which may have different numbers of devices."""
        rank, here = self.job.rank, self._num_local_replicas
        counts = self.job.sum([here if rank == other else 0 for other in range(self.job.num_workers)])
        self.num_devices = [int(count) for count in counts]
        self.num_replicas, self.first_replica = sum(self.num_devices), sum(self.num_devices[:rank])
        self._shares_of_batch = shares_of_replicas(batch_shares, self.num_devices)
        if len({*self.num_devices}) > 1:
            tf_distribute.number_replicas(self._strategy, self.first_replica, self.num_replicas)

    def _may_use_factors(self) -> bool:
        """Return True if gradients of Dense kernels may be sent as sufficient factors; equal on all workers."""
        # Different processors round matmuls differently.
        processor = sufficient_factors.processor()
        differ = self.job.sum([processor != self.job.agree(processor)])[0]
        return self.num_replicas > 1 and sufficient_factors.are_used(
            [device.device_type for device in self.devices], differ == 0, tf_determinism.is_enabled(), self._bandwidth
        )

    def _bandwidth(self) -> float:
        """Return the bytes per second of an all-reduce, as the chief measures it."""
        measured = sufficient_factors.bandwidth(self._replicas, self._num_local_replicas)
        return float(self.job.agree(measured))

    def _reduce(self, gradient: Any, replica: int) -> Any:
        """Sum a gradient over all replicas; gather the rows of `tf.IndexedSlices`, which are few."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self._replicas.all_reduce(gradient, replica)
        rows = self._replicas.all_gather([gradient.values, gradient.indices], replica)
        return tf.IndexedSlices(*rows, gradient.dense_shape)

    def _all_gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the rows of all replicas, whose number may differ between replicas."""
        return self._replicas.all_gather([rows], local_replica_id())[0]

    @property
    def device_names(self) -> list[str]:
        """Short names of this worker's devices."""
        return [f"{device.device_type}:{device.device_index}" for device in self.devices]

    def distribute(self, dataset: tf.data.Dataset | Sharded) -> Distributed:
        """Return the per-replica batches of this worker, from global batches or from its own shards."""
        if not isinstance(dataset, Sharded):
            return self._between_workers(super().distribute(dataset))

        @tf.autograph.experimental.do_not_convert
        def split(rows: Any, num_rows: tf.Tensor) -> Any:
            """Split the local batch; padding batches have the weight 0."""
            batches, sizes, example_weight, _ = per_replica_batches(
                rows, data.num_rows(rows), self.shares[self._local], slice(None)
            )
            has_rows = num_rows > 0
            return batches, tf.where(has_rows, sizes, 0), tf.where(has_rows, example_weight, 0.0), None, None

        local = dataset.local_batches(self.job.rank, self.job.num_workers, self._shares_of_workers())
        elements = local.map(split, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)

        def global_size(element: Any) -> tf.Tensor:
            return self._hosts.all_reduce(tf.reduce_sum(tf.cast(element[1], tf.int64)))

        def has_more(upcoming: tf.experimental.Optional) -> tf.Tensor:
            return global_size(upcoming.get_value()) > 0

        spec = elements.element_spec[0][0]
        return Distributed(elements, local_batch, global_size, has_more, uneven_end=True, spec=spec)

    def _shares_of_workers(self) -> list[int]:
        ends = itertools.accumulate(self.num_devices)
        return [sum(self.shares[end - number : end]) for end, number in zip(ends, self.num_devices, strict=True)]

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Study how results of replicas combine into those of the whole batch, alike on all workers."""
        preflight.check_eager(model, max(self.num_devices))
        if self._averaging is not None and objective.objectives_of(model):
            raise ValueError(
                f"sync='average' averages one optimizer's state, and {type(model).__name__} has objectives with "
                "optimizers of their own. Leave sync out."
            )
        if self._averaging is not None and own_step.overrides(model, kind) and kind != "predict":
            raise ValueError(
                f"sync='average' averages weights between its own steps, and {type(model).__name__} overrides "
                f"{own_step.METHODS[kind]}. Leave sync out."
            )
        super().study(model, batch, kind)
        (self._num_rows[model],) = self.job.sum([float(data.num_rows(batch))])

    def _abilities(self, kind: str) -> Abilities:
        # With local SGD, batch-dependent layers train on the per-replica batch.
        return super()._abilities(kind)._replace(accepts_mixing=self._averaging is not None and kind == "train")

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Return the chief's verdict, merged with those of the other workers if any differs."""
        message = verdict.to_json().encode()
        if self.job.first(Verdict.of_json(self.job.broadcast(message).decode()) != verdict) is None:
            return verdict
        ranks = range(self.job.num_workers)
        chiefs, *others = (Verdict.of_json(self.job.broadcast(message, rank).decode()) for rank in ranks)
        return chiefs.merged(others)

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Run one optimizer update on a global batch; return the global loss, a scalar.

        Local SGD has no global loss and returns 0; the logs show whether the loss is finite.
        """
        if self._averaging is None:
            return super().train_step(model, batch)
        self._runs_of(model).train_locally(model, batch, self._apply)
        self._averaging.after_step(model, self._strategy, self._replicas)
        return tf.constant(0.0)

    def _average(self, model: keras.Model) -> None:
        """Average the moving statistics of the replicas; with local SGD, their weights."""
        if self._averaging is None:
            super()._average(model)
        else:
            self._averaging.end_call(model, self._strategy, self._replicas)

    def _sum_gradients(self, model: keras.Model, gradients: ReplicaGradients) -> list[Any]:
        """Sum gradients over all replicas, those of large Dense kernels by their sufficient factors."""
        if not (self._uses_factors and gradients.forward):
            return super()._sum_gradients(model, gradients)
        num_rows, num_threads = int(self._num_rows[model]), sufficient_factors.num_threads()
        factors = {
            index: pair
            for index, gradient in enumerate(gradients.values)
            if (pair := sufficient_factors.sufficient_factors_of(gradient, num_rows, num_threads)) is not None
        }
        others = [None if index in factors else gradient for index, gradient in enumerate(gradients.values)]
        products = sufficient_factors.products(
            self._replicas, local_replica_id(), list(factors.values()), gradients.forward[0]
        )
        own_sums = dict(zip(factors, products, strict=True))
        return super()._sum_gradients(model, gradients._replace(values=others, own_sums=own_sums))

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the outputs for the global batch, `[batch, ...]` each, on every worker."""
        *batch, _ = batch

        def gather(outputs: Any) -> Any:
            return all_gather_outputs(outputs, batch[2], batch[3], self.shares)

        return self._runs_of(model).predict(model, batch, gather)[0]

    def _metric_results(self, model: keras.Model, kind: str) -> dict[str, tf.Tensor]:
        return self._metrics.results(model, kind)

    def _all_gather_states(self, states: list[np.ndarray]) -> list[np.ndarray]:
        """Return the metric states of the replicas of all workers."""
        return self._metrics.all_gather(states)

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`; of a sum, the chief's first replica holds all."""
        if tf_distribute.is_summed_on_read(variable):
            self._metrics.assign_local_sum(
                variable, value if self.job.is_chief else np.zeros(variable.shape, variable.dtype)
            )
        else:
            super().assign(variable, value)
