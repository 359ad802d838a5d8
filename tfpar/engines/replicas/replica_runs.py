"""Runs of one model's functions on all replicas, with losses and layers that are computed on the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data, host_sizes
from tfpar._compat.models import keras_losses, keras_losses_in_call, keras_model
from tfpar._compat.random_numbers import random_state
from tfpar.engines.one_device import forward_backward
from tfpar.engines.replicas.replica_states import average_by_examples, layer_metrics_counted_once, update_metrics_once
from tfpar.engines.steps.batches_ahead import HOST
from tfpar.engines.steps.compiled_calls import call_with_xla, groups_compiled, suits
from tfpar.reduction import objective, own_step
from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.losses_of_parts import LossReduction
from tfpar.reduction.replicas import local_replica_id, replica_id, sum_over_replicas
from tfpar.reduction.verdict import Verdict
from tfpar.reduction.whole_batch import AllGather, RowsOfReplicas, has_all_rows, knowing, weight_of_scalar
from tfpar.study.gathered_calls import with_whole_batch
from tfpar.study.mixing_layers import Mixing


class ReplicaRuns:
    """Run functions of one model on all replicas.

    Args:
        strategy: The `tf.distribute` strategy of the replicas.
        num_replicas: Replicas of all workers together.
        compiles_calls: Whether XLA compiles calls of the model as a whole, with `jit_compile`. Between workers it would
            delay the gradients of the last layers, and hide their factors.
        all_gather: Returns the rows of all replicas for those of the calling one; None for none.

    Attributes:
        losses: The reduction of the model's losses over replicas; None for one replica and for objectives.
        gathered: The calls that take the whole batch, by whether the model trains.
        averaged: The weights that layers update, to whose mean over the replicas each step sets them, by whether the
            model trains.
        eager_kinds: Of a model that runs eagerly, for each objective the kind of the rows of each weight's gradient;
            None for none, and for one that is summed as a dense gradient.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        num_replicas: int,
        *,
        compiles_calls: bool,
        all_gather: AllGather | None = None,
    ) -> None:
        self._strategy, self._num_replicas, self._compiles_calls = strategy, num_replicas, compiles_calls
        self._all_gather = all_gather
        self._generator = random_state.GeneratorOnReplicas(strategy)
        self._compilation: Any = None
        self.losses: LossReduction | None = None
        self.gathered: dict[bool, list[Mixing]] = {}
        self.averaged: dict[bool, list[keras.Variable]] = {}
        self.eager_kinds: list[list[indexed_slices.Kind | None]] = []

    def gathering(self, *modes: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which batch-dependent layers take the whole batch.

        Args:
            *modes: True for the layers that depend on the batch in training, False for those in inference; none for
                both.
        """
        return with_whole_batch([call for mode in modes or (True, False) for call in self.gathered.get(mode, ())])

    def call(self, model: keras.Model, inputs: Any, training: bool) -> Any:
        """Call a model on a replica; XLA compiles the call if the model was compiled so, and if it can."""
        call = call_with_xla if self._compiles_call(model, training) else keras_model.call_model
        return call(model, inputs, training)

    def _compiles_call(self, model: keras.Model, training: bool) -> bool:
        if not (model.jit_compile and self._compiles_calls and self._num_replicas > 1) or self.gathered.get(training):
            return False
        adds_losses = self.losses is not None and self.losses.adds_losses(training)
        return suits(model) and not adds_losses

    def begin(self, model: keras.Model) -> None:
        """Begin anew if the model was compiled again: with other losses, and the present random state."""
        compilation = keras_model.compilation(model)
        if compilation is None or compilation is self._compilation:
            return
        self._compilation, self._generator = compilation, random_state.GeneratorOnReplicas(self._strategy)
        has_parts = self._num_replicas > 1 and not objective.objectives_of(model)
        self.losses = LossReduction(model) if has_parts else None

    def note(self, model: keras.Model, verdict: Verdict, gathered: Sequence[Mixing], kind: str) -> None:
        """Note how parts of a batch give the whole in the next steps of a kind.

        Args:
            model: A built model.
            verdict: What a study found.
            gathered: The layers to call with the whole batch.
            kind: "train", "evaluate" or "predict".
        """
        training = kind == "train"
        self.gathered[training] = list(gathered)
        self.averaged[training] = [model.weights[number] for number in verdict.averaged]
        if self.losses is not None and kind != "predict":
            self.losses.verdicts[training] = verdict

    def verdict(self, training: bool) -> Verdict:
        """Return what a study found about the losses and metrics of the model."""
        return Verdict() if self.losses is None else self.losses.verdicts.get(training, Verdict())

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Draw different random numbers on every replica inside this context, with and without a seed."""
        with self._generator.in_place(), random_state.replica_seeds(replica_id):
            yield

    def run(self, model: keras.Model, on_replica: Callable[[Any, tf.Tensor], Any], batch: Any, training: bool) -> Any:
        """Run a function on every replica, and reduce all losses in it over the replicas.

        Args:
            model: The model.
            on_replica: Takes the per-replica batch and the number of its examples to count in metrics; returns a tuple
                whose first item is the loss.
            batch: An element of the distributed dataset.
            training: Whether the model trains.

        Returns:
            The tuple of the function; its loss is that of the first local replica.
        """
        parts, num_counted, example_weight, num_examples = batch
        sizes = [
            _size(part, device) for part, device in zip(parts, self._strategy.extended.worker_devices, strict=True)
        ]
        sums: dict[int, tf.Tensor] = {}
        fractions: dict[int, tf.Tensor] = {}

        def on_own_part(parts: Sequence[Any]) -> Any:
            replica = local_replica_id()
            counted_here = _of_replica(num_counted, replica)
            # Where no worker has the global batch: one sum for all losses and metrics, before the forward pass.
            sums[replica], fractions[replica] = _share(counted_here, num_examples)
            results = on_replica(parts[replica], counted_here)
            average_by_examples(self.averaged.get(training, ()), fractions[replica])
            return results

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._drawing())
            weight = lambda _: weight_of_scalar(fractions.get(local_replica_id()))  # noqa: E731
            stack.enter_context(keras_losses_in_call.scalars_weighted(weight, has_all_rows))
            stack.enter_context(knowing(self._rows(num_counted, example_weight, num_examples)))
            stack.enter_context(self.gathering(training))
            if self.losses is not None:
                everywhere = (lambda: sums[local_replica_id()]) if num_examples is None else num_examples
                stack.enter_context(self.losses.reduce_globally(training, sizes, example_weight, everywhere))
            if model.jit_compile and not self._compiles_call(model, training):
                stack.enter_context(groups_compiled(model))
            loss, *others = self._on_replicas(model, on_own_part, parts)
        return self._strategy.experimental_local_results(loss)[0], *others

    def run_alone(self, model: keras.Model, on_replica: Callable[..., Any], batch: Any) -> Any:
        """Run a function on every replica, with losses of its own examples.

        Args:
            model: The model.
            on_replica: Takes the per-replica batch, the number of its examples to count, their share of the global
                batch, and the weight of an example in losses.
            batch: An element of the distributed dataset.

        Returns:
            What the function returns, for all replicas.
        """
        parts, num_counted, example_weight, num_examples = batch

        def on_own_part(parts: Sequence[Any]) -> Any:
            replica = local_replica_id()
            counted_here = _of_replica(num_counted, replica)
            _, share = _share(counted_here, num_examples)
            return on_replica(parts[replica], counted_here, share, example_weight)

        rows = self._rows(num_counted, example_weight, num_examples)
        with self._drawing(), keras_losses.local_losses(), knowing(rows):
            return self._on_replicas(model, on_own_part, parts)

    def train_locally(self, model: keras.Model, batch: Any, apply: Callable[..., None]) -> None:
        """Do one optimizer update on every replica with the gradients of its own loss.

        Args:
            model: The model.
            batch: An element of the distributed dataset.
            apply: Runs an optimizer on every replica with weights and their gradients.
        """
        parts, num_counted, example_weight, num_examples = batch
        rows = self._rows(num_counted, example_weight, num_examples)

        def on_replica(parts: Sequence[Any]) -> list[Any]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(parts[local_replica_id()])
            counts = _of_replica(num_counted, local_replica_id())
            with layer_metrics_counted_once(model, counts):
                loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            update_metrics_once(model, loss, counts, (inputs, targets, outputs, weights), self.verdict(True))
            # A padding batch contributes zero gradient.
            return [_where(example_weight > 0, gradient) for gradient in gradients]

        with self._drawing(), keras_losses.local_losses(), knowing(rows):
            gradients = self._on_replicas(model, on_replica, parts)
            apply(model, model.optimizer, model.trainable_variables, gradients)

    def predict(self, model: keras.Model, batch: Any, then: Callable[[Any], Any]) -> list[Any]:
        """Run the model on every replica, and a function on its outputs there.

        Args:
            model: The model.
            batch: An element of the distributed dataset.
            then: Takes the outputs of a replica.

        Returns:
            The result of the function on each local replica.
        """

        def on_replica(parts: Sequence[Any]) -> Any:
            replica, averaged = local_replica_id(), self.averaged.get(False)
            if own_step.overrides(model, "predict"):
                return then(own_step.call(model, "predict", parts[replica]))
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(parts[replica])
            outputs = self.call(model, inputs, training=False)
            if averaged:
                _, fraction = _share(_of_replica(num_counted, replica), num_examples)
                average_by_examples(averaged, fraction)
            return then(outputs)

        parts, num_counted, example_weight, num_examples = batch
        rows = self._rows(num_counted, example_weight, num_examples)
        with self._drawing(), knowing(rows), self.gathering(False):
            outputs = self._on_replicas(model, on_replica, parts)
        copies = zip(*map(self._strategy.experimental_local_results, tf.nest.flatten(outputs)), strict=True)
        return [tf.nest.pack_sequence_as(outputs, copy) for copy in copies]

    def _rows(
        self, num_counted: Sequence[tf.Tensor], example_weight: tf.Tensor, num_examples: tf.Tensor | None
    ) -> RowsOfReplicas:
        return RowsOfReplicas(num_counted, example_weight, self._num_replicas, num_examples, self._all_gather)

    def _on_replicas(self, model: keras.Model, function: Callable[[Sequence[Any]], Any], parts: Sequence[Any]) -> Any:
        """Run a function of the parts of a batch on every replica, with sizes on the host without XLA."""

        def here(parts: Sequence[Any]) -> Any:
            device = self._strategy.extended.worker_devices[local_replica_id()]
            with contextlib.nullcontext() if model.jit_compile else host_sizes.sizes_on_host(device):
                return function(parts)

        return self._strategy.run(here, args=(parts,))


