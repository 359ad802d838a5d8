"""Cluster formation, and the checks before it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfpar import cluster
from tfpar._compat import tf_distribute, tf_server
from tfpar.cluster import loopback, reachability, rendezvous, tf_config
from tfpar.files.code_listing import code_listing
from tfpar.workers.lost_workers import check_seconds, failure_reason

SLOW_START_SECONDS = 60.0  # from the rendezvous to the start of TensorFlow in the last worker
STARTED = (
    "MultiWorker() must come before TensorFlow's first operation, and TensorFlow runs already. "
    "Create it right after the imports, before datasets and models."
)


def check_options(
    all_reduce: str, pack_bytes: int | None, compression: str | None, form_seconds: float, silence_seconds: float
) -> None:
    """Check that the options of `MultiWorker` are in range.

    Raises:
        ValueError: If one is not.
    """
    if all_reduce not in ("auto", "ring", "nccl"):
        raise ValueError(f"all_reduce must be 'auto', 'ring' or 'nccl', received {all_reduce!r}.")
    if all_reduce == "nccl" and not tf.config.list_physical_devices("GPU"):
        raise ValueError("all_reduce='nccl' needs GPUs, and this machine has none. Use 'auto' or 'ring'.")
    if pack_bytes is not None and pack_bytes < 1:
        raise ValueError(f"pack_bytes must be at least 1, received {pack_bytes}. Leave it out for the default.")
    if compression not in (None, "bfloat16"):
        raise ValueError(f"compression must be None or 'bfloat16', received {compression!r}.")
    check_seconds(form_seconds, silence_seconds)


def check_sync(
    sync: str,
    every: int,
    average_optimizer: bool,
    compression: str | None,
    shard: str | None = None,
    batch_shares: Sequence[int] | None = None,
) -> None:
    """Check that the options of `MultiWorker` are compatible.

    Raises:
        ValueError: If two options exclude each other.
    """
    if sync not in ("step", "average"):
        raise ValueError(f"sync must be 'step' or 'average', received {sync!r}.")
    if every < 1:
        raise ValueError(f"every must be at least 1, received {every}.")
    if sync == "step" and (every > 1 or not average_optimizer):
        raise ValueError(
            f"every and average_optimizer belong to sync='average', received every={every} and "
            f"average_optimizer={average_optimizer} with sync='step'. Set sync='average', or leave them out."
        )
    if sync == "average" and compression is not None:
        raise ValueError("compression rounds gradients, and sync='average' sends none. Leave one of them out.")
    if sync == "average" and shard is not None:
        raise ValueError(
            f"With sync='average' every replica updates its own weights, which takes all of the optimizer's state, and "
            f"shard={shard!r} divides it. Leave one of them out."
        )
    if sync == "average" and batch_shares is not None:
        raise ValueError(
            "sync='average' gives every replica the same weight in an average, whatever the size of its per-replica "
            f"batch, received batch_shares={list(batch_shares)}. Leave one of them out."
        )


def check_eager(model: keras.Model, num_local_replicas: int) -> None:
    """Refuse eager models on workers with several devices, which would deadlock.

    TensorFlow 2.21 runs eager replicas one after the other, and the first would wait for the second in a collective.

    Args:
        model: A compiled model.
        num_local_replicas: Number of replicas on this worker.

    Raises:
        ValueError: If the model runs eagerly on several local replicas.
    """
    if model.run_eagerly and num_local_replicas > 1:
        raise ValueError(
            f"With run_eagerly=True a worker can have one device, received one with {num_local_replicas}. Give it one, "
            "such as devices=['GPU:0'], train with Mirrored, or compile without run_eagerly."
        )


def named(kind: str, shard: str | None) -> str:
    """Return the name of a strategy with its argument `shard`, for messages.

    Example:
        >>> named("MultiWorker", "optimizer"), named("Hybrid", None)
        ("MultiWorker(shard='optimizer')", 'Hybrid')
    """
    return kind if shard is None else f"{kind}(shard={shard!r})"


def form_cluster(
    job: tf_config.JobConfig | None,
    devices: Sequence[str] | None,
    form_seconds: float,
    silence_seconds: float,
    strategy: str,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Form TensorFlow's cluster after the rendezvous of all workers, and return its strategy.

    Args:
        job: The job of this process; None for a single worker.
        devices: Device names of this worker; None for all GPUs, or all logical CPUs without GPUs.
        form_seconds: Seconds to wait for all workers.
        silence_seconds: Seconds without a heartbeat after which a worker counts as lost.
        strategy: The name of the strategy, which must be equal on all workers.

    Raises:
        ValueError: If a device does not exist, GPUs and CPUs are mixed, or the workers create different strategies.
        RuntimeError: If TensorFlow has already started.
        TimeoutError: If a worker is missing, or lost while TensorFlow starts.
    """
    names = cluster.configured_devices(devices)
    cluster.check_one_kind("MultiWorker", names)
    alone = job is None or job.num_workers == 1
    spec = tf.train.ClusterSpec({} if alone or job is None else {"worker": list(job.addresses)})
    rank = 0 if job is None else job.rank
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=None if alone else "worker", task_id=None if alone else rank, rpc_layer="grpc"
    )
    if job is not None and not alone and not tf_distribute.has_cluster():
        if tf_distribute.has_started():
            raise RuntimeError(STARTED)
        rendezvous.connect_workers(job, form_seconds, strategy=strategy)
    begin = functools.partial(
        tf_distribute.form_cluster, resolver, names, form_seconds + SLOW_START_SECONDS, silence_seconds
    )
    try:
        if job is None or alone or tf_distribute.has_cluster() or not job.is_on_loopback:
            return begin()
        return _begin_confined(begin, job)
    except tf.errors.OpError as error:
        if job is None:
            raise
        missing = reachability.unreachable(job, 2.0)
        raise TimeoutError(
            f"All {job.num_workers} workers were connected, and {', '.join(missing) or 'one of them'} was lost while "
            f"TensorFlow started: {failure_reason(error)}. Look at its output."
        ) from error


def _begin_confined(
    begin: Callable[[], tf.distribute.MultiWorkerMirroredStrategy], job: tf_config.JobConfig
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Form the cluster of a local job, with TensorFlow's server restricted to the loopback."""
    with tf_server.starting_without_lock(), loopback.server_confined(job.addresses[job.rank]):
        return begin()


def versions() -> dict[str, str]:
    """Return the versions and the source code that must be equal on all workers."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return {
        "Python's version": ".".join(map(str, sys.version_info[:2])),
        "TensorFlow's version": tf.__version__,
        "Keras' version": keras.__version__,
        "NumPy's version": np.__version__,
        "code": code_listing(*([Path(main)] if main else [])),
    }
