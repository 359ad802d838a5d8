"""Runs of functions on all replicas, with losses and layers computed over the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data, host_sizes
from tfpar._compat.models import keras_losses, keras_losses_in_call, keras_model, keras_remat
from tfpar._compat.random_numbers import random_state
from tfpar.engines.one_device import forward_backward
from tfpar.engines.replicas.replica_states import average_by_examples, layer_metrics_counted_once, update_metrics_once
from tfpar.engines.steps.batches_ahead import HOST
from tfpar.engines.steps.compiled_calls import call_with_xla, groups_compiled, suits
from tfpar.reduction import objective, own_step
from tfpar.reduction.gradients import indexed_slices
from tfpar.reduction.loss_reduction import LossReduction
from tfpar.reduction.replicas import local_replica_id, replica_id, sum_over_replicas
from tfpar.reduction.verdict import Verdict
from tfpar.reduction.whole_batch import AllGather, ReplicaRows, RowsForMeans, has_all_rows, using_rows, weight_of_scalar
from tfpar.study.gathered_calls import with_whole_batch
from tfpar.study.mixing_layers import MixingLayer


class ReplicaRuns:
    """Runs functions of one model on all replicas.

    Args:
        strategy: The `tf.distribute` strategy of the replicas.
        shares: Relative size of the per-replica batch of each replica, on all workers.
        compiles_calls: Whether XLA compiles whole calls of a model with `jit_compile`. Between workers this would delay
            the gradients of the last layers and hide their sufficient factors.
        all_gather: Gathers the rows of all replicas; None if the replicas are in one process.

    Attributes:
        losses: Reduction of the model's losses over replicas; None for one replica and for objectives.
        gathered: Layer calls that take the whole batch, keyed by `training`.
        averaged: Non-trainable weights averaged across replicas after each step, keyed by `training`.
        eager_kinds: Kinds of the sparse gradient rows of each weight, by objective, for a model that runs eagerly; None
            for a gradient that is summed as a dense one.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        shares: Sequence[int],
        *,
        compiles_calls: bool,
        all_gather: AllGather | None = None,
    ) -> None:
        self._strategy, self._shares, self._compiles_calls = strategy, shares, compiles_calls
        self._all_gather = all_gather
        self._generator = random_state.GeneratorOnReplicas(strategy)
        self._compilation: Any = None
        self.losses: LossReduction | None = None
        self.gathered: dict[bool, list[MixingLayer]] = {}
        self.averaged: dict[bool, list[keras.Variable]] = {}
        self.eager_kinds: list[list[indexed_slices.Kind | None]] = []

    def gathering(self, *modes: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which batch-dependent layers take the whole batch.

        Args:
            *modes: Values of `training` whose layers are gathered; none for both.
        """
        return with_whole_batch([call for mode in modes or (True, False) for call in self.gathered.get(mode, ())])

    def call(self, model: keras.Model, inputs: Any, training: bool) -> Any:
        """Call a model on a replica, compiled by XLA if the model asks for it and XLA supports the call."""
        call = call_with_xla if self._compiles_call(model, training) else keras_model.call_model
        return call(model, inputs, training)

    def _compiles_call(self, model: keras.Model, training: bool) -> bool:
        if not (model.jit_compile and self._compiles_calls and len(self._shares) > 1) or self.gathered.get(training):
            return False
        adds_losses = self.losses is not None and self.losses.adds_losses(training)
        return suits(model) and not adds_losses and not keras_remat.recorded_layers(model)

    def begin(self, model: keras.Model) -> None:
        """Start over if the model was compiled again, with its new losses and the current random state."""
        compilation = keras_model.compilation(model)
        if compilation is None or compilation is self._compilation:
            return
        self._compilation, self._generator = compilation, random_state.GeneratorOnReplicas(self._strategy)
        has_parts = len(self._shares) > 1 and not objective.objectives_of(model)
        self.losses = LossReduction(model) if has_parts else None

    def note(self, model: keras.Model, verdict: Verdict, gathered: Sequence[MixingLayer], kind: str) -> None:
        """Set how the next steps of a kind combine the results of replicas.

        Args:
            model: A built model.
            verdict: The verdict of the study.
            gathered: Layer calls that take the whole batch.
            kind: "train", "evaluate" or "predict".
        """
        training = kind == "train"
        self.gathered[training] = list(gathered)
        self.averaged[training] = [model.weights[number] for number in verdict.averaged]
        if self.losses is not None and kind != "predict":
            self.losses.verdicts[training] = verdict

    def verdict(self, training: bool) -> Verdict:
        """Return the verdict of the study on the losses and metrics of the model."""
        return Verdict() if self.losses is None else self.losses.verdicts.get(training, Verdict())

    @contextlib.contextmanager
    def _separate_randomness(self) -> Iterator[None]:
        """Draw different random numbers on every replica inside this context, with or without seeds."""
        with self._generator.in_place(), random_state.replica_seeds(replica_id):
            yield

    def run(self, model: keras.Model, on_replica: Callable[[Any, tf.Tensor], Any], batch: Any, training: bool) -> Any:
        """Run a function on every replica, and reduce all losses in it over the replicas.

        Args:
            model: The model.
            on_replica: `(batch, num_counted) -> (loss, ...)`, from the per-replica batch and the number of its examples
                to count in metrics.
            batch: Batch of the step, `(batches, num_counted, example_weight, num_examples)`.
            training: Whether the model trains.

        Returns:
            The tuple of the function, with the loss of the first local replica.
        """
        batches, num_counted, example_weight, num_examples = batch
        sizes = list(map(_size, batches, self._strategy.extended.worker_devices))
        sums: dict[int, tf.Tensor] = {}
        fractions: dict[int, tf.Tensor] = {}

        def on_own_batch(batches: Sequence[Any]) -> Any:
            replica = local_replica_id()
            counted_here = _count_on_host(num_counted, replica)
            # If no worker has the global batch, its size is summed once, before the forward pass.
            sums[replica], fractions[replica] = _size_and_fraction(counted_here, num_examples)
            results = on_replica(batches[replica], counted_here)
            average_by_examples(self.averaged.get(training, ()), fractions[replica])
            return results

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._separate_randomness())
            weight = lambda _: weight_of_scalar(fractions.get(local_replica_id()))  # noqa: E731
            stack.enter_context(keras_losses_in_call.scalars_weighted(weight, has_all_rows))
            stack.enter_context(using_rows(self._rows(num_counted, example_weight, num_examples)))
            stack.enter_context(self.gathering(training))
            if self.losses is not None:
                everywhere = (lambda: sums[local_replica_id()]) if num_examples is None else num_examples
                stack.enter_context(self.losses.reduce_globally(training, sizes, example_weight, everywhere))
            if model.jit_compile and not self._compiles_call(model, training):
                stack.enter_context(groups_compiled(model))
            loss, *others = self._on_replicas(model, on_own_batch, batches)
        return self._strategy.experimental_local_results(loss)[0], *others

    def run_alone(self, model: keras.Model, on_replica: Callable[..., Any], batch: Any) -> Any:
        """Run a function on every replica, with losses of its own examples.

        Args:
            model: The model.
            on_replica: Takes the per-replica batch, the number of its examples to count, their fraction of the global
                batch, and the weight of an example in losses.
            batch: As for `run`.

        Returns:
            What the function returns, for all replicas.
        """
        batches, num_counted, example_weight, num_examples = batch

        def on_own_batch(batches: Sequence[Any]) -> Any:
            replica = local_replica_id()
            counted_here = _count_on_host(num_counted, replica)
            _, fractions[replica] = _size_and_fraction(counted_here, num_examples)
            return on_replica(batches[replica], counted_here, fractions[replica], example_weight)

        fractions: dict[int, tf.Tensor] = {}
        settings = (num_counted, example_weight, self._shares, num_examples, self._all_gather)
        rows = RowsForMeans(*settings, fraction=lambda: fractions[local_replica_id()])
        with self._separate_randomness(), keras_losses.local_losses(), using_rows(rows):
            return self._on_replicas(model, on_own_batch, batches)

    def train_locally(self, model: keras.Model, batch: Any, apply: Callable[..., None]) -> None:
        """Run one optimizer update on every replica, with the gradients of its own loss.

        Args:
            model: The model.
            batch: As for `run`.
            apply: Runs an optimizer on every replica with weights and their gradients.
        """
        batches, num_counted, example_weight, num_examples = batch
        rows = self._rows(num_counted, example_weight, num_examples)

        def on_replica(batches: Sequence[Any]) -> list[Any]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batches[local_replica_id()])
            counted_here = _count_on_host(num_counted, local_replica_id())
            with layer_metrics_counted_once(model, counted_here):
                loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            update_metrics_once(model, loss, counted_here, (inputs, targets, outputs, weights), self.verdict(True))
            # The gradients of a padding batch are zero.
            return [_zero_unless(example_weight > 0, gradient) for gradient in gradients]

        with self._separate_randomness(), keras_losses.local_losses(), using_rows(rows):
            gradients = self._on_replicas(model, on_replica, batches)
            apply(model, model.optimizer, model.trainable_variables, gradients)

    def predict(self, model: keras.Model, batch: Any, then: Callable[[Any], Any]) -> list[Any]:
        """Run the model on every replica, and a function on its outputs there.

        Args:
            model: The model.
            batch: As for `run`.
            then: Takes the outputs of a replica.

        Returns:
            The result of the function for each local replica.
        """

        def on_replica(batches: Sequence[Any]) -> Any:
            replica, averaged = local_replica_id(), self.averaged.get(False)
            if own_step.overrides(model, "predict"):
                return then(own_step.call(model, "predict", batches[replica]))
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batches[replica])
            outputs = self.call(model, inputs, training=False)
            if averaged:
                _, fraction = _size_and_fraction(_count_on_host(num_counted, replica), num_examples)
                average_by_examples(averaged, fraction)
            return then(outputs)

        batches, num_counted, example_weight, num_examples = batch
        rows = self._rows(num_counted, example_weight, num_examples)
        with self._separate_randomness(), using_rows(rows), self.gathering(False):
            outputs = self._on_replicas(model, on_replica, batches)
        copies = zip(*map(self._strategy.experimental_local_results, tf.nest.flatten(outputs)), strict=True)
        return [tf.nest.pack_sequence_as(outputs, copy) for copy in copies]

    def _rows(
        self, num_counted: Sequence[tf.Tensor], example_weight: tf.Tensor, num_examples: tf.Tensor | None
    ) -> ReplicaRows:
        return ReplicaRows(num_counted, example_weight, self._shares, num_examples, self._all_gather)

    def _on_replicas(self, model: keras.Model, function: Callable[[Sequence[Any]], Any], batches: Sequence[Any]) -> Any:
        """Run a function of the per-replica batches on every replica; without XLA, sizes stay on the host."""

        def here(batches: Sequence[Any]) -> Any:
            device = self._strategy.extended.worker_devices[local_replica_id()]
            with contextlib.nullcontext() if model.jit_compile else host_sizes.sizes_on_host(device):
                return function(batches)

        return self._strategy.run(here, args=(batches,))


def _size_and_fraction(counted_here: tf.Tensor, num_examples: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the size of the global batch, and the fraction of it that the calling replica counts.

    Args:
        counted_here: Number of examples that the replica counts.
        num_examples: Size of the global batch; None if no worker has all of it.
    """
    if num_examples is None:
        total = sum_over_replicas(counted_here)
        return total, tf.cast(counted_here / total, keras.config.floatx())
    with tf.device(HOST):
        return num_examples, tf.cast(counted_here / num_examples, keras.config.floatx())


def _count_on_host(counts: tf.Tensor, replica: int) -> tf.Tensor:
    """Return the count of a local replica in the memory of the host, which decides by it."""
    with tf.device(HOST):
        return counts[replica]


def _size(batch: Any, device: str) -> tf.Tensor:
    """Return the size of a per-replica batch in the memory of the host, where TensorFlow keeps shapes."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    if not isinstance(first, tf.Tensor):
        return data.num_rows(batch)
    if first.shape.rank and first.shape[0] is not None:
        with tf.device(HOST):
            return tf.constant(first.shape[0], tf.int64)
    with tf.device(device):
        shape = tf.shape(first, out_type=tf.int64)
    with tf.device(HOST):
        return shape[0]


def _zero_unless(condition: tf.Tensor, gradient: Any) -> Any:
    """Return a gradient, or zero if the condition is false; slices stay slices, for Keras' sparse updates."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_zero_unless(condition, gradient.values), gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient * tf.cast(condition, gradient.dtype)


def not_compiled(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Return a context for sums over replicas, which XLA must leave out of the groups that it compiles.

    Otherwise a group could wait for the message of another, and a product and a sum could be rounded as one operation.

    Args:
        model: The model whose step is traced.
    """
    is_compiled = model.jit_compile and not tf.executing_eagerly()
    return tf.xla.experimental.jit_scope(compile_ops=False) if is_compiled else contextlib.nullcontext()