def _share(counted_here: tf.Tensor, num_examples: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the size of the global batch, and the share of the calling replica's examples in it.

    Args:
        counted_here: The number of its examples to count.
        num_examples: The size of the global batch; None if no worker has it.
    """
    if num_examples is None:
        total = sum_over_replicas(counted_here)
        return total, tf.cast(counted_here / total, keras.config.floatx())
    with tf.device(HOST):
        return num_examples, tf.cast(counted_here / num_examples, keras.config.floatx())


def _of_replica(counts: tf.Tensor, replica: int) -> tf.Tensor:
    """Return a local replica's count in the memory of the host, which launches operations by it."""
    with tf.device(HOST):
        return counts[replica]


def _size(part: Any, device: str) -> tf.Tensor:
    """Return the number of examples of a per-replica batch on a device, on the host; a shape is there already."""
    first = next(leaf for leaf in tf.nest.flatten(part) if leaf is not None)
    if not isinstance(first, tf.Tensor):
        return data.num_rows(part)
    if first.shape.rank and first.shape[0] is not None:
        with tf.device(HOST):
            return tf.constant(first.shape[0], tf.int64)
    with tf.device(device):
        shape = tf.shape(first, out_type=tf.int64)
    with tf.device(HOST):
        return shape[0]


def _where(condition: tf.Tensor, gradient: Any) -> Any:
    """Return a gradient, or zero if the condition is false; indexed slices stay slices, for which Keras has updates."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_where(condition, gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient * tf.cast(condition, gradient.dtype)


def not_compiled(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Return the context of sums over replicas: XLA leaves them out of the groups of operations that it compiles.

    Else a group could wait for the message of another one, and a product and a sum could be rounded as one operation.

    Args:
        model: The model whose step is traced.
    """
    is_compiled = model.jit_compile and not tf.executing_eagerly()
    return tf.xla.experimental.jit_scope(compile_ops=False) if is_compiled else contextlib.nullcontext()
