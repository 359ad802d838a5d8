"""Data parallelism on one machine: every device holds the model and takes its part of each global batch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfpar import _compat, cluster, data, reduction
from tfpar.division import Division
from tfpar.reduction import replica_id
from tfpar.strategies.base import Strategy
from tfpar.strategies.single_device import count_examples, forward, forward_backward, update_metrics

AllReduce = Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"]


class Mirrored(Strategy):
    """Train on several devices of this machine with `tf.distribute.MirroredStrategy`, equal to one device.

        global batch ──► part 0 ──► replica 0: forward, backward ──┐            ┌─► optimizer on replica 0
                    └──► part 1 ──► replica 1: forward, backward ──┴─ all-reduce ┴─► optimizer on replica 1

    Each replica computes its part of the global loss (see `tfpar.reduction`), the gradients are summed, and then
    every replica runs the optimizer on the same sums, so that clipping, accumulation and moving averages are those
    of one device.

    Args:
        devices: Device names such as `["GPU:0", "GPU:1"]`; None takes all GPUs, or, on a machine without one, all
            logical CPUs (see `tfpar.use_logical_cpus`).
        all_reduce: How gradients are summed. On GPUs `"nccl"`, `"hierarchical_copy"`, `"reduction_to_one_device"`,
            or `"auto"` for TensorFlow's choice. On CPUs always `"reduction_to_one_device"`: TensorFlow's default
            crashes there when one process trains a second model (README, table of facts).
        pack_bytes: Gradients are sent in packs of about this many bytes; None leaves it to TensorFlow.

    Raises:
        ValueError: If a device does not exist or is named twice, or the all-reduce does not run on the devices.

    Example:
        >>> tfpar.use_logical_cpus(2)
        >>> strategy = tfpar.Mirrored()
        >>> strategy.num_replicas
        2
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        all_reduce: AllReduce = "auto",
        pack_bytes: int | None = None,
    ) -> None:
        self.devices = cluster.resolve_devices(devices)
        if pack_bytes is not None and pack_bytes < 1:
            raise ValueError(f"pack_bytes must be at least 1, received {pack_bytes}. Leave it out for the default.")
        cross_device_ops = _cross_device_ops(all_reduce, self.devices, packs_itself=pack_bytes is not None)
        self._setup(tf.distribute.MirroredStrategy(self.devices, cross_device_ops), pack_bytes)

    @classmethod
    def of(cls, strategy: tf.distribute.MirroredStrategy) -> Mirrored:
        """Wrap a `tf.distribute.MirroredStrategy` in whose scope a model was built."""
        mirrored = cls.__new__(cls)
        devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        mirrored.devices = [f"{device.device_type}:{device.device_index}" for device in devices]
        if all(device.startswith("CPU") for device in mirrored.devices):
            _compat.reduce_on_one_device(strategy)
        mirrored._setup(strategy, None)
        return mirrored

    def _setup(self, strategy: tf.distribute.MirroredStrategy, pack_bytes: int | None) -> None:
        self._strategy = strategy
        self._pack_bytes = pack_bytes
        self._divisions: weakref.WeakKeyDictionary[keras.Model, Division] = weakref.WeakKeyDictionary()
        self.num_replicas = strategy.num_replicas_in_sync

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and its optimizer are created."""
        scope: contextlib.AbstractContextManager[Any] = self._strategy.scope()
        return scope

    def describe(self) -> str:
        """Say in one line which devices hold a replica."""
        replicas = "1 replica" if self.num_replicas == 1 else f"{self.num_replicas} replicas"
        return f"Mirrored over {replicas} on {', '.join(self.devices)}"

    def distribute(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Split every global batch into one part a replica, in TensorFlow's input threads, ahead of the step.

        A batch with fewer examples than replicas is not split: every replica gets all of it, and counts a share of
        it. So no replica ever runs on nothing, which layers, and TensorFlow's fused convolutions, do not expect.

        Args:
            dataset: Global batches.

        Returns:
            Elements `(parts, num_examples)`: a tuple of one part a replica, and the size of the global batch.
        """
        in_tuples = isinstance(dataset.element_spec, tuple)

        def split(*elements: Any) -> Any:
            batch = elements if in_tuples else elements[0]
            num_examples = count_examples(batch)
            parts = tf.cond(
                num_examples < self.num_replicas,
                lambda: (batch,) * self.num_replicas,
                lambda: data.split_batch(batch, self.num_replicas),
            )
            return parts, num_examples

        return dataset.map(split, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)

    def global_batch(self, element: Any) -> Any:
        """Return the global batch whose parts the element holds."""
        parts, num_examples = element
        return _whole(parts, num_examples)

    def check_scope(self, model: keras.Model) -> None:
        """Refuse a model whose weights are not on every replica.

        Raises:
            ValueError: If it was built outside of this strategy's scope.
        """
        if model.distribute_strategy is not self._strategy:
            raise ValueError(
                f"{model.name!r} must be built inside the strategy's scope, and it was built outside. "
                "Build it in the model function that tfpar.Trainer calls."
            )

    def prepare(self, model: keras.Model, batch: Any) -> None:
        """Refuse what replicas would silently compute differently; find out how added losses divide.

        Raises:
            ValueError: If a loss, or a loss added by a layer, cannot be divided over replicas.
        """
        if self.num_replicas > 1:
            self._divisions[model] = Division(model, batch)

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one optimizer update on the parts of a global batch; return the global loss, a scalar."""

        def on_replica(part: Any, counted: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(part)
            with _own_metrics_counted(model, counted):
                loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            _update_metrics(model, loss, counted, inputs, targets, outputs, weights)
            return loss, reduction.all_reduce_gradients(gradients, self._pack_bytes)

        loss, gradients = self._run(model, on_replica, batch, training=True)
        variables = model.trainable_variables
        if variables:
            # `update` calls the function once on each replica, where every variable stands for its local copy.
            with _compat.one_device_optimizer():
                self._strategy.extended.update(
                    variables[0].value,
                    lambda _, sums: model.optimizer.apply(sums, variables),
                    args=(gradients,),
                    group=False,
                )
        return loss

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from the parts of a global batch; return the global loss, a scalar."""

        def on_replica(part: Any, counted: tf.Tensor) -> tuple[tf.Tensor]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(part)
            with _own_metrics_counted(model, counted):
                loss, outputs = forward(model, inputs, targets, weights)
            _update_metrics(model, loss, counted, inputs, targets, outputs, weights)
            return (loss,)

        (loss,) = self._run(model, on_replica, batch, training=False)
        return loss

    def predict_step(self, model: keras.Model, batch: Any) -> Any:
        """Return the model's outputs, `[batch, ...]` each, in the order of the global batch."""
        parts, num_examples = batch

        def on_replica(parts: Sequence[Any]) -> Any:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(parts[replica_id()])
            return _compat.call_model(model, inputs, training=False)

        outputs = self._strategy.run(on_replica, args=(parts,))
        copies = zip(*map(self._strategy.experimental_local_results, tf.nest.flatten(outputs)), strict=True)
        return _whole([tf.nest.pack_sequence_as(outputs, copy) for copy in copies], num_examples)

    def end_call(self, model: keras.Model) -> None:
        """Average the moving statistics that each replica kept by itself."""
        for variable in _own_statistics(model) if self.num_replicas > 1 else []:
            copies = self._strategy.experimental_local_results(variable.value)
            mean = tf.add_n([copy.read_value() for copy in copies]) / tf.cast(len(copies), copies[0].dtype)
            for copy in copies:
                copy.assign(mean)

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights on every replica with their moving average where the optimizer keeps one."""
        if model.trainable_variables:
            with self.scope(), _compat.one_device_optimizer():
                self._strategy.extended.update(
                    model.trainable_variables[0].value,
                    lambda _: model.optimizer.finalize_variable_values(model.trainable_variables),
                    group=False,
                )

    def _run(self, model: keras.Model, on_replica: Callable[[Any, tf.Tensor], Any], batch: Any, training: bool) -> Any:
        """Run a function on every replica with all losses reduced globally.

        Args:
            model: The model.
            on_replica: Takes the replica's part and how many of its examples count in metrics; returns a tuple that
                begins with the loss.
            batch: An element of the distributed dataset.
            training: Whether the model trains.

        Returns:
            What the function returned, the loss as replica 0 has it.
        """
        parts, num_examples = batch
        on_all = num_examples < self.num_replicas
        share = tf.where(on_all, tf.constant(1.0 / self.num_replicas, tf.float64), 1.0)
        sizes = [count_examples(part) for part in parts]
        counted = [tf.where(on_all, num_examples if index == 0 else 0, size) for index, size in enumerate(sizes)]

        def on_own_part(parts: Sequence[Any]) -> Any:
            return on_replica(parts[replica_id()], counted[replica_id()])

        with contextlib.ExitStack() as stack:
            stack.enter_context(_compat.replica_seeds(replica_id))
            if model in self._divisions:
                stack.enter_context(self._divisions[model].over_replicas(training, sizes, share))
            if model.jit_compile:
                # Compiles clusters of operations: XLA has no way through the communication between them.
                stack.enter_context(tf.xla.experimental.jit_scope())
            loss, *others = self._strategy.run(on_own_part, args=(parts,))
        return self._strategy.experimental_local_results(loss)[0], *others


@contextlib.contextmanager
def _own_metrics_counted(model: keras.Model, counted: tf.Tensor) -> Iterator[None]:
    """Take back what layers add to metrics of theirs where another replica counts the examples."""
    states = [variable for metric in _compat.own_metrics(model) for variable in metric.variables]
    before = [tf.identity(variable.value) for variable in states]
    yield
    for variable, value in zip(states, before, strict=True):
        variable.assign(tf.where(counted > 0, variable.value, value))


def _update_metrics(model: keras.Model, loss: tf.Tensor, counted: tf.Tensor, *batch: Any) -> None:
    """Update the metrics with a replica's examples, unless another replica counts them."""

    def update() -> tf.Tensor:
        update_metrics(model, loss, counted, *batch)
        return tf.constant(True)

    tf.cond(counted > 0, update, lambda: tf.constant(False))


