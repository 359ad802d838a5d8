"""Everything private of Keras and TensorFlow that tfpar touches, each with the version, the reason and the link.

Written for Keras 3.15 and TensorFlow 2.21. Nothing else in tfpar imports from `keras.src` or `tensorflow.python`.
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
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import SyncOnReadVariable
from tensorflow.python.eager import context

from tfpar._compat import keras_losses, versions

LossReduction = Callable[[Any, Any, Any, str | None, Any], tf.Tensor]
AddedLossReduction = Callable[[keras.Model, Any], tf.Tensor]

# Keras as it is, for reductions that build on it.
reduce_weighted_values = loss_module.reduce_weighted_values
apply_mask = loss_module.apply_mask
squeeze_or_expand_to_same_rank = loss_module.squeeze_or_expand_to_same_rank
aggregate_added_loss = TensorFlowTrainer.__mro__[1]._aggregate_additional_loss


@contextlib.contextmanager
def loss_reduction(reduce_loss: LossReduction, reduce_added_loss: AddedLossReduction) -> Iterator[None]:
    """Let `reduce_loss` and `reduce_added_loss` do every division of a loss inside this context.

    Keras 3.15 divides a loss in one function, `reduce_weighted_values`, by the count of the replica that calls it, and
    then by the number of replicas: wrong for uneven batches and masks (keras-team/keras#19246 and the facts in the
    README). Tracing is single-threaded (the threads of MirroredStrategy take turns), so a patch of the module's
    attributes reaches every loss of the traced step and nothing else.
    """

    def reduce(values: Any, sample_weight: Any = None, mask: Any = None,
               reduction: str | None = "sum_over_batch_size", dtype: Any = None) -> tf.Tensor:  # fmt: skip
        return reduce_loss(values, sample_weight, mask, reduction, dtype)

    with (
        mock.patch.object(loss_module, "reduce_weighted_values", reduce),
        mock.patch.object(loss_module, "unscale_loss_for_distribution", lambda value: value),
        mock.patch.object(TensorFlowTrainer, "_aggregate_additional_loss", reduce_added_loss),
    ):
        yield


@contextlib.contextmanager
def local_losses() -> Iterator[None]:
    """Let every loss inside this context be that of the calling replica's examples alone.

    Keras 3.15 divides losses by the number of replicas wherever a strategy is in force.
    """
    aggregate = TensorFlowTrainer.__mro__[1]._aggregate_additional_loss
    with (
        mock.patch.object(loss_module, "scale_loss_for_distribution", lambda value: value),
        mock.patch.object(loss_module, "unscale_loss_for_distribution", lambda value: value),
        mock.patch.object(TensorFlowTrainer, "_aggregate_additional_loss", aggregate),
    ):
        yield


@contextlib.contextmanager
def compute_loss_then(reduce_loss: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Pass what `compute_loss` returns through `reduce_loss`; Keras 3.15's step calls it as `_compute_loss`."""
    original = keras.Model._compute_loss

    def compute(model: keras.Model, *args: Any, **kwargs: Any) -> tf.Tensor:
        return reduce_loss(original(model, *args, **kwargs))

    with mock.patch.object(keras.Model, "_compute_loss", compute):
        yield


@contextlib.contextmanager
def collect_added_losses(collected: Callable[[], list[Any]]) -> Iterator[None]:
    """Gather what layers add with `add_loss` in the list that `collected` returns, instead of in the layers.

    Keras 3.15 keeps added losses in the layer objects. The replicas of a strategy share those and take turns wherever
    they communicate, so one replica would read and clear the losses of another.
    """

    def add_loss(layer: keras.Layer, loss: Any) -> None:
        collected().extend(keras.tree.flatten(loss))

    losses = property(lambda layer: [*collected(), *layer._get_regularization_losses()])
    with mock.patch.object(keras.Layer, "add_loss", add_loss), mock.patch.object(keras.Layer, "losses", losses):
        yield


@contextlib.contextmanager
def one_device_optimizer() -> Iterator[None]:
    """Let Keras optimizers run their one-device code inside this context.

    Keras 3.15's TensorFlow optimizer reduces and updates across replicas itself, after clipping and inside
    conditionals (`merge_call called while defining a new graph`). tfpar reduces the gradients before and calls
    `apply` once on each replica, where the base class's code, which knows nothing of replicas, is right.
    """
    names = (
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_backend_update_step",
        "_overwrite_model_variables_with_average_value",
    )
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(TFOptimizer, name, getattr(BaseOptimizer, name)))
        stack.enter_context(mock.patch.object(LossScaleOptimizer, "_tf_apply", LossScaleOptimizer._common_apply))
        yield


def reduce_on_one_device(strategy: tf.distribute.MirroredStrategy) -> None:
    """Let a strategy over CPUs that somebody else made sum on one of them.

    TensorFlow 2.21's default, collectives, crashes when one process trains a second model: instance keys are used
    again ("Shape mismatch in the collective instance").
    """
    versions.replace(strategy.extended, "_cross_device_ops", tf.distribute.ReductionToOneDevice())


