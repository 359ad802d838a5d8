"""Clusters, collectives and variables of `tf.distribute` (Keras 3.15, TensorFlow 2.21)."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable as KerasVariable
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import DistributedVariable, SyncOnReadVariable
from tensorflow.python.eager import context

from tfpar._compat import versions


def replace_default_all_reduce(
    strategy: tf.distribute.MirroredStrategy, cross_device_ops: tf.distribute.CrossDeviceOps
) -> bool:
    """Replace the all-reduce of a user's strategy: on CPUs always, on GPUs unless the user chose one.

    TensorFlow 2.21's default, collectives, crashes when a process trains a second model, because it reuses instance
    keys ("Shape mismatch in the collective instance").

    Args:
        strategy: The strategy to change.
        cross_device_ops: The new all-reduce.

    Returns:
        Whether it was replaced.
    """
    current = versions.private(strategy.extended, "_cross_device_ops")
    is_default = current is versions.private(strategy.extended, "_collective_ops")
    is_replaced = is_default or all("CPU" in device for device in strategy.extended.worker_devices)
    if is_replaced:
        versions.replace(strategy.extended, "_cross_device_ops", cross_device_ops)
    return is_replaced


def form_cluster(
    resolver: Any, devices: list[str], form_seconds: float, silence_seconds: float
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Create a `MultiWorkerMirroredStrategy` over the given local devices, with time limits.

    TensorFlow 2.21 always uses all GPUs or one CPU, and takes its time limits from the coordination service. A private
    method of the context configures that service; the strategy keeps an existing configuration.

    Args:
        resolver: The cluster resolver, with the single job `worker`.
        devices: Local device names such as `CPU:1`.
        form_seconds: Seconds to wait for all workers.
        silence_seconds: Seconds without a heartbeat after which a worker counts as lost.
    """

    def local_devices(extended: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:{name}" for name in devices), devices[0].split(":")[0]

    spec, formed = resolver.cluster_spec(), has_cluster()
    if spec.jobs and not formed:
        context.context().configure_coordination_service(
            service_type="standalone",
            service_leader="/job:worker/replica:0/task:0",
            coordinated_jobs=[
                coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=spec.num_tasks("worker"))
            ],
            cluster_register_timeout_in_ms=int(1000 * form_seconds),
            heartbeat_timeout_in_ms=int(1000 * silence_seconds),
        )
    with contextlib.ExitStack() as stack:
        patch = functools.partial(mock.patch.object, CollectiveAllReduceExtended)
        stack.enter_context(patch("_initialize_local_devices", local_devices))
        if formed:
            # A second strategy would reset the collectives of the first while another worker waits in them, so that
            # both hang or crash.
            versions.require_mentioned(CollectiveAllReduceExtended._initialize_multi_worker, "_std_server_started")
            stack.enter_context(patch("_std_server_started", True, create=True))  # instance attribute, read by getattr
            stack.enter_context(patch("_enable_check_health", False))
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    if threading.current_thread() is threading.main_thread():
        # The coordination service handles SIGTERM as a preemption notice, which nothing reads: outside of training, a
        # worker would run on until it is killed.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return strategy


def has_cluster() -> bool:
    """Return whether this process already belongs to a cluster."""
    return context.context().coordination_service is not None


def has_started() -> bool:
    """Return whether TensorFlow has started, so that a cluster can no longer be formed."""
    return context.context()._context_handle is not None


def report_failure(code: int, message: str) -> None:
    """Report a failure of this worker, so that pending collectives on all workers raise an error.

    Without a report, the others would wait in a collective until the process of the failed worker ends.

    Args:
        code: The error code for the other workers, from `tf.errors`.
        message: The error message.
    """
    with contextlib.suppress(tf.errors.OpError):  # another failure was reported already
        context.context().report_error_to_cluster(code, message)


