"""Remote devices: the chief runs all steps on the devices of all workers, each of which runs TensorFlow's server.

worker 0   the script, all steps ──┬── its own devices
worker 1   a server only           └── its devices           until worker 0 ends or is lost
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from tfpar import cluster
from tfpar._compat import tf_distribute
from tfpar.cluster import heartbeats, loopback, reachability, rendezvous, tf_config
from tfpar.workers.worker_watch import WorkerWatch, leave_in_time

_JOB = "worker"
_POLL_SECONDS = 1.0
_AFTER_CHIEF_SECONDS = 1.0  # so that the launcher names the chief as the first that failed
# Connected jobs, by addresses: a process connects once.
_CONNECTED: dict[tuple[str, ...], RemoteDevices] = {}
_STARTED = (
    "A strategy on the devices of all workers must come before TensorFlow's first operation, and TensorFlow runs "
    "already. Create it right after the imports, before datasets and models."
)


class RemoteDevices(NamedTuple):
    """The devices of all workers.

    Args:
        of_workers: The full device names of each worker, by rank.
        watch: Detects lost workers.
    """

    of_workers: list[list[str]]
    watch: WorkerWatch


def connect(job: tf_config.JobConfig, form_seconds: float, silence_seconds: float, strategy: str) -> RemoteDevices:
    """Connect the workers of a job; return the devices of all workers on the chief.

    On the other workers, the call serves their devices until the chief ends, and does not return. Later calls on the
    chief return the same devices.

    Args:
        job: The job of this process.
        form_seconds: Seconds to wait for all workers.
        silence_seconds: Seconds without a heartbeat after which a worker counts as lost.
        strategy: The name of the strategy, which must be equal on all workers.

    Raises:
        RuntimeError: If TensorFlow has already started.
        TimeoutError: If a worker is missing.
        WorkerLostError: If a worker is lost while TensorFlow starts.
        SystemExit: On the other workers, when the chief ends or is lost.
    """
    if tuple(job.addresses) in _CONNECTED:
        return _CONNECTED[tuple(job.addresses)]
    if tf_distribute.has_started():
        raise RuntimeError(_STARTED)
    names = cluster.configured_devices(None)
    connections: dict[int, socket.socket] = {}
    rendezvous.connect_workers(job, form_seconds, connections.__setitem__, strategy)
    spec = tf.train.ClusterSpec({_JOB: list(job.addresses)})
    if job.rank > 0:
        _serve(job, spec, names, heartbeats.Pings(connections[0], silence_seconds))
    watch = WorkerWatch(job, connections, silence_seconds)
    with watch.guarding(), _confined(job):
        _wait_for_servers(job, form_seconds, watch)
        tf.config.experimental_connect_to_cluster(spec, job_name=_JOB, task_index=0, protocol="grpc")
    _CONNECTED[tuple(job.addresses)] = devices = RemoteDevices(_devices_by_rank(job.num_workers), watch)
    return devices


def label(device: str) -> str:
    """Return a readable name of a device, with the rank of its worker if it has one.

    Args:
        device: A full or partial device name.

    Example:
        >>> label("/job:worker/replica:0/task:1/device:GPU:0"), label("/device:GPU:0")
        ('worker 1 GPU:0', 'GPU:0')
    """
    spec = tf.DeviceSpec.from_string(device)
    worker = "" if spec.task is None else f"worker {spec.task} "
    return f"{worker}{spec.device_type}:{spec.device_index}"


def _serve(
    job: tf_config.JobConfig, spec: tf.train.ClusterSpec, names: Sequence[str], pings: heartbeats.Pings
) -> NoReturn:
    """Serve the devices of this process to the chief until it ends, then exit.

    The exit code lets the launcher restart the job if the chief was lost.
    """
    pings.start()
    _forward_signals(pings)
    options = tf.compat.v1.ConfigProto(
        device_count={"CPU": max(1, sum(name.startswith("CPU") for name in names))},
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
    )
    options.gpu_options.allow_growth = True
    with _confined(job):
        server = tf.distribute.Server(spec, job_name=_JOB, task_index=job.rank, protocol="grpc", config=options)
    chief = job.addresses[0]
    print(f"worker {job.rank} lends {', '.join(names)} to {chief}", flush=True)
    while pings.is_alive():
        pings.join(_POLL_SECONDS)  # a signal interrupts it
    del server
    # TensorFlow 2.21's server cannot be stopped: operations that wait for the chief must not keep the process alive.
    leave_in_time()
    if pings.loss is None:
        raise SystemExit(0)
    print(f"error: The chief, {chief}, is lost ({pings.loss}). This worker ends.", file=sys.stderr, flush=True)
    time.sleep(_AFTER_CHIEF_SECONDS)
    raise SystemExit(1)


def _forward_signals(pings: heartbeats.Pings) -> None:
    """Forward Ctrl-C and SIGTERM to the chief, which stops the job with a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(number: int, frame: Any) -> None:
        if not pings.is_alive():
            os._exit(128 + number)
        pings.ask_to_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _wait_for_servers(job: tf_config.JobConfig, seconds: float, watch: WorkerWatch) -> None:
    deadline = time.monotonic() + seconds
    while problems := reachability.problems(job.peers, _POLL_SECONDS):
        if time.monotonic() > deadline:
            named = ", ".join(f"{address} ({problem})" for address, problem in problems.items())
            raise TimeoutError(
                f"All {job.num_workers} workers were connected, and TensorFlow did not answer within {seconds:g} s at "
                f"{named}. Let the machines of the job connect to each other at these ports, and look at the output of "
                "that worker."
            )
        if error := watch.error(0.1):
            raise error


def _confined(job: tf_config.JobConfig) -> contextlib.AbstractContextManager[None]:
    """Restrict the server of a local job to the loopback."""
    return loopback.server_confined(job.addresses[job.rank]) if job.is_on_loopback else contextlib.nullcontext()


def _devices_by_rank(num_workers: int) -> list[list[str]]:
    """Return the full names of each worker's GPUs, or of its CPUs if it has no GPUs."""
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    specs.sort(key=lambda spec: spec.device_index or 0)
    by_rank = []
    for rank in range(num_workers):
        gpus, cpus = (
            [spec.to_string() for spec in specs if (spec.task, spec.device_type) == (rank, kind)]
            for kind in ("GPU", "CPU")
        )
        by_rank.append(gpus or cpus)
    return by_rank
