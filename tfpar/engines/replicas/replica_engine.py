"""Data parallelism: every replica computes its per-replica batch and applies the same summed gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_distribute
from tfpar._compat.models import keras_losses_in_call
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.variables import keras_variables
from tfpar.data import Sharded
from tfpar.engines.distributed import Distributed
from tfpar.engines.engine import Engine
from tfpar.engines.one_device import forward, loss_and_gradients
from tfpar.engines.replicas import objective_steps
from tfpar.engines.replicas.gradient_sums import ReplicaGradients, sum_gradients
from tfpar.engines.replicas.own_steps import ReplicaStep
from tfpar.engines.replicas.per_replica_batches import per_replica_batches
from tfpar.engines.replicas.replica_runs import ReplicaRuns, not_compiled
from tfpar.engines.replicas.replica_states import (
    assign_local_states,
    average_statistics,
    layer_metrics_counted_once,
    local_states,
    own_statistics,
    summed_variables,
    update_metrics_once,
)
from tfpar.engines.replicas.traced_rows import eager_kinds, may_look_up
from tfpar.engines.shards_state import ShardsState
from tfpar.engines.steps.batches_ahead import HOST, StepBatch
from tfpar.messages import user_warnings
from tfpar.per_model import PerModel
from tfpar.recomputation.choice import Recompute
from tfpar.reduction import metric_logs, objective, own_step
from tfpar.reduction.gradients.gradient_order import compute_early
from tfpar.reduction.gradients.indexed_slices import Lookups, kinds_of, lookups_of
from tfpar.reduction.gradients.row_numbers import Sources
from tfpar.reduction.gradients.update_order import after_reads
from tfpar.reduction.own_step import PartsOfStep
from tfpar.reduction.replicas import replica_id
from tfpar.reduction.verdict import Verdict
from tfpar.reduction.whole_batch import AllGather
from tfpar.study.outputs import BatchDependentLayers, Words
from tfpar.study.own_steps import averaged_step, study_step
from tfpar.study.report import gathering
from tfpar.study.study import Abilities, study

_WORDS = Words(
    alone="train on SingleDevice()",
    mixing="set batch_dependent_layers='gather' to compute it on the whole batch, or use SingleDevice()",
    state=(
        "Reduce the examples of all parts, which tfpar.gather returns, and leave out the weight's aggregation; or use "
        "SingleDevice()."
    ),
)
ABILITIES = Abilities(_WORDS, gathers=True, adds_states=True)


class ReplicaEngine(ShardsState):
    """The engine of `Mirrored` and `MultiWorker`, on the replicas of a `tf.distribute` strategy.

        global batch ──► batch 0 ──► replica 0: forward, backward ──┐            ┌─► optimizer on replica 0
                    └──► batch 1 ──► replica 1: forward, backward ──┴─ all-reduce ┴─► optimizer on replica 1

    Each replica computes its term of the global loss (see `tfpar.reduction.losses`). The gradients are all-reduced, and
    every replica runs the optimizer on the same sums, so that clipping, accumulation and moving averages equal those
    of one device.

    Args:
        strategy: The `tf.distribute` strategy that holds variables and runs functions on the local replicas.
        pack_bytes: Bytes per pack of gradients in an all-reduce; None for TensorFlow's default.
        batch_dependent_layers: "refuse" batch-dependent layers, or "gather" the whole batch for them.
        shares: Relative size of the per-replica batch of each replica; None for equal sizes.
        recompute: The layers to recompute.

    Attributes:
        first_replica: Number of the first local replica among those of all workers.
    """

    _compression: str | None = None
    # Whether replicas communicate only through `merge_call`, which fails at once if a replica does not call it.
    _merges = False
    runs_own_steps = True
    _all_gather: AllGather | None = None

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        pack_bytes: int | None,
        batch_dependent_layers: BatchDependentLayers = "refuse",
        shares: tuple[int, ...] | None = None,
        recompute: Recompute = False,
    ) -> None:
        self.recompute = recompute
        keras_variables.convert_replicated_variables()
        self.home = self._strategy = strategy
        self._batch_dependent_layers = batch_dependent_layers
        self._pack_bytes = pack_bytes
        self._runs: PerModel[ReplicaRuns] = PerModel()
        self._own_steps: PerModel[dict[str, PartsOfStep]] = PerModel()
        self.num_replicas = strategy.num_replicas_in_sync
        self._num_local_replicas = len(strategy.extended.worker_devices)
        self._shares_of_batch = shares or (1,) * self.num_replicas
        self.first_replica = 0

    def creation_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that creates variables on all replicas."""
        scope = contextlib.ExitStack()
        scope.enter_context(self._strategy.scope())
        scope.enter_context(keras_losses_in_call.undivided())  # operations of a Functional model may be losses
        return scope

    def distribute(self, dataset: tf.data.Dataset | Sharded) -> Distributed:
        """Split every global batch into per-replica batches, in TensorFlow's input threads, ahead of the step.

        A batch with fewer examples than replicas is not split: every replica computes all of it, with a smaller weight
        per example. Layers and TensorFlow's fused convolutions do not support empty batches.

        Args:
            dataset: Global batches, or shards of examples.

        Returns:
            Elements `(batches, num_counted, example_weight, num_examples, digest)`: a tuple with the per-replica batch
            of each local replica, the number of examples each counts in metrics, the weight of an example in losses,
            the size of the global batch (None if no worker has all of it), and its digest (None if no other worker has
            it).
        """
        if isinstance(dataset, Sharded):
            dataset = dataset.global_batches()
        digest = data.batch_digest(dataset) if self.job.num_workers > 1 else lambda batch: None

        def split(batch: Any) -> Any:
            batch = data.with_equal_rows(batch)
            return *per_replica_batches(batch, data.num_rows(batch), self.shares, self._local), digest(batch)

        elements = data.map_batches(dataset, split).prefetch(tf.data.AUTOTUNE)
        unknown_end = self.job.num_workers > 1 and data.has_unknown_size(dataset)
        spec = elements.element_spec[0][0]
        return Distributed(elements, local_batch, _global_size, unknown_end=unknown_end, spec=spec)

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative size of the per-replica batch of each replica, on all workers."""
        return self._shares_of_batch

    @property
    def _local(self) -> slice:
        """The local replicas among those of all workers."""
        return slice(self.first_replica, self.first_replica + self._num_local_replicas)

    def _num_examples_on(self, device: int, num_examples: int) -> int:
        shares = self.shares[self._local]
        return -(-num_examples * shares[device] // sum(shares))

    def _runs_of(self, model: keras.Model) -> ReplicaRuns:
        runs = self._runs.get(model)
        if runs is None:
            runs = ReplicaRuns(self._strategy, self.shares, compiles_calls=self._merges, all_gather=self._all_gather)
        return self._runs.setdefault(model, runs)

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Study how losses, metrics and states of the replicas combine into those of the whole batch."""
        super().study(model, batch, kind)
        runs = self._runs_of(model)
        runs.begin(model)
        if own_step.overrides(model, kind):
            self._study_own_step(model, batch, kind)
            return
        if self.num_replicas == 1:
            return
        if kind != "predict" and objective.objectives_of(model):
            with self.job.vote():
                objective.check(model, batch)
        else:
            self._study(model, batch, kind, runs)
        if kind == "train" and model.run_eagerly and may_look_up(model, batch):
            with runs.gathering():
                runs.eager_kinds = eager_kinds(model, batch, self._strategy.run)

    def _study(self, model: keras.Model, batch: Any, kind: str, runs: ReplicaRuns) -> None:
        abilities = self._abilities(kind)
        with self.job.vote():
            verdict, gathered = study(model, batch, kind, abilities)
        agreed = self._agreed(verdict)
        with self.job.vote():
            if agreed.gathered != verdict.gathered:
                _, gathered = study(model, batch, kind, abilities, agreed.gathered)
        runs.note(model, agreed, gathered, kind)
        cost = "A loss with one value per example sends less."
        if kind != "predict" and self.job.is_chief and (line := gathering(model, agreed, "each replica", cost)):
            user_warnings.warn(line)

    def own_step(self, model: keras.Model) -> PartsOfStep | None:
        """Return what the study of a model's own train step found."""
        return (self._own_steps.get(model) or {}).get("train")

    def _study_own_step(self, model: keras.Model, batch: Any, kind: str) -> None:
        parts = PartsOfStep()
        if self.num_replicas > 1:
            study_it = averaged_step if self.averages_own_steps else study_step
            with self.job.vote():
                parts = study_it(model, kind, batch)
            parts = PartsOfStep.of_json(self.job.agree(parts.to_json()))
        self._own_steps.setdefault(model, {})[kind] = parts

    def _run_own_step(self, model: keras.Model, kind: str, batch: Any) -> tf.Tensor:
        step = ReplicaStep(model, kind, self._own_steps[model][kind], self._sum_gradients, self._apply)
        loss = step.run(self._runs_of(model), batch)
        if kind == "train":
            objective.count_step(model)
        return loss

    def verdict(self, model: keras.Model) -> Verdict | None:
        """Return the verdict of the study for train steps."""
        return self._runs_of(model).verdict(True) if self.num_replicas > 1 else None

    def _abilities(self, kind: str) -> Abilities:
        """Return how this engine can combine the results of replicas in steps of a kind."""
        return ABILITIES._replace(gathers_layers=self._batch_dependent_layers == "gather")

    def _agreed(self, verdict: Verdict) -> Verdict:
        """Return a verdict that is equal on all workers."""
        return verdict

    def step_batch(self, model: keras.Model, element: Any) -> StepBatch:
        """Return the element without its digest, each per-replica batch for the device of its replica."""
        batches, *others, _ = element
        devices = [
            device
            for batch, device in zip(batches, self._strategy.extended.worker_devices, strict=True)
            for _ in tf.nest.flatten(batch)
        ]
        return StepBatch((batches, *others), [*devices, *(HOST for _ in tf.nest.flatten(others))])

    def train_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Run one update, or one per objective, on a global batch; return the global loss, a scalar."""
        if own_step.overrides(model, "train"):
            return self._run_own_step(model, "train", batch)
        if objective.objectives_of(model):
            return objective_steps.train(
                model, batch, self._run, self._sum_gradients, self._apply, layer_metrics_counted_once
            )
        _, _, example_weight, _ = batch
        runs = self._runs_of(model)
        is_partial, verdict = runs.losses is not None and runs.losses.partial_values, runs.verdict(True)

        def on_replica(own: Any, num_counted: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(own)
            with layer_metrics_counted_once(model, num_counted):
                loss, outputs, gradients = loss_and_gradients(model, inputs, targets, weights, runs.call)
            values = [*gradients, loss] if is_partial else gradients
            computed = ReplicaGradients(values, model.trainable_variables, (loss, outputs), example_weight, num_counted)
            sums = self._sum_gradients(model, computed)
            loss = sums.pop() if is_partial else loss
            update_metrics_once(model, loss, num_counted, (inputs, targets, outputs, weights), verdict)
            return loss, sums

        loss, gradients = self._run(model, on_replica, batch, training=True)
        self._apply(model, model.optimizer, model.trainable_variables, gradients)
        return loss

    def _sum_gradients(self, model: keras.Model, gradients: ReplicaGradients) -> list[Any]:
        """Sum the gradients of the calling replica over all replicas, and a loss that may follow them."""
        values, forward = gradients.values, gradients.forward
        if self.num_replicas == 1:
            return after_reads(list(values), forward)
        lookups = self._lookups(model, gradients)
        if forward:
            compute_early(values, forward[0])
        owners = self._owners(model, gradients.variables)
        with not_compiled(model):
            summed_on = owners if self._merges else ()
            sums = sum_gradients(gradients, lookups, self._pack_bytes, self._compression, summed_on)
        if not owners:
            return after_reads(sums, forward)
        return after_reads(_only_owned(sums, owners), forward)

    def _lookups(self, model: keras.Model, gradients: ReplicaGradients) -> list[Lookups | None]:
        """Return the lookups of each gradient of an update; None for a dense gradient and for the loss."""
        eager = self._runs_of(model).eager_kinds
        sources, lookups = Sources(), []
        for index, (gradient, weight) in enumerate(itertools.zip_longest(gradients.values, gradients.variables)):
            if tf.executing_eagerly():
                kinds = eager[gradients.number][index : index + 1] if eager else []
            else:
                kinds = kinds_of(gradient, sources)
            lookups.append(lookups_of(gradient, weight, kinds))
        return lookups

    def _owners(self, model: keras.Model, variables: Sequence[keras.Variable]) -> list[int]:
        """Return the owner of each weight of an update; empty if every replica updates all weights."""
        if self._shards is None:
            return []
        owners = self._shards.owners(model)
        return [owners[id(weight)] for weight in variables]

    def _apply(self, model: keras.Model, optimizer: Any, variables: Sequence[keras.Variable], gradients: Any) -> None:
        """Run an optimizer on all replicas or, if its state is sharded, on the owners of the variables."""
        if variables and self._shards is not None:
            local = [None if sums is None else self._strategy.experimental_local_results(sums) for sums in gradients]
            self._shards.apply(model, optimizer, variables, local)
        elif variables:
            with keras_optimizer.one_device_optimizer():
                self._strategy.extended.update(
                    variables[0].value,
                    lambda _, sums: keras_optimizer.apply(optimizer, sums, variables),
                    args=(gradients,),
                    group=False,
                )

    def evaluate_step(self, model: keras.Model, batch: Any) -> tf.Tensor:
        """Update the metrics with a global batch; return the global loss, a scalar."""
        if own_step.overrides(model, "evaluate"):
            return self._run_own_step(model, "evaluate", batch)
        if objective.objectives_of(model):
            return objective_steps.evaluate(model, batch, self._run, layer_metrics_counted_once)
        call, verdict = self._runs_of(model).call, self._runs_of(model).verdict(False)

        def on_replica(own: Any, num_counted: tf.Tensor) -> tuple[tf.Tensor]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(own)
            with layer_metrics_counted_once(model, num_counted):
                loss, outputs = forward(model, inputs, targets, weights, call)
            update_metrics_once(model, loss, num_counted, (inputs, targets, outputs, weights), verdict)
            return (loss,)

        (loss,) = self._run(model, on_replica, batch, training=False)
        return loss

    def logs(self, model: keras.Model, kind: str) -> dict[str, tf.Tensor]:
        """Average the states of the replicas after train steps, and return the results of `compute_metrics`."""
        if kind == "train":
            self._average(model)
        return self._metric_results(model, kind)

    def _average(self, model: keras.Model) -> None:
        """Average the moving statistics of the replicas."""
        if self.num_replicas > 1:
            average_statistics(self._strategy, own_statistics(model))

    def _metric_results(self, model: keras.Model, kind: str) -> dict[str, tf.Tensor]:
        return metric_logs.results(model, kind)

    def finalize_weights(self, model: keras.Model) -> None:
        """Overwrite the weights on every replica with their moving average, if the optimizer keeps one."""
        for optimizer, variables in objective.updates_of(model):
            if variables and self._shards is not None:
                self._shards.finalize(model, optimizer)
            elif variables:
                with self.creation_scope(), keras_optimizer.one_device_optimizer():
                    self._strategy.extended.update(
                        variables[0].value,
                        lambda _, optimizer=optimizer, variables=variables: optimizer.finalize_variable_values(
                            variables
                        ),
                        group=False,
                    )

    def replica_metrics(self, model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
        """Return the metric states of each replica, `[replicas, ...]`, by variable; all workers must call this."""
        variables = summed_variables(model) if self.num_replicas > 1 else []
        local = [local_states(self._strategy, variable) for variable in variables]
        return list(zip(variables, self._all_gather_states(local), strict=True))

    def _run(self, model: keras.Model, on_replica: Callable[[Any, tf.Tensor], Any], batch: Any, training: bool) -> Any:
        return self._runs_of(model).run(model, on_replica, batch, training)

    def _all_gather_states(self, states: list[np.ndarray]) -> list[np.ndarray]:
        """Return the states of the replicas of all workers, from those of this worker."""
        return states

    def assign_replicas(self, variable: keras.Variable, parts: np.ndarray) -> None:
        """Restore the metric state of each replica, `[replicas, ...]`, if the number of replicas is unchanged."""
        if len(parts) == self.num_replicas and tf_distribute.is_summed_on_read(variable):
            assign_local_states(self._strategy, variable, parts[self._local])


def described_shares(engine: Engine) -> str:
    """Return the shares of replicas for the description of a strategy; empty if they are equal."""
    shares = engine.shares
    return f", batch shares {' : '.join(map(str, shares))}" if len({*shares}) > 1 else ""


def averaged_steps(engine: Engine) -> str:
    """Return the end of a description where replicas average their own steps, else nothing."""
    return "; own train steps are averaged, not those of one device" * engine.averages_own_steps


def local_batch(element: Any) -> Any:
    """Return the examples of all local replicas, each example once."""
    batches, _, example_weight, _, _ = element
    return batches[0] if example_weight < 1 else data.join_batches(batches)


def _global_size(element: Any) -> tf.Tensor:
    return tf.cast(element[3], tf.int64)


def _only_owned(sums: Sequence[Any], owners: Sequence[int]) -> list[Any]:
    """Keep the sums of the weights that the calling replica owns; a scalar zero replaces each other sum.

    Args:
        sums: Summed gradients, those of weights first; None for a weight without a gradient.
        owners: Owner of each weight, by its index among the replicas of all workers.
    """
    own = replica_id()
    others = [total is not None and owner != own for total, owner in zip(sums, owners, strict=False)]
    return [tf.zeros([]) if is_other else total for total, is_other in itertools.zip_longest(sums, others)]
