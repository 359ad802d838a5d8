"""Clusters, collectives and variables of `tf.distribute`.

All of it is private. Written for Keras 3.15 and TensorFlow 2.21.
"""

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
    """Replace the all-reduce of a user's strategy over CPUs, and over GPUs that of TensorFlow's choice.

    TensorFlow 2.21's default, collectives, crashes when one process trains a second model: instance keys are used
    again ("Shape mismatch in the collective instance").

    Args:
        strategy: The strategy.
        cross_device_ops: The operations for its devices.

    Returns:
        Whether they are used from now on, and not a choice of the user.
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
    """Make a `MultiWorkerMirroredStrategy` over given local devices, with time limits.

    TensorFlow 2.21 takes all GPUs, or one CPU, and its time limits come from the coordination service alone, which a
    private method of the context configures. Configured before, the strategy keeps it.

    Args:
        resolver: Names the cluster, of one job `worker`, and this task.
        devices: Local names such as `CPU:1`.
        form_seconds: How long to wait for all workers.
        silence_seconds: How long a worker may be silent.
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
            # A second strategy would end the collectives of the first while another worker waits in them: both would
            # hang or crash.
            versions.require_mentioned(CollectiveAllReduceExtended._initialize_multi_worker, "_std_server_started")
            stack.enter_context(patch("_std_server_started", True, create=True))  # an object's own, read with a default
            stack.enter_context(patch("_enable_check_health", False))
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    if threading.current_thread() is threading.main_thread():
        # The coordination service records SIGTERM as a notice of preemption, which nothing reads: without training, a
        # worker would continue until it is killed.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return strategy


def has_cluster() -> bool:
    """Return whether this process belongs to a formed cluster already (TensorFlow 2.21)."""
    return context.context().coordination_service is not None


def has_started() -> bool:
    """Return whether TensorFlow runs already, so that no cluster can be formed any more (TensorFlow 2.21)."""
    return context.context()._context_handle is not None


def report_failure(code: int, message: str) -> None:
    """Report a failure of this worker to all workers: their waiting collectives raise an error with this message.

    TensorFlow 2.21 has the function in its private context. Without a report, a worker waits in a collective until the
    process of the failed worker has ended.

    Args:
        code: The code of the error on the other workers, of `tf.errors`.
        message: Its message.
    """
    with contextlib.suppress(tf.errors.OpError):  # another failure was reported before
        context.context().report_error_to_cluster(code, message)


def communicate_through(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, all_reduce: Callable[[Any, int], Any]
) -> None:
    """Restrict the communication of a strategy to the calls of tfpar.

    TensorFlow 2.21 communicates where a metric's variable is read and where a variable is made. A callback that saves
    on the chief alone would never return, as the other workers do not save, and neither would a worker that builds
    another model. Reads give the sum over this worker's replicas, and each worker initializes its own variables:
    tfpar sums metrics itself, and broadcasts the state of the chief before the first step. Inside a step, `all_reduce`
    of a replica uses tfpar's collectives, which reduce packs of gradients during the backward pass.

    Args:
        strategy: The strategy to change.
        all_reduce: Sums a tensor or `tf.IndexedSlices` over all replicas; called in replica context, with the number
            of the replica among those of this process.
    """
    extended = strategy.extended
    replace = functools.partial(versions.replace, extended)

    def reduce_in_step(reduce_op: tf.distribute.ReduceOp, value: Any, options: Any = None) -> Any:
        replica = tf.distribute.get_replica_context()._replica_id
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


def is_summed_on_read(variable: keras.Variable) -> bool:
    """Return whether each replica holds a part of a variable, as with metrics (TensorFlow 2.21)."""
    return isinstance(variable.value, SyncOnReadVariable)


def local_memory(variable: keras.Variable) -> tf.Variable | None:
    """Return the memory of a variable, that of the first local replica of equal ones; None if each holds a part.

    A Keras 3.15 variable has a `_value`, and that of TensorFlow 2.21 for replicas the memory of each.
    """
    memory = getattr(variable, "_value", None)
    if isinstance(memory, SyncOnReadVariable):
        return None
    if isinstance(memory, DistributedVariable):
        memory = memory._distribute_strategy.experimental_local_results(memory)[0]
    return memory if isinstance(memory, tf.Variable) else None


def first_memory(variable: keras.Variable) -> tf.Variable:
    """Return the memory of a variable on the first local replica, also where each replica holds a part."""
    memory = variable._value
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
            copies[replica._replica_id].assign(tf.cast(value, memory.dtype))
            return
        original(variable, value)

    with mock.patch.object(KerasVariable, "_direct_assign", assign):
        yield


def own_task() -> str:
    """Return the address of this process among the devices of its job (TensorFlow 2.21 has it in its private context).

    Such as `"/job:worker/replica:0/task:0"`.
    """
    return str(context.context().host_address_space())


def host_of(device: str) -> str:
    """Return the CPU of the process that a device, by its full name, belongs to."""
    return str(tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string())


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Return the rank of this worker among those of its strategy, from 0 (TensorFlow 2.21)."""
    is_of_cluster = isinstance(strategy.extended, CollectiveAllReduceExtended)
    return int(versions.private(strategy.extended, "_id_in_cluster")) if is_of_cluster else 0