def communicate_through(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, all_reduce: Callable[[Any, int], Any]
) -> None:
    """Make a strategy communicate only where tfpar does.

    TensorFlow 2.21 communicates whenever a metric's variable is read or a variable is created. So a callback that saves
    on the chief alone would never return, and neither would a worker that builds another model. After this call, reads
    give the sum over the local replicas, and each worker initializes its own variables: tfpar sums metrics itself and
    broadcasts the chief's state before the first step. In a step, a replica's `all_reduce` uses tfpar's collectives,
    which reduce packs of gradients during the backward pass.

    Args:
        strategy: The strategy to change.
        all_reduce: Sums a tensor or `tf.IndexedSlices` over all replicas. Called in replica context, with the index of
            the local replica.
    """
    extended = strategy.extended
    replace = functools.partial(versions.replace, extended)

    def reduce_in_step(reduce_op: tf.distribute.ReduceOp, value: Any, options: Any = None) -> Any:
        replica = local_replica_id()
        totals = [all_reduce(tensor, replica) for tensor in value]
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            return [total / tf.cast(strategy.num_replicas_in_sync, total.dtype) for total in totals]
        return totals

    replace("_replica_ctx_all_reduce", reduce_in_step)
    replace("_use_merge_call", lambda: False)
    for name in ("_cross_device_ops", "_host_cross_device_ops"):
        replace(name, tf.distribute.ReductionToOneDevice())
    initial_value = MirroredExtended._get_variable_creator_initial_value
    replace("_get_variable_creator_initial_value", functools.partial(initial_value, extended))


def local_replica_id() -> int:
    """Return the number of the replica in whose context this is called, among those of this process."""
    return int(tf.distribute.get_replica_context()._replica_id)


def number_replicas(strategy: tf.distribute.MultiWorkerMirroredStrategy, first: int, num_replicas: int) -> None:
    """Assign numbers to the replicas of workers with different numbers of devices.

    TensorFlow 2.21 computes the numbers as if every worker had as many devices as this one
    (`CollectiveAllReduceExtended` in collective_all_reduce_strategy.py). It sends no messages with them itself.

    Args:
        strategy: The strategy to change.
        first: Number of the first local replica among those of all workers.
        num_replicas: Number of replicas, on all workers together.
    """
    extended = strategy.extended
    versions.replace(extended, "_get_replica_id_in_sync_group", lambda replica: first + replica)
    versions.replace(extended, "_get_local_replica_id", lambda replica: replica - first)
    versions.require(extended, "_num_replicas_in_sync")
    kind = type(extended)
    extended.__class__ = type(kind.__name__, (kind,), {"_num_replicas_in_sync": num_replicas})


def is_summed_on_read(variable: keras.Variable) -> bool:
    """Return whether a variable's value is the sum over replicas, as for metrics."""
    return isinstance(variable.value, SyncOnReadVariable)


def local_memory(variable: keras.Variable) -> tf.Variable | None:
    """Return the `tf.Variable` of a Keras variable on the first local replica; None if replicas hold summands."""
    if isinstance(getattr(variable, "_value", None), SyncOnReadVariable):
        return None
    memory = first_memory(variable)
    return memory if isinstance(memory, tf.Variable) else None


def first_memory(variable: keras.Variable) -> Any:
    """Return the memory of a variable on the first local replica, also where replicas hold summands."""
    memory = getattr(variable, "_value", None)
    if isinstance(memory, DistributedVariable):
        memory = memory._distribute_strategy.experimental_local_results(memory)[0]
    return memory


@contextlib.contextmanager
def assigning_own_copies() -> Iterator[None]:
    """Let replicas assign Keras variables inside this context to their own copies, whatever the aggregation is.

    TensorFlow 2.21 else averages, adds or broadcasts the values of the replicas, or waits for the other ones.
    """
    original = KerasVariable._direct_assign

    def assign(variable: Any, value: Any) -> None:
        memory, replica = variable._value, tf.distribute.get_replica_context()
        if isinstance(memory, DistributedVariable) and replica is not None:
            copies = memory._distribute_strategy.experimental_local_results(memory)
            copies[local_replica_id()].assign(tf.cast(value, memory.dtype))
            return
        original(variable, value)

    with mock.patch.object(KerasVariable, "_direct_assign", assign):
        yield


def own_task() -> str:
    """Return the task of this process in its job, such as `"/job:worker/replica:0/task:0"`."""
    return str(context.context().host_address_space())


def host_of(device: str) -> str:
    """Return the CPU of the process that owns a device, given by its full name."""
    return str(tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string())


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Return the rank of this worker in its strategy; 0 for a strategy of a single process."""
    is_multi_worker = isinstance(strategy.extended, CollectiveAllReduceExtended)
    return int(versions.private(strategy.extended, "_id_in_cluster")) if is_multi_worker else 0
