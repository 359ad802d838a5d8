"""Data parallelism: every replica holds the model, takes its part of each global batch, and applies the same sums."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, keras_variables, random_state
from tfpar.data import Sharded
from tfpar.per_model import PerModel
from tfpar.reduction import indexed_slices, objective, replicas
from tfpar.reduction.loss_decomposition import LossDecomposition
from tfpar.reduction.replicas import local_replica_id, replica_id
from tfpar.reduction.whole_batch import RowsOfReplicas, knowing
from tfpar.strategies import batch_dependence as mixings
from tfpar.strategies import objective_steps
from tfpar.strategies.base import Distributed, Strategy
from tfpar.strategies.batch_parts import split_into_parts
from tfpar.strategies.gradient_sums import sum_gradients
from tfpar.strategies.lookup_trials import find_kinds, may_look_up
from tfpar.strategies.replica_states import (
    assign_local_parts,
    average_statistics,
    local_parts,
    own_metrics_counted,
    own_statistics,
    summed_variables,
    update_counted_metrics,
)
from tfpar.strategies.single_device import forward, forward_backward


class DataParallel(Strategy):
    """What `Mirrored` and `MultiWorker` have in common: the steps on the replicas of a `tf.distribute` strategy.

        global batch ──► part 0 ──► replica 0: forward, backward ──┐            ┌─► optimizer on replica 0
                    └──► part 1 ──► replica 1: forward, backward ──┴─ all-reduce ┴─► optimizer on replica 1

    Each replica computes its part of the global loss (see `tfpar.reduction.losses`), the gradients are summed, and
    then every replica runs the optimizer on the same sums, so that clipping, accumulation and moving averages are
    those of one device.

    Args:
        strategy: The `tf.distribute` strategy that holds variables and runs functions on the local replicas.
        pack_bytes: Gradients are sent in packs of about this many bytes; None leaves it to TensorFlow.
        batch_dependent_layers: "refuse" layers that mix the examples of a batch, or "gather" the batch for them.
    """

    _compression: str | None = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        pack_bytes: int | None,
        batch_dependent_layers: mixings.BatchDependentLayers = "refuse",
    ) -> None:
        keras_variables.convert_replicated_variables()
        self.home = self._strategy = strategy
        strategy.tfpar_strategy = self  # found again by the variables of a model, with its options
        self._batch_dependent_layers = batch_dependent_layers
        self._mixed: PerModel[dict[bool, list[mixings.Mixed]]] = PerModel()  # by whether the model trains
        self._pack_bytes = pack_bytes
        self._divisions: PerModel[LossDecomposition] = PerModel()
        self._generators: PerModel[random_state.GeneratorOnReplicas] = PerModel()
        self._kinds: PerModel[list[list[list[indexed_slices.Kind]]]] = PerModel()
        self.num_replicas = strategy.num_replicas_in_sync
        self._num_local_replicas = len(strategy.extended.worker_devices)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the model and its optimizer are created."""
        scope = contextlib.ExitStack()
        scope.enter_context(self._strategy.scope())
        scope.enter_context(keras_losses.undivided())  # a Functional model may hold a loss among its operations
        return scope

    def distribute(self, dataset: tf.data.Dataset | Sharded) -> Distributed:
        """Split every global batch into one part a replica, in TensorFlow's input threads, ahead of the step.

        A batch with fewer examples than replicas is not split: every replica gets all of it, and counts a share of
        it. So no replica ever runs on nothing, which layers, and TensorFlow's fused convolutions, do not expect.

        Args:
            dataset: Global batches, or examples in shards.

        Returns:
            Elements `(parts, sizes, share, num_examples)`: a tuple of one part for each replica of this process, how
            many of its examples each counts, what an example counts, and the size of the global batch, None where no
            worker knows it.
        """
        if isinstance(dataset, Sharded):
            return self._distribute_shards(dataset)
        in_tuples = isinstance(dataset.element_spec, tuple)

        @tf.autograph.experimental.do_not_convert  # takes half a second in every process
        def split(*elements: Any) -> Any:
            batch = elements if in_tuples else elements[0]
            first = self.rank * self._num_local_replicas
            own = slice(first, first + self._num_local_replicas)
            return split_into_parts(batch, data.num_rows(batch), self.num_replicas, own)

        return Distributed(dataset.map(split, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE))

    def _distribute_shards(self, sharded: Sharded) -> Distributed:
        return self.distribute(sharded.whole())

    def local_batch(self, element: Any) -> Any:
        """Return the examples of the element's parts, each once."""
        parts, _, share, _ = element
        return parts[0] if share < 1 else data.join_batches(parts)

    def num_examples(self, element: Any, distributed: Distributed) -> tf.Tensor:
        """Return the size of the global batch, an int64 scalar."""
        return tf.cast(element[3], tf.int64)

    def prepare(self, model: keras.Model, batch: Any) -> None:
        """Refuse what replicas would silently compute differently; find out how added losses divide.

        Raises:
            ValueError: If a loss, or a loss added by a layer, cannot be divided over replicas.
        """
        self._generators[model] = random_state.GeneratorOnReplicas(self._strategy)
        if self.num_replicas > 1:
            if objective.objectives_of(model):
                with self.together():
                    objective.check(model, batch)
                return
            with self.together(), random_state.preserved_random_state(), self._gathered(model):
                self._divisions[model] = LossDecomposition(model, batch)

    def prepare_loss(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Find out how rows that are looked up add up, and how what an overridden `compute_loss` returns divides.

        Raises:
            ValueError: If they do not.
        """
        if training and self.num_replicas > 1 and may_look_up(model, batch):
            self._find_kinds(model, batch)
        if model in self._divisions:
            with self.together(), self._gathered(model):
                self._divisions[model].find_own_loss(model, batch, training)

    def _find_kinds(self, model: keras.Model, batch: Any) -> None:
        with self.together(), self._gathered(model):
            found = find_kinds(model, batch, self._strategy.run)
        self._kinds[model] = json.loads(self.broadcast(json.dumps(found).encode()))

    def prepare_outputs(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Refuse a model whose outputs for an example depend on the others of its batch, or gather the batch for it."""
        if model not in self._generators:
            self._generators[model] = random_state.GeneratorOnReplicas(self._strategy)
        if self.num_replicas > 1:
            self._check_mixing(model, batch, training)
            if self._batch_dependent_layers == "gather":  # losses are tried in both modes, whichever follows
                with contextlib.suppress(Exception):
                    self._check_mixing(model, batch, not training)

    @contextlib.contextmanager
    def _draws(self, model: keras.Model) -> Iterator[None]:
        """Let every replica draw random numbers of its own inside this context, with and without a seed."""
        with self._generators[model].in_place(), keras_model.replica_seeds(replica_id):
            yield

    def _check_mixing(self, model: keras.Model, batch: Any, training: bool) -> None:
        with self.together():
            names = mixings.find(model, batch, training)
        names = self._agree_on(names)
        if names and self._batch_dependent_layers == "refuse":
            raise mixings.refusal(names, gathers=False, training=training)
        with self.together():
            mixed = mixings.resolve(model, batch, names, training) if names else []
        self._mixed.setdefault(model, {})[training] = mixed

    def _gathered(self, model: keras.Model, *modes: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which what mixes in training (True) or in inference (False) has the whole batch."""
        found = self._mixed.get(model) or {}
        return mixings.on_whole_batch([mixed for mode in modes or (True, False) for mixed in found.get(mode, ())])

    def _agree_on(self, names: list[str]) -> list[str]:
        """Return the names that the first worker with any found."""
        return names

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Do one update, or one for each objective, on the parts of a global batch; return the global loss."""
        if objective.objectives_of(model):
            return objective_steps.train(model, batch, self._run, self._sum_gradients, self._apply, own_metrics_counted)
        _, _, share, _ = batch

        def on_replica(part: Any, counted: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(part)
            with own_metrics_counted(model, counted):
                loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            if model in self._divisions and self._divisions[model].partial_values:
                *gradients, loss = self._sum_gradients(model, [*gradients, loss], share, counted)
            else:
                gradients = self._sum_gradients(model, gradients, share, counted)
            update_counted_metrics(model, loss, counted, inputs, targets, outputs, weights)
            return loss, gradients

        loss, gradients = self._run(model, on_replica, batch, training=True)
        self._apply(model.optimizer, model.trainable_variables, gradients)
        return loss

    def _sum_gradients(
        self, model: keras.Model, gradients: Sequence[Any], share: tf.Tensor, counted: tf.Tensor, number: int = 0
    ) -> list[Any]:
        """Sum the gradients over all replicas, and the loss, a scalar, behind them; called in replica context.

        Args:
            model: The model.
            gradients: This replica's.
            share: What each of its examples counts.
            counted: How many of its examples it counts.
            number: Of the objective, where the model has several.
        """
        kinds = self._kinds[model][number] if model in self._kinds else None
        return sum_gradients(gradients, kinds, share, counted, self._pack_bytes, self._compression)

    def _apply(self, optimizer: Any, variables: Sequence[keras.Variable], gradients: Any) -> None:
        """Run an optimizer on every replica, where every variable stands for its local copy."""
        if variables:
            with keras_model.one_device_optimizer():
                self._strategy.extended.update(
                    variables[0].value,
                    lambda _, sums: optimizer.apply(sums, variables),
                    args=(gradients,),
                    group=False,
                )

    def _train_apart(self, model: keras.Model, batch: Any) -> None:
        """Do one optimizer update on every replica with the gradient of its own part's loss."""
        parts, counted, share, _ = batch

        def on_replica(parts: Sequence[Any]) -> list[Any]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(parts[local_replica_id()])
            counts = counted[local_replica_id()]
            with own_metrics_counted(model, counts):
                loss, outputs, gradients = forward_backward(model, inputs, targets, weights)
            update_counted_metrics(model, loss, counts, inputs, targets, outputs, weights)
            # A stand-in for examples that are not there moves nothing.
            is_some = tf.cast(share > 0, tf.float32)
            return [None if gradient is None else gradient * tf.cast(is_some, gradient.dtype) for gradient in gradients]

        with self._draws(model), keras_model.local_losses():
            gradients = self._strategy.run(on_replica, args=(parts,))
            self._apply(model.optimizer, model.trainable_variables, gradients)

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the model's metrics from the parts of a global batch; return the global loss, a scalar."""
        if objective.objectives_of(model):
            return objective_steps.evaluate(model, batch, self._run, own_metrics_counted)

        def on_replica(part: Any, counted: tf.Tensor) -> tuple[tf.Tensor]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(part)
            with own_metrics_counted(model, counted):
                loss, outputs = forward(model, inputs, targets, weights)
            update_counted_metrics(model, loss, counted, inputs, targets, outputs, weights)
            return (loss,)

        (loss,) = self._run(model, on_replica, batch, training=False)
        return loss

    def end_call(self, model: keras.Model) -> None:
        """Average the moving statistics that each replica kept by itself."""
        if self.num_replicas > 1:
            average_statistics(self._strategy, own_statistics(model))

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights on every replica with their moving average where the optimizer keeps one."""
        for optimizer, variables in objective.updates_of(model):
            if variables:
                with self.scope(), keras_model.one_device_optimizer():
                    self._strategy.extended.update(
                        variables[0].value,
                        lambda _, by=optimizer, of=variables: by.finalize_variable_values(of),
                        group=False,
                    )

    def metric_parts(self, model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
        """Return what each replica of all workers has counted, `[replicas, ...]`, by variable; all workers must ask."""
        variables = summed_variables(model) if self.num_replicas > 1 else []
        return list(zip(variables, self._gather([local_parts(self._strategy, one) for one in variables]), strict=True))

    def _gather(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """Return the parts of all workers' replicas, from those of this one's."""
        return parts

    def assign_parts(self, variable: keras.Variable, parts: np.ndarray) -> None:
        """Give each replica its part back, `[replicas, ...]`, if there are as many; the sum is assigned already."""
        if len(parts) == self.num_replicas and keras_model.is_summed_on_read(variable):
            assign_local_parts(self._strategy, variable, parts[self.rank * self._num_local_replicas :])

    def _predict(self, model: keras.Model, batch: Any, then: Callable[[Any], Any]) -> list[Any]:
        """Run the model on each part and a function on each replica's outputs; return what it gives, by replica."""

        def on_replica(parts: Sequence[Any]) -> Any:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(parts[local_replica_id()])
            return then(keras_model.call_model(model, inputs, training=False))

        parts, counted, share, num_examples = batch
        rows = RowsOfReplicas(counted, share, self.num_replicas, num_examples)
        with self._draws(model), knowing(rows), self._gathered(model, False):
            outputs = self._strategy.run(on_replica, args=(parts,))
        copies = zip(*map(self._strategy.experimental_local_results, tf.nest.flatten(outputs)), strict=True)
        return [tf.nest.pack_sequence_as(outputs, copy) for copy in copies]

    def _run(self, model: keras.Model, on_replica: Callable[[Any, tf.Tensor], Any], batch: Any, training: bool) -> Any:
        """Run a function on every replica with all losses reduced globally.

        Args:
            model: The model.
            on_replica: Takes the replica's part and how many of its examples count in metrics; returns a tuple that
                begins with the loss.
            batch: An element of the distributed dataset.
            training: Whether the model trains.

        Returns:
            What the function returned, the loss as this process's first replica has it.
        """
        parts, counted, share, num_examples = batch
        sizes = [data.num_rows(part) for part in parts]
        shares: dict[int, tf.Tensor] = {}

        def on_own_part(parts: Sequence[Any]) -> Any:
            replica, everywhere = local_replica_id(), num_examples
            counts_scalars = model in self._divisions and self._divisions[model].counts_scalars
            if everywhere is None and (counts_scalars or keras_model.own_metrics(model)):
                everywhere = replicas.sum_over_replicas(counted[replica])
            if everywhere is not None:
                shares[replica] = tf.cast(counted[replica] / everywhere, keras.config.floatx())
            return on_replica(parts[replica], counted[replica])

        with contextlib.ExitStack() as stack:
            stack.enter_context(self._draws(model))
            stack.enter_context(keras_losses.scalars_weighted(lambda _: shares.get(local_replica_id())))
            stack.enter_context(knowing(RowsOfReplicas(counted, share, self.num_replicas, num_examples)))
            stack.enter_context(self._gathered(model, training))
            if model in self._divisions:
                stack.enter_context(self._divisions[model].reduce_globally(training, sizes, share, num_examples))
            if model.jit_compile:
                # Compiles clusters of operations: XLA has no way through the communication between them.
                stack.enter_context(tf.xla.experimental.jit_scope())
            loss, *others = self._strategy.run(on_own_part, args=(parts,))
        return self._strategy.experimental_local_results(loss)[0], *others