@contextlib.contextmanager
def replica_seeds(replica_id: Callable[[], int]) -> Iterator[None]:
    """Let every replica but the first draw random numbers of its own inside this context.

    A Keras 3.15 `SeedGenerator` holds the same state on all replicas, so that Dropout would drop the same units for
    the first example of each part, the second, and so on. The replica's number is mixed into the seed drawn.
    """

    def draw(generator: Any, ordered: bool = True) -> tf.Tensor:
        seed = original(generator, ordered)
        # The golden ratio's 32 bits: neighbouring seeds do not meet those of neighbouring replicas.
        return seed + tf.cast([replica_id() * 2654435769 % 2**31, 0], seed.dtype)

    original = keras.random.SeedGenerator.next
    with mock.patch.object(keras.random.SeedGenerator, "next", draw):
        yield


def all_layers(model: keras.Model) -> list[keras.Layer]:
    """Return the layers at every depth; `model.layers` holds the outermost only (Keras 3.15)."""
    return list(model._flatten_layers())


def recomputes(model: keras.Model) -> bool:
    """Say whether a layer was built in a `keras.RematScope`, and so reads its weights in the backward pass too."""
    return any(versions.private(layer, "_remat_mode") is not None for layer in all_layers(model))


def own_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that the model and its layers hold and update in their calls (Keras 3.15)."""
    compiled = [
        model._loss_tracker,
        model._compile_metrics,
        *(model._compile_loss.metrics if model._compile_loss else ()),
    ]
    held = [metric for layer in model._flatten_layers() for metric in layer._metrics]
    return [metric for metric in held if not any(metric is other for other in compiled)]


def counts_metrics(model: keras.Model) -> bool:
    """Say whether a model was compiled with metrics, or counts some of its own (Keras 3.15)."""
    return model._compile_metrics is not None or overridden(model, "compute_metrics")


def call_model(model: keras.Model, inputs: Any, training: bool) -> Any:
    """Call a model as Keras' own step does: `training` only where its `call` takes it (Keras 3.15)."""
    with keras_losses.in_call():
        return model(inputs, training=training) if model._call_has_training_arg else model(inputs)


def compute_loss(model: keras.Model, inputs: Any, targets: Any, outputs: Any, weights: Any, training: bool) -> Any:
    """Compute the loss as Keras' own step does, also where a subclass overrides `compute_loss` (Keras 3.15)."""
    return model._compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights, training=training)


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Return the metric behind the log entry `loss`; `model.metrics` holds it only at no fixed place (Keras 3.15)."""
    return model._loss_tracker


def is_of_keras(value: Any) -> bool:
    """Say whether a function, or the class of an object, is Keras' own; of Keras 3.15 all are in `keras.src`."""
    return str(getattr(value, "__module__", "")).startswith("keras.src.")


def overridden(model: keras.Model, method: str) -> bool:
    """Say whether the user's model class replaces a method of Keras' own trainer."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def metrics_in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Return logs as Keras 3.15's `evaluate` does: a list in its order, or the loss alone."""
    return model._flatten_metrics_in_order(logs)


def compilation(model: keras.Model) -> Any:
    """Return an object that `compile` creates each time it is called, None before (Keras 3.15)."""
    return versions.private(model, "_compile_config") if model.compiled else None


def restored_epoch(model: keras.Model) -> int:
    """Return the epoch that `keras.callbacks.BackupAndRestore` wants to go on with, 0 for none (Keras 3.15)."""
    return int(model._initial_epoch or 0)


def flat_losses(model: keras.Model) -> list[Any]:
    """Return the loss objects and functions of a compiled model (Keras 3.15 keeps them in `_compile_loss`)."""
    compiled = model._compile_loss
    return [] if compiled is None else [entry for entry in keras.tree.flatten(compiled._user_loss) if entry is not None]


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
            # A second strategy would take the collectives of the first away while another worker waits in them: both
            # would wait for ever, or crash.
            versions.require_mentioned(CollectiveAllReduceExtended._initialize_multi_worker, "_std_server_started")
            stack.enter_context(patch("_std_server_started", True, create=True))  # an object's own, read with a default
            stack.enter_context(patch("_enable_check_health", False))
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    if threading.current_thread() is threading.main_thread():
        # The coordination service takes SIGTERM for a notice of preemption that nobody reads: a worker asked to stop
        # before or after its training would go on until it is killed.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return strategy


def has_cluster() -> bool:
    """Say whether this process belongs to a formed cluster already (TensorFlow 2.21)."""
    return context.context().coordination_service is not None


def has_started() -> bool:
    """Say whether TensorFlow runs already, so that no cluster can be formed any more (TensorFlow 2.21)."""
    return context.context()._context_handle is not None


def communicate_through(
    strategy: tf.distribute.MultiWorkerMirroredStrategy, all_reduce: Callable[[Any, int], Any]
) -> None:
    """Let a strategy communicate where tfpar says so, and nowhere else.

    TensorFlow 2.21 communicates where a metric's variable is read and where a variable is made. A callback that saves
    on the chief alone would wait for ever for workers that do not save, and so would a worker that builds another
    model. Reads give the sum over this worker's replicas, and variables begin as this worker makes them: tfpar adds
    up metrics itself, and sends the chief's state to all before the first step. Inside a step, `all_reduce` of a
    replica goes through tfpar's collectives, which reduce in pieces while the backward pass goes on.

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
    """Say whether each replica holds a part of a variable, as with metrics (TensorFlow 2.21)."""
    return isinstance(variable.value, SyncOnReadVariable)


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Return the rank of this worker among those of its strategy, from 0 (TensorFlow 2.21)."""
    is_of_cluster = isinstance(strategy.extended, CollectiveAllReduceExtended)
    return int(versions.private(strategy.extended, "_id_in_cluster")) if is_of_cluster else 0
