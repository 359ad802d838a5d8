"""Devices of other processes: each runs TensorFlow's server, and the first process runs the steps on all of them.

worker 0   the script, all steps ──┬── its own devices
worker 1   a server, no script     └── its devices           until worker 0 has ended
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NoReturn

import tensorflow as tf

from tfpar import cluster
from tfpar._compat import tf_distribute
from tfpar.cluster import loopback, reachability, rendezvous, tf_config

_JOB = "worker"
_POLL_SECONDS = 1.0
_SILENCE_SECONDS = 30.0  # of the chief's host
_STARTED = (
    "Pipeline(across_workers=True) must come before TensorFlow's first operation, and TensorFlow runs already. Create "
    "it right after the imports, before datasets and models."
)


def connect(job: tf_config.Job, form_seconds: float) -> list[list[str]]:
    """Connect the processes of a job; return on the chief the devices of each, by rank.

    The other processes lend their devices in this call, and end with the chief.

    Args:
        job: The job and the rank of this process in it.
        form_seconds: Seconds to wait for all workers.

    Raises:
        RuntimeError: If TensorFlow has started already.
        TimeoutError: If a worker does not appear in time.
        SystemExit: On the other processes, when the chief has ended.
    """
    if tf_distribute.has_started():
        raise RuntimeError(_STARTED)
    names = cluster.configured_devices(None)
    rendezvous.connect_workers(job, form_seconds)
    spec = tf.train.ClusterSpec({_JOB: list(job.addresses)})
    if job.rank > 0:
        _lend(job, spec, names, form_seconds)
    _wait_for_servers(job, form_seconds)
    with _confined(job):
        tf.config.experimental_connect_to_cluster(spec, job_name=_JOB, task_index=0, protocol="grpc")
    return _devices_of_workers(job.num_workers)


def label(device: str) -> str:
    """Return a short name of a device, with the rank of its worker if it has one.

    Args:
        device: A full or a partial name.

    Example:
        >>> label("/job:worker/replica:0/task:1/device:GPU:0"), label("/device:GPU:0")
        ('worker 1 GPU:0', 'GPU:0')
    """
    spec = tf.DeviceSpec.from_string(device)
    worker = "" if spec.task is None else f"worker {spec.task} "
    return f"{worker}{spec.device_type}:{spec.device_index}"


def _lend(job: tf_config.Job, spec: tf.train.ClusterSpec, names: Sequence[str], form_seconds: float) -> NoReturn:
    options = tf.compat.v1.ConfigProto(
        device_count={"CPU": max(1, sum(name.startswith("CPU") for name in names))},
        intra_op_parallelism_threads=tf.config.threading.get_intra_op_parallelism_threads(),
        inter_op_parallelism_threads=tf.config.threading.get_inter_op_parallelism_threads(),
    )
    options.gpu_options.allow_growth = True
    with _confined(job):
        server = tf.distribute.Server(spec, job_name=_JOB, task_index=job.rank, protocol="grpc", config=options)
    chief = job.addresses[0]
    print(f"worker {job.rank} lends {', '.join(names)} to the pipeline of {chief}", flush=True)
    began = last_seen = time.monotonic()
    was_seen = False
    while True:
        problem = reachability.problems([chief], _POLL_SECONDS).get(chief)
        now = time.monotonic()
        if problem is None:
            was_seen, last_seen = True, now
        elif was_seen and (problem == "Connection refused" or now - last_seen > _SILENCE_SECONDS):
            del server
            raise SystemExit(0)
        elif not was_seen and now - began > form_seconds:
            raise TimeoutError(f"The chief, {chief}, did not start TensorFlow within {form_seconds:g} s: {problem}.")
        time.sleep(_POLL_SECONDS)


def _wait_for_servers(job: tf_config.Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while problems := reachability.problems(job.peers, _POLL_SECONDS):
        if time.monotonic() > deadline:
            named = ", ".join(f"{address} ({problem})" for address, problem in problems.items())
            raise TimeoutError(f"All {job.num_workers} workers were connected, and {named} did not start TensorFlow.")
        time.sleep(0.1)


def _confined(job: tf_config.Job) -> contextlib.AbstractContextManager[None]:
    """Restrict the server of this process to the loopback where all workers are on this machine."""
    return loopback.server_confined(job.addresses[job.rank]) if job.is_on_loopback else contextlib.nullcontext()


def _devices_of_workers(num_workers: int) -> list[list[str]]:
    """Return the full names of the GPUs of each worker, or else of its CPUs."""
    found = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    of_workers = []
    for rank in range(num_workers):
        own = [one for one in found if one.task == rank]
        gpus = [one for one in own if one.device_type == "GPU"]
        chosen = sorted(gpus or [one for one in own if one.device_type == "CPU"], key=lambda one: one.device_index or 0)
        of_workers.append([one.to_string() for one in chosen])
    return of_workers
