"""Data parallelism over several processes, on one machine or on many: the workers of a TF_CONFIG job."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_model
from tfpar.cluster import tf_config
from tfpar.data import Sharded
from tfpar.messages import keyword_arguments
from tfpar.per_model import PerModel
from tfpar.reduction import metric_logs, objective
from tfpar.reduction.replicas import local_replica_id
from tfpar.strategies import batch_dependence as mixings
from tfpar.strategies.base import Distributed
from tfpar.strategies.batch_parts import split_into_parts
from tfpar.strategies.data_parallel import DataParallel
from tfpar.strategies.multi_worker import preflight, sufficient_factors
from tfpar.strategies.multi_worker.collectives import PIECE_BYTES, AllReduce, Group
from tfpar.strategies.multi_worker.consensus import Agreement
from tfpar.strategies.multi_worker.local_sgd import LocalSGD
from tfpar.strategies.replica_states import summed_variables

Compression = Literal["bfloat16"]


class MultiWorker(DataParallel):
    """Train in several processes with `tf.distribute.MultiWorkerMirroredStrategy`, equal to one device.

    Every worker runs the same program. The variable TF_CONFIG holds the addresses of all workers and the rank of this
    one; `python -m tfpar.launch` and Kubeflow set it, and under Slurm's `srun` Slurm's own variables replace it.
    Without it the job has one worker. The chief, rank 0, decides for all workers and writes the files; its weights are
    broadcast before the first step.

    Args:
        devices: This worker's devices, such as `["GPU:0"]`; None for all GPUs, or else all logical CPUs. Every worker
            has the same number of them.
        all_reduce: How gradients are summed: `"ring"`, on GPUs `"nccl"`, or `"auto"` for TensorFlow's choice.
        pack_bytes: Small gradients are sent together in packs of up to this many bytes, larger ones in slices of that
            size; None for 4 MiB, which was measured to be fast.
        compression: `"bfloat16"` rounds gradients to 8 bits of precision for the all-reduce, which halves its bytes;
            None keeps their type.
        sync: `"step"` sums the gradients of every step, with one device's result; with `"average"` every replica
            updates its own weights, and their weights are averaged (see `tfpar.strategies.multi_worker.local_sgd`).
        every: With `sync="average"`, the steps from one average to the next.
        average_optimizer: With `sync="average"`, whether the optimizer's moments are averaged too; otherwise each
            replica keeps its own, and a resumed run begins with the chief's.
        batch_dependent_layers: How a layer is treated in which examples depend on each other: `"refuse"` it before the
            first step, or `"gather"` the batch, so that every replica computes the layer on all of it.
        form_seconds: How long to wait for all workers to appear.
        silence_seconds: After how long without a sign of life a worker counts as failed.

    Raises:
        ValueError: If TF_CONFIG is malformed, or this process is an evaluator, or an option is out of range.
        RuntimeError: If TensorFlow has started already.
        TimeoutError: If a worker does not appear in time; the message names its address.

    Example:
        >>> strategy = tfpar.MultiWorker()  # right after the imports
        >>> trainer = tfpar.Trainer(build_model, strategy, seed=0)
        >>> trainer.fit(dataset, epochs=5)
    """

    # Between two calls the workers add up metrics and agree on what comes next, which takes milliseconds.
    seconds_per_call = 0.5

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
        batch_dependent_layers: mixings.BatchDependentLayers = "refuse",
        form_seconds: float = 300.0,
        silence_seconds: float = 30.0,
    ) -> None:
        mixings.check_choice(batch_dependent_layers)
        preflight.check_options(all_reduce, pack_bytes, compression, form_seconds, silence_seconds)
        preflight.check_sync(sync, every, average_optimizer, compression)
        job = tf_config.from_environment(os.environ)
        if job is not None and job.role == "evaluator":
            raise ValueError(
                "MultiWorker trains with the chief and the workers, and TF_CONFIG makes this process an evaluator. "
                "Train nothing here: python -m tfpar.train evaluates the chief's checkpoints in such a process."
            )
        self.addresses = job.addresses if job is not None else ("localhost:0",)
        self.num_workers = len(self.addresses)
        self.rank = 0 if job is None else job.rank
        strategy = preflight.form_cluster(job, devices, form_seconds, silence_seconds)
        self._all_reduce, self._compression = all_reduce, compression
        self._averaging = LocalSGD(every, average_optimizer) if sync == "average" else None
        self.steps_multiple = every
        self._join(strategy, PIECE_BYTES if pack_bytes is None else pack_bytes, batch_dependent_layers)

    @classmethod
    def of(cls, strategy: tf.distribute.MultiWorkerMirroredStrategy) -> MultiWorker:
        """Wrap a `tf.distribute.MultiWorkerMirroredStrategy` in whose scope a model was built."""
        worker = cls.__new__(cls)
        job = tf_config.from_environment(os.environ)
        worker.addresses = job.addresses if job is not None else ("localhost:0",)
        worker.num_workers, worker.rank = len(worker.addresses), keras_model.worker_index(strategy)
        worker._all_reduce, worker._compression, worker._averaging = "auto", None, None
        worker._join(strategy, PIECE_BYTES)
        return worker

    def _join(
        self,
        strategy: tf.distribute.MultiWorkerMirroredStrategy,
        pack_bytes: int,
        batch_dependent_layers: mixings.BatchDependentLayers = "refuse",
    ) -> None:
        """Set up the communication between the workers."""
        super().__init__(strategy, pack_bytes, batch_dependent_layers)
        self.devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        self._replicas = Group(strategy.extended.worker_devices, self.num_replicas, self._all_reduce, pack_bytes)
        host = self.devices[0].replace(device_type="CPU", device_index=0).to_string()
        self._hosts = Group([host], self.num_workers)
        self._agreement = Agreement(self._hosts, self.rank, self.num_workers)
        keras_model.communicate_through(strategy, self._reduce)
        self.require_equal(preflight.versions())
        self._num_rows: PerModel[float] = PerModel()
        # Unlike processors round products differently: there all must receive one sum instead of computing it.
        processor = sufficient_factors.processor()
        self._alike = self.all_reduce_sum([processor != self.broadcast(processor.encode()).decode()])[0] == 0

    def require_equal(self, facts: dict[str, str]) -> None:
        """Refuse to train with workers that differ in a fact, such as a version; all workers must ask.

        Raises:
            ValueError: If a worker's text is not the chief's; on every worker, with the first line that differs.
        """
        chiefs = json.loads(self.broadcast(json.dumps(facts).encode()))
        rank = self._agreement.first(facts != chiefs)
        if rank is None:
            return
        theirs = json.loads(self._agreement.message_of(rank, json.dumps(facts).encode()))
        raise ValueError(
            f"All workers must be alike, and worker {rank} ({self.addresses[rank]}) differs from the chief in "
            f"{'; '.join(preflight.differences(chiefs, theirs))}. Start all of them with the same command, the same "
            "files and the same packages."
        )

    def _reduce(self, gradient: Any, replica: int) -> Any:
        """Sum over all replicas; rows of an embedding are put together instead, as few of them are there."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self._replicas.all_reduce(gradient, replica)
        values = self._replicas.all_gather(gradient.values, replica)
        return tf.IndexedSlices(values, self._replicas.all_gather(gradient.indices, replica), gradient.dense_shape)

    @property
    def device_names(self) -> list[str]:
        """The devices of this worker."""
        return [f"{device.device_type}:{device.device_index}" for device in self.devices]

    def describe(self) -> str:
        """Say in one line which worker this is and what it holds."""
        names = ", ".join(self.device_names)
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return f"MultiWorker over {workers}, {self.num_replicas} replicas; this is worker {self.rank} on {names}"

    def _distribute_shards(self, sharded: Sharded) -> Distributed:
        """Let every worker read its own shards only."""

        @tf.autograph.experimental.do_not_convert
        def split(rows: Any, num_rows: tf.Tensor) -> Any:
            """Cut this worker's rows; a stand-in for none counts nothing."""
            parts, sizes, share, _ = split_into_parts(rows, data.num_rows(rows), self._num_local_replicas, slice(None))
            is_some = num_rows > 0
            return parts, tf.where(is_some, sizes, 0), tf.where(is_some, share, 0.0), None

        part = sharded.part(self.rank, self.num_workers)
        return Distributed(part.map(split, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE), uneven_end=True)

    def num_examples(self, element: Any, distributed: Distributed) -> tf.Tensor:
        """Return the size of the global batch, an int64 scalar."""
        if not distributed.uneven_end:
            return super().num_examples(element, distributed)
        _, counted, _, _ = element
        return self._hosts.all_reduce(tf.reduce_sum(tf.cast(counted, tf.int64)))

    def has_more(self, upcoming: tf.experimental.Optional, distributed: Distributed) -> tf.Tensor:
        """Say whether any worker has examples in the upcoming element, a boolean scalar."""
        if not distributed.uneven_end:
            return super().has_more(upcoming, distributed)
        return self.num_examples(upcoming.get_value(), distributed) > 0

    def prepare(self, model: keras.Model, batch: Any) -> None:
        """Refuse what replicas would silently compute differently; the chief finds out how added losses divide.

        Raises:
            ValueError: If a loss, or a loss added by a layer, cannot be divided over replicas.
        """
        if self._averaging is not None and objective.objectives_of(model):
            raise ValueError(
                f"sync='average' averages one optimizer's state, and {type(model).__name__} has objectives with "
                "optimizers of their own. Leave sync out."
            )
        super().prepare(model, batch)
        (self._num_rows[model],) = self.all_reduce_sum([float(data.num_rows(batch))])
        self._take_over_from_chief(model)

    def prepare_loss(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Let the chief find out how what an overridden `compute_loss` returns divides over replicas."""
        super().prepare_loss(model, batch, training)
        if keras_model.overridden(model, "compute_loss"):
            self._take_over_from_chief(model)

    def _find_kinds(self, model: keras.Model, batch: Any) -> None:
        if self._averaging is None:  # else each replica applies its own gradients
            super()._find_kinds(model, batch)

    def _take_over_from_chief(self, model: keras.Model) -> None:
        if model in self._divisions:
            division = self._divisions[model]
            division.take_over(self.broadcast(division.to_json().encode()).decode())

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all workers judge their own data; where one raises, all raise its sentence."""
        return self._agreement.raising_together()

    def _agree_on(self, names: list[str]) -> list[str]:
        """Return the names that the first worker with any found."""
        rank = self._agreement.first(bool(names))
        if rank is None:
            return names
        agreed: list[str] = json.loads(self._agreement.message_of(rank, json.dumps(names).encode()))
        return agreed

    def _check_mixing(self, model: keras.Model, batch: Any, training: bool) -> None:
        # Replicas that step alone see their own examples only.
        if self._averaging is None or not training:
            super()._check_mixing(model, batch, training)

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on the parts of a global batch; return the global loss, a scalar.

        Where replicas step alone there is no global loss: 0 is returned, and the logs tell whether it is finite.
        """
        if self._averaging is None:
            return super().train_step(model, batch)
        self._train_apart(model, batch)
        self._averaging.after_step(model, self._strategy, self._replicas)
        return tf.constant(0.0)

    def end_call(self, model: keras.Model) -> None:
        """Average what each replica kept by itself."""
        if self._averaging is None:
            super().end_call(model)
        else:
            self._averaging.end_call(model, self._strategy, self._replicas)

    def _sum_gradients(
        self, model: keras.Model, gradients: Sequence[Any], share: tf.Tensor, counted: tf.Tensor, number: int = 0
    ) -> list[Any]:
        """Sum the gradients over all replicas, large ones of dense kernels by their factors."""
        member = local_replica_id()
        found = (
            [sufficient_factors.sufficient_factors_of(gradient, int(self._num_rows[model])) for gradient in gradients]
            if self._alike
            else []
        )
        by_factors = {index: pair for index, pair in enumerate(found) if pair is not None}
        others = [None if index in by_factors else gradient for index, gradient in enumerate(gradients)]
        sums = super()._sum_gradients(model, others, share, counted, number)
        totals = sufficient_factors.products(self._replicas, member, list(by_factors.values()))
        for index, total in zip(by_factors, totals, strict=True):
            sums[index] = total
        return sums

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch, on every worker."""
        _, _, share, num_examples = batch

        def spread(output: Any) -> tf.Tensor:
            """Put this replica's rows at their place among those of all; elsewhere zeros, which add nothing."""
            if not isinstance(output, tf.Tensor):
                raise TypeError(
                    f"Over several workers a model must predict dense tensors, and it returned "
                    f"{type(output).__name__}. End it with a layer that makes them dense, or predict on SingleDevice()."
                )
            context = tf.distribute.get_replica_context()
            index = tf.cast(tf.get_static_value(context.replica_id_in_sync_group), tf.int64)
            counts = (share >= 1) | (index == 0)
            start = tf.where(share < 1, tf.zeros_like(index), -(-index * num_examples // self.num_replicas))
            rows = tf.where(counts, data.num_rows(output), 0)
            shape = tf.concat([[num_examples], tf.shape(output, tf.int64)[1:]], 0)
            whole = tf.tensor_scatter_nd_update(
                tf.zeros(shape, output.dtype), (start + tf.range(rows))[:, None], output[:rows]
            )
            return context.all_reduce("SUM", whole)

        return self._predict(model, batch, lambda outputs: tf.nest.map_structure(spread, outputs))[0]

    def metric_results(self, model: keras.Model) -> dict[str, tf.Tensor]:
        """Return the model's metrics over the examples of all workers; each worker's own counts stay as they are."""
        variables = summed_variables(model)
        copies = [copy for variable in variables for copy in self._strategy.experimental_local_results(variable.value)]
        before = [copy.read_value() for copy in copies]
        for variable, total in zip(variables, self._totals(variables), strict=True):
            self._hold(variable, total)
        results: dict[str, tf.Tensor] = tf.nest.map_structure(tf.identity, metric_logs.results(model))
        for copy, value in zip(copies, before, strict=True):
            copy.assign(value)
        return results

    def _gather(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Return the parts of all workers' replicas, from those of this one's: zeros elsewhere add nothing."""
        rows = [np.zeros((self.num_replicas, *one.shape[1:]), one.dtype) for one in parts]
        for row, one in zip(rows, parts, strict=True):
            row[self.rank * len(one) : (self.rank + 1) * len(one)] = one
        return [total.numpy() for total in self._hosts.all_reduce_many(list(map(tf.constant, rows)))]

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`; of what replicas add up, the chief's first holds all."""
        if keras_model.is_summed_on_read(variable):
            self._hold(variable, value if self.is_chief else np.zeros(variable.shape, variable.dtype))
        else:
            variable.assign(value)

    def _hold(self, variable: keras.Variable, value: Any) -> None:
        """Let this worker's replicas add up to a value."""
        first, *others = self._strategy.experimental_local_results(variable.value)
        first.assign(value)
        for other in others:
            other.assign(tf.zeros_like(other))

    def _totals(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        here = [tf.convert_to_tensor(variable.value) for variable in variables]
        return self._hosts.all_reduce_many(here)

    def all_reduce_sum(self, values: Sequence[float]) -> np.ndarray:
        """Return the sums of some numbers over all workers, who must all ask; outside of a step."""
        return self._agreement.all_reduce_sum(values)

    def broadcast(self, message: bytes | None) -> bytes:
        """Return the chief's message on every worker, who must all ask; outside of a step."""
        return self._agreement.message_of(0, message)
