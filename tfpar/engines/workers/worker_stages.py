"""The engine of `Hybrid` in a job: every worker runs its own stages, and gradients are summed over workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar import data
from tfpar.cluster import tf_config
from tfpar.engines.distributed import Distributed
from tfpar.engines.optimizer_shards import OptimizerShards
from tfpar.engines.replicas.per_replica_batches import per_replica_batches
from tfpar.engines.stages.stage_engine import Settings, StageEngine
from tfpar.engines.steps.batches_ahead import HOST, StepBatch
from tfpar.engines.workers.collectives import PACK_BYTES, AllReduce
from tfpar.engines.workers.shard_messages import CollectiveCommunicator
from tfpar.engines.workers.stage_sums import StageSums, place_of
from tfpar.engines.workers.worker import Worker
from tfpar.pipeline import schedule as schedules
from tfpar.pipeline.execution.other_workers import BatchSizes
from tfpar.pipeline.schedule.simulator import Span, Timeline


class WorkerStages(Worker, StageEngine):
    """The engine of a worker that runs replicas of a pipeline.

    Args:
        settings: Settings of the pipeline.
        schedule: Schedule of this worker's replicas.
        devices: Devices of this worker, by replica.
        config: The job and the rank of this process.
        strategy: TensorFlow's cluster, kept because its heartbeats end with it.
        all_reduce: Algorithm that sums gradients over workers.
        shard: `"optimizer"` to shard the optimizer state over the workers; None to replicate it.
    """

    def __init__(
        self,
        settings: Settings,
        schedule: schedules.Schedule,
        devices: list[str],
        config: tf_config.JobConfig,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        all_reduce: AllReduce,
        shard: Literal["optimizer"] | None,
    ) -> None:
        self._cluster = strategy
        own = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        grid = f"{schedule.num_replicas} x {schedule.num_stages} stages on {len(devices)} devices"
        facts = {"shard": str(shard), "grid": grid, "layout": str(settings.layout)}
        self._connect(config.addresses, config.rank, own[0], facts)
        chosen = self._agreed_all_reduce(all_reduce, devices)
        full_names = [device.to_string() for device in own]
        peers = StageSums(full_names, self.job.rank, self.job.num_workers, self._hosts, chosen)
        shards = None
        if shard is not None:
            communicator = CollectiveCommunicator(
                self.job.rank, self._hosts, lambda device: peers.group(place_of(device)), PACK_BYTES
            )
            shards, self.divides_state = OptimizerShards(self.job, communicator), True
        super().__init__(settings, schedule, devices, peers, shards=shards)
        self._planner.num_state_shards = self.job.num_workers if self.divides_state else 1

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Measure when each action of a step runs, on all workers, in one timeline of the replicas of all."""
        own = super().trace(model, batch)
        message = json.dumps([own.spans, own.step_seconds]).encode()
        received = [json.loads(self.job.broadcast(message, rank)) for rank in range(self.job.num_workers)]
        num_microbatches = self.schedule_of(model).num_microbatches
        spans = [
            span
            for rank, (rows, _) in enumerate(received)
            for span in _renumbered(rows, rank * num_microbatches, rank * own.num_devices)
        ]
        spans.sort(key=lambda span: span.begin_seconds)
        step_seconds = max(seconds for _, seconds in received)
        return Timeline(self.job.num_workers * own.num_devices, tuple(spans), step_seconds, ())

    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Return a dataset of `(local batch, num_counted, num_examples, digest)` for this worker."""
        if isinstance(dataset, data.Sharded):

            @tf.autograph.experimental.do_not_convert
            def counted(rows: Any, num_rows: tf.Tensor) -> Any:
                return rows, num_rows, None, None

            local = dataset.local_batches(self.job.rank, self.job.num_workers)
            elements = local.map(counted, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)

            def has_more(upcoming: tf.experimental.Optional) -> tf.Tensor:
                return self._global_size(upcoming.get_value()) > 0

            return Distributed(elements, _local_batch, self._global_size, has_more, uneven_end=True)

        digest = data.batch_digest(dataset)

        def split(batch: Any) -> Any:
            own, num_rows = slice(self.job.rank, self.job.rank + 1), data.num_rows(batch)
            batches = per_replica_batches(data.with_equal_rows(batch), num_rows, (1,) * self.job.num_workers, own)
            (local,), num_counted, _, num_examples = batches
            return local, tf.cast(num_counted[0], tf.int64), tf.cast(num_examples, tf.int64), digest(batch)

        elements = data.map_batches(dataset, split).prefetch(tf.data.AUTOTUNE)
        unknown_end = data.has_unknown_size(dataset)
        return self._between_workers(Distributed(elements, _local_batch, self._global_size, unknown_end=unknown_end))

    def _global_size(self, element: Any) -> tf.Tensor:
        num_counted, num_examples = element[1:3]
        return self._hosts.all_reduce(num_counted) if num_examples is None else num_examples

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the element without its digest, each tensor for the devices of the stages that read it."""
        batch, *counts, _ = element
        staged, devices = self._steps[model].staged(batch, counts[0])
        return StepBatch((staged, *counts), [*devices, *(HOST for _ in tf.nest.flatten(counts))])

    def _local(self, element: Any) -> tuple[Any, BatchSizes | None]:
        batch, num_counted, *_ = element
        return batch, BatchSizes(num_counted, self._global_size(element))

    def _local_alone(self, element: Any) -> tuple[Any, BatchSizes | None]:
        batch, num_counted, *_ = element
        return batch, BatchSizes(num_counted, num_counted)


def _local_batch(element: Any) -> Any:
    return element[0]


def _renumbered(rows: Sequence[Any], first_microbatch: int, first_device: int) -> Iterator[Span]:
    """Yield the spans of a worker, with its micro-batches and devices numbered among those of all workers."""
    for (kind, stage, microbatch), device, begin_seconds, end_seconds in rows:
        action = schedules.Action(kind, stage, microbatch + first_microbatch)
        yield Span(action, device + first_device, begin_seconds, end_seconds)
