"""Replicas of a pipeline: a grid of replicas and stages on the devices of this machine, or of every worker of a job."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_divided_state
from tfpar.cluster import tf_config
from tfpar.job import Job
from tfpar.layout import check_count, check_shard
from tfpar.messages import keyword_arguments
from tfpar.messages.received import excerpt
from tfpar.pipeline.execution.peers import LocalPart
from tfpar.pipeline.execution.steps import Apply
from tfpar.pipeline.schedule.simulator import Timeline
from tfpar.strategies import grid_devices, remote_devices
from tfpar.strategies.batch_parts import split_into_parts
from tfpar.strategies.batches_ahead import HOST, StepBatch
from tfpar.strategies.distributed import Distributed
from tfpar.strategies.multi_worker import preflight, timelines
from tfpar.strategies.multi_worker.collectives import AllReduce
from tfpar.strategies.multi_worker.stage_shards import StageShards
from tfpar.strategies.multi_worker.stage_sums import StageSums
from tfpar.strategies.multi_worker.worker import Worker, config_of_job
from tfpar.strategies.pipeline import Pipeline
from tfpar.strategies.staged import Staged
from tfpar.strategies.tensor_parallel import TensorParallel


class Hybrid(Worker, Staged):
    """Train a model in stages on several replicas of a pipeline, equal to one device.

                   stage 0     stage 1
        replica 0  device 0 ─► device 1     the first half of every global batch
        replica 1  device 2 ─► device 3     the second half

    Every global batch is divided over the replicas, and each runs the schedule of the pipeline on the micro-batches of
    its share. The gradients of a stage are summed over the replicas as soon as its last backward pass has run on each,
    and one update follows. Each weight belongs to one device of the process, which holds its optimizer state and
    updates it; the other replicas copy the weight at the beginning of a step.

    In a job of several workers (TF_CONFIG or Slurm, as for `MultiWorker`) every worker has such a grid on its own
    devices. The gradients of each stage are all-reduced over the workers.

    Of a pipeline with `across_workers=True`, one grid is on the devices of all workers, as many of each: the first
    process runs the steps. Each worker has the stages of a replica, or the replicas of a stage, whichever lets fewer
    bytes cross between workers; `preview` says which.

    Of a pipeline with `num_shards`, the grid has replicas x stages x shards; the devices of a stage are consecutive.

    Of a `TensorParallel`, each replica has the shards of every layer on its own devices, and a part of every global
    batch as its one micro-batch.

    Args:
        pipeline: The pipeline of each replica; `num_microbatches` are those of one replica. Or a `TensorParallel`.
        num_replicas: Number of replicas in each process; with `across_workers`, in all processes together.
        devices: Device names, those of the first replica first, with `across_workers` after the rank of their worker,
            such as `"1/GPU:0"`; None takes as many as the grid needs.
        all_reduce: How gradients are summed over workers: `"ring"`, on GPUs `"nccl"`, or `"auto"`.
        form_seconds: The time limit for all workers to connect.
        shard: `"optimizer"` divides the optimizer's state of each stage over the workers too; None divides it over the
            replicas of a process only, which has no cost.
        silence_seconds: The time without a heartbeat after which a worker counts as failed. A pipeline with
            `across_workers` has both time limits of its own.

    Raises:
        TypeError: If `pipeline` is neither a `Pipeline` nor a `TensorParallel`.
        ValueError: If the grid does not fit the devices, or TF_CONFIG is malformed.
        RuntimeError: If there are several workers, and TensorFlow has started already.
        TimeoutError: If a worker does not connect in time; the message names its address.

    Example:
        >>> tfpar.use_logical_cpus(4)
        >>> strategy = tfpar.Hybrid(tfpar.Pipeline(num_stages=2, num_microbatches=8), num_replicas=2)
        >>> trainer = tfpar.Trainer(build_model, strategy)
    """

    # The owners of weights among several workers with `shard="optimizer"`.
    _shards: StageShards | None = None

    @keyword_arguments.named
    def __init__(
        self,
        pipeline: Pipeline | TensorParallel,
        num_replicas: int = 1,
        devices: Sequence[str] | None = None,
        *,
        all_reduce: AllReduce = "auto",
        shard: Literal["optimizer"] | None = None,
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        _check(pipeline, num_replicas)
        check_shard(shard, ("optimizer",))
        preflight.check_options(all_reduce, None, None, form_seconds, silence_seconds)
        self.layout = dataclasses.replace(pipeline.layout, num_replicas=num_replicas, shard=shard)
        schedule = pipeline.schedule.replicated(num_replicas)
        given = pipeline.given_devices if devices is None else devices
        self._lent, self._watch = pipeline.lent, pipeline.watch
        self.has_schedule, self.noun = pipeline.has_schedule, pipeline.noun
        if self._lent is not None:
            self._check_all_reduce(all_reduce)
            orders = grid_devices.across_workers(num_replicas, pipeline.schedule.num_devices, self._lent, given)
            self.job = Job(self._lent.addresses[:1], reported=None if self._watch is None else self._watch.reported)
            super().__init__(pipeline.settings, schedule, orders[0], other_orders=orders[1:])
            return
        job = config_of_job(type(self).__name__)
        is_alone = job is None or job.num_workers == 1
        per_replica = pipeline.schedule.num_devices * pipeline.settings.num_shards
        names = grid_devices.on_this_machine(num_replicas, per_replica, given, starts=is_alone)
        peers = None
        if job is not None and not is_alone:
            self.layout = dataclasses.replace(
                self.layout, num_replicas=num_replicas * job.num_workers, num_workers=job.num_workers
            )
            # Kept, since TensorFlow's cluster and the heartbeats of the workers end with it.
            name = preflight.named("Hybrid", shard)
            self._cluster = preflight.form_cluster(job, names, form_seconds, silence_seconds, name)
            grid = f"{num_replicas} x {schedule.num_stages} stages on {len(names)} devices"
            facts = {"shard": str(shard), "grid": grid, "layout": str(pipeline.settings.layout)}
            peers = self._meet(job, names, facts, all_reduce)
            if shard is not None:
                self._shards, self.divides_state = StageShards(self, peers, self._hosts), True
        super().__init__(pipeline.settings, schedule, names, peers)
        self._planner.num_state_parts = self.num_workers if self.divides_state else 1

    @staticmethod
    def _check_all_reduce(all_reduce: AllReduce) -> None:
        if all_reduce != "auto":
            raise ValueError(
                f"all_reduce is for workers with whole pipelines, received {all_reduce!r} with across_workers=True: "
                "the gradients of a weight are added on its device. Leave it out."
            )

    def _meet(
        self, job: tf_config.JobConfig, names: list[str], facts: dict[str, str], all_reduce: AllReduce
    ) -> StageSums:
        """Set up the communication between the workers, and refuse those that differ in a fact of the grid."""
        own = [tf.DeviceSpec.from_string(name) for name in self._cluster.extended.worker_devices]
        self._connect(job.addresses, job.rank, own[0], facts)
        chosen = self._agreed_all_reduce(all_reduce, names)
        full_names = [device.to_string() for device in own]
        return StageSums(full_names, self.rank, self.num_workers, self._hosts, chosen)

    def describe(self) -> str:
        """Say in one line which devices run what."""
        if self._lent is not None:
            return f"Hybrid of {self.layout.describe(self._lent_devices())}"
        of_worker = dataclasses.replace(self.layout, num_replicas=self.num_replicas, num_workers=1)
        grid = of_worker.describe(of_worker.labels(self.devices))
        if self.num_workers == 1:
            return f"Hybrid of {grid}"
        return f"Hybrid over {self.num_workers} workers; this is worker {self.rank}, {grid}"

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Divide the model into stages, and the slots of an optimizer that was built elsewhere over the workers."""
        super().place(model, batch, training)
        if self._shards is not None and training:
            self._shards.place_slots(model)

    def creating_slots(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return the context in which optimizers create their slots: with shards, each on one worker."""
        return super().creating_slots(model) if self._shards is None else self._shards.creating_slots(model)

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Find out how micro-batches give the whole batch; with shards, compare the owners of the workers."""
        if self._shards is not None and kind == "train":
            self._shards.prepare(model)
        super().study(model, batch, kind)

    def _update_of(self, model: keras.Model) -> Apply | None:
        if self._shards is None:
            return super()._update_of(model)
        shards = self._shards
        return lambda gradients, weights: shards.apply(model, model.optimizer, gradients, weights)

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights with their moving average, if the optimizer has one."""
        if self._shards is None:
            super().finalize_weights(model)
        else:
            self._shards.finalize(model, model.optimizer)

    def whole_state(self, model: keras.Model, folder: Path | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the chief reads the slots of all workers, which must all enter it."""
        return super().whole_state(model, folder) if self._shards is None else self._shards.whole_state(model, folder)

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`; a slot of another worker is set there."""
        if not keras_divided_state.is_elsewhere(variable):
            super().assign(variable, value)

    def _lent_devices(self) -> list[str]:
        """Return the devices of each worker: their order in the grid depends on the model."""
        assert self._lent is not None
        used = [[device for device in devices if device in self.devices] for devices in self._lent.of_workers]
        names = [
            [remote_devices.label(device).rpartition(" ")[::2] for device in devices] for devices in used if devices
        ]
        return [f"{of_one[0][0]} {' '.join(device for _, device in of_one)}" for of_one in names]

    @property
    def device_names(self) -> list[str]:
        """The devices of this process, or of all workers with their rank."""
        return list(map(remote_devices.label, self.devices)) if self._lent is not None else super().device_names

    def trace(self, model: keras.Model, batch: Any) -> Timeline:
        """Measure when each action of a step runs, on every worker; all workers must call it.

        Args:
            model: A model that `Trainer.build` or a call of `fit` has prepared.
            batch: The local batch, `(inputs, targets, sample_weight)` as far as given.

        Returns:
            The timeline of all replicas, those of worker 0 first.

        Raises:
            ValueError: If the model was not prepared since it was last compiled.
        """
        own = super().trace(model, batch)
        if self.num_workers == 1:
            return own
        message = timelines.to_bytes(own)
        found = [self.job.broadcast(message, rank) for rank in range(self.num_workers)]
        return timelines.joined(list(map(timelines.from_bytes, found)), self.schedule_of(model).num_microbatches)

    def distribute(self, dataset: tf.data.Dataset | data.Sharded) -> Distributed:
        """Return a dataset of `(local batch, num_counted, num_examples, digest)`; in one process, of global batches."""
        if self.num_workers == 1:
            return super().distribute(dataset)
        if isinstance(dataset, data.Sharded):

            @tf.autograph.experimental.do_not_convert
            def counted(rows: Any, num_rows: tf.Tensor) -> Any:
                return rows, num_rows, None, None

            local = dataset.local_batches(self.rank, self.num_workers)
            return Distributed(local.map(counted, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE), uneven_end=True)

        digest = data.batch_digest(dataset)

        def split(batch: Any) -> Any:
            own, num_rows = slice(self.rank, self.rank + 1), data.num_rows(batch)
            parts = split_into_parts(data.with_equal_rows(batch), num_rows, self.num_workers, own)
            (part,), num_counted, _, num_examples = parts
            return part, tf.cast(num_counted[0], tf.int64), tf.cast(num_examples, tf.int64), digest(batch)

        elements = data.map_batches(dataset, split).prefetch(tf.data.AUTOTUNE)
        return Distributed(elements, unknown_end=data.has_unknown_size(dataset))

    def local_batch(self, element: Any) -> Any:
        """Return the local batch of an element."""
        return element if self.num_workers == 1 else element[0]

    def num_examples(self, element: Any, distributed: Distributed) -> tf.Tensor:
        """Return the size of the global batch, an int64 scalar."""
        return super().num_examples(element, distributed) if self.num_workers == 1 else self._size_of(element)

    def _size_of(self, element: Any) -> tf.Tensor:
        num_counted, num_examples = element[1:3]
        return self._hosts.all_reduce(num_counted) if num_examples is None else num_examples

    def has_more(self, upcoming: tf.experimental.Optional, distributed: Distributed) -> tf.Tensor:
        """Return whether any worker has examples in the upcoming element, a boolean scalar."""
        if not distributed.uneven_end:
            return super().has_more(upcoming, distributed)
        return self._size_of(upcoming.get_value()) > 0

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the local batch without its digest, each tensor for the devices of the stages that take it."""
        if self.num_workers == 1:
            return super().step_batch(model, element)
        batch, *counts, _ = element
        staged, devices = self._steps[model].staged(batch, counts[0])
        return StepBatch((staged, *counts), [*devices, *(HOST for _ in tf.nest.flatten(counts))])

    def _local(self, element: Any) -> tuple[Any, LocalPart | None]:
        if self.num_workers == 1:
            return element, None
        batch, num_counted, *_ = element
        return batch, LocalPart(num_counted, self._size_of(element))

    def _local_alone(self, element: Any) -> tuple[Any, LocalPart | None]:
        if self.num_workers == 1:
            return element, None
        batch, num_counted, *_ = element
        return batch, LocalPart(num_counted, num_counted)


def _check(pipeline: Pipeline | TensorParallel, num_replicas: int) -> None:
    if not isinstance(pipeline, Pipeline | TensorParallel):
        raise TypeError(
            f"pipeline must be a tfpar.Pipeline or tfpar.TensorParallel, received {excerpt(repr(pipeline))}. Write "
            "tfpar.Hybrid(tfpar.Pipeline(num_stages=2, num_microbatches=8), num_replicas=2)."
        )
    check_count("num_replicas", num_replicas)
    if pipeline.given_devices is not None and num_replicas > 1:
        raise ValueError(
            f"The devices of all replicas are an argument of Hybrid, received devices={pipeline.given_devices} of its "
            "first argument. Leave them out there, and give devices to Hybrid."
        )