def _whole(parts: Sequence[Any], num_examples: tf.Tensor) -> Any:
    """Put the parts together again; where every part is the whole, the first is enough."""
    return data.take_rows(data.join_batches(parts), 0, num_examples)


def _cross_device_ops(
    all_reduce: AllReduce, devices: Sequence[str], packs_itself: bool
) -> tf.distribute.CrossDeviceOps | None:
    if all_reduce not in ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device"):
        raise ValueError(
            f"all_reduce must be 'auto', 'nccl', 'hierarchical_copy' or 'reduction_to_one_device', "
            f"received {all_reduce!r}."
        )
    on_gpus = all(device.startswith("GPU") for device in devices)
    if all_reduce in ("nccl", "hierarchical_copy") and not on_gpus:
        raise ValueError(
            f"all_reduce={all_reduce!r} needs GPUs, and the devices are {list(devices)}. Use 'auto' on CPUs."
        )
    num_packs = 0 if packs_itself else 1
    if all_reduce == "nccl":
        return tf.distribute.NcclAllReduce(num_packs)
    if all_reduce == "hierarchical_copy":
        return tf.distribute.HierarchicalCopyAllReduce(num_packs)
    if all_reduce == "reduction_to_one_device" or not on_gpus:
        return tf.distribute.ReductionToOneDevice()
    return None


def _own_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving statistics that each replica keeps from its own examples."""
    return [
        variable
        for layer in _compat.all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
