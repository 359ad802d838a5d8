"""Reduce the losses of one model over replicas or micro-batches, by the verdict of its study."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.models import keras_losses, keras_losses_in_call, keras_metrics, keras_model
from tfpar.reduction import whole_batch
from tfpar.reduction.losses import BatchWeights, dense_losses, reduce_kind, reduce_loss
from tfpar.reduction.losses_in_call import Way
from tfpar.reduction.replicas import local_replica_id
from tfpar.reduction.verdict import Kind, Verdict
from tfpar.reduction.whole_batch import losses_in_call


class LossReduction:
    """The reduction of one model's losses, in training and in evaluation.

    The sum and weight of a Keras loss are reduced over the parts of a batch. A scalar that is a mean or a sum over the
    rows, by the study, has no weight. Any other loss is computed on the whole batch: each replica gathers the targets,
    outputs and sample weights, and has the gradient of its own rows.

    A loss object in `call` returns the loss of the whole batch, as on one device; for micro-batches see
    `tfpar.reduction.losses_in_call`.

    Args:
        model: A compiled model.
        communicates: Whether parts can all-reduce values inside `call`; micro-batches cannot.
        divides: Whether the batch has several parts; Keras alone computes the losses of a single micro-batch.
    """

    def __init__(self, model: keras.Model, *, communicates: bool = True, divides: bool = True) -> None:
        self._model, self._communicates, self._divides = model, communicates, divides
        self.verdicts: dict[bool, Verdict] = {}  # by whether the model trains
        # With several outputs Keras logs each loss, which must then be the value over the global batch.
        self.partial_values = not keras_metrics.trackers_of_losses(model)

    def ways(self, training: bool) -> tuple[Way, ...]:
        """Return the way of each loss computed in `call`; empty if no loss was studied."""
        return self.verdict(training).ways

    def verdict(self, training: bool) -> Verdict:
        """Return the verdict of the study; an empty one if the batch has a single part."""
        return self.verdicts.get(training, Verdict()) if self._divides else Verdict()

    def is_own(self, training: bool) -> bool:
        """Return whether the model overrides `compute_loss`."""
        return self._own_kind(training) is not None

    def _own_kind(self, training: bool) -> Kind | None:
        if not self._divides:
            return "mean" if keras_model.overridden(self._model, "compute_loss") else None
        return self.verdicts[training].own_loss

    def adds_losses(self, training: bool) -> bool:
        """Return whether layers add losses."""
        return bool(self.verdict(training).added)

    def added_factors(self, training: bool, counts: BatchWeights, number: int) -> list[tf.Tensor]:
        """Return the weight of a part's value in that of the whole batch, for each of `number` losses layers add."""
        unit = tf.ones((), keras.config.floatx())
        alone = counts._replace(sum_divisors=None, partial_values=True)
        kinds: Sequence[str] = self.verdicts[training].added if self._divides else ["mean"] * number
        return [reduce_kind(kind, unit, alone) for kind in kinds]

    @contextlib.contextmanager
    def reduce_globally(
        self,
        training: bool,
        num_examples: Sequence[tf.Tensor],
        example_weight: tf.Tensor,
        global_size: tf.Tensor | Callable[[], tf.Tensor] | None,
        sum_divisors: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> Iterator[None]:
        """Reduce every loss that Keras computes in this context over all replicas.

        Args:
            training: Whether the model trains or is evaluated.
            num_examples: The size of the per-replica batch of each local replica, int scalars, at least 1.
            example_weight: Scalar, the weight of an example: 1, or less if several replicas compute it.
            global_size: The size of the global batch, or a function that sums it; None if unknown on every worker.
            sum_divisors: Sums a divisor over all parts; None for an all-reduce over the replicas.
        """
        added: dict[int, list[Any]] = collections.defaultdict(list)

        def counts() -> BatchWeights:
            size, partial_values = num_examples[local_replica_id()], training and self.partial_values
            return BatchWeights(example_weight, size, global_size, partial_values, sum_divisors)

        reducing = _Reducing(self._model, self.verdicts.get(training, Verdict()), counts, self._divides)

        def reduce_added_loss(model: keras.Model, loss: Any) -> tf.Tensor:
            value = keras_losses.aggregate_added_loss(model, loss)
            return reduce_kind(self._kind_of_added(training, loss, added[local_replica_id()]), value, counts())

        own_kind = self._own_kind(training)
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_losses.collect_added_losses(lambda: added[local_replica_id()]))
            if own_kind is None:
                reduction = keras_losses.loss_reduction(
                    self._model, reducing.reduce, reduce_added_loss, reducing.call_loss
                )
                stack.enter_context(reduction)
            else:
                stack.enter_context(keras_losses.local_losses())
                stack.enter_context(keras_losses.own_loss_called(reducing.calling_own(own_kind)))
            is_whole = self._communicates and own_kind is None and self.verdicts[training].whole_in_call
            in_call = losses_in_call(counts) if is_whole else keras_losses_in_call.losses_in_call()
            stack.enter_context(in_call)
            yield

    def _kind_of_added(self, training: bool, loss: Any, added: Sequence[Any]) -> str:
        position = next((index for index, other in enumerate(added) if other is loss), None)
        # Penalties of weights are not in the list; equal on every replica, they reduce like means.
        if position is None or not self._divides:
            return "mean"
        kinds = self.verdicts[training].added
        if position >= len(kinds):
            raise ValueError(
                f"{self._model.name!r} adds more losses than in its first batch since compile(), such as those of an "
                "activity_regularizer set later. Call compile() again."
            )
        return kinds[position]


class _Reducing:
    """The reduction of the losses of one step, on all local replicas."""

    def __init__(self, model: keras.Model, verdict: Verdict, counts: Callable[[], BatchWeights], divides: bool) -> None:
        self._model, self._verdict, self._counts, self._divides = model, verdict, counts, divides
        self._positions: collections.Counter[int] = collections.Counter()
        self._kinds: dict[int, Kind] = {}  # of the loss that is computed, by replica

    def call_loss(self, call: Callable[..., Any], targets: Any, outputs: Any, weights: Any) -> Any:
        """Compute a loss of `compile` on the rows of the replica, or on the whole batch."""
        replica = local_replica_id()
        kinds, number = self._verdict.losses, self._positions[replica]
        self._positions[replica] += 1
        self._kinds[replica] = kind = kinds[number] if kinds else "rows"
        if kind != "whole":
            return call(targets, outputs, weights)
        rows = whole_batch.gather_for_loss((targets, outputs, weights), self._counts())
        with whole_batch.holding_all_rows():
            return whole_batch.share_of(call(*rows), self._counts())

    def reduce(self, values: Any, weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
        """Reduce the values of a loss of `compile`."""
        kind = self._kinds[local_replica_id()]
        if kind == "whole" or not self._divides:
            dense = dense_losses(values, reduction)
            loss: tf.Tensor = keras_losses.reduce_weighted_values(dense, weight, mask, reduction, dtype)
            if kind == "whole" or loss.shape.rank == 0:
                return loss
        if kind in ("mean", "sum"):
            return reduce_kind(kind, tf.cast(values, dtype), self._counts())
        return reduce_loss(values, weight, mask, reduction, dtype, self._counts())

    def calling_own(self, kind: Kind) -> Callable[[Callable[..., Any], dict[str, Any]], tf.Tensor]:
        """Return a function that calls an overridden `compute_loss` on the replica's rows or on the whole batch."""

        def call(original: Callable[..., Any], arguments: dict[str, Any]) -> tf.Tensor:
            if kind != "whole":
                return reduce_kind(kind, original(**arguments), self._counts())
            names = ["y", "y_pred", "sample_weight", *(["x"] if self._verdict.reads_inputs else [])]
            rows = whole_batch.gather_for_loss([arguments.get(name) for name in names], self._counts())
            with whole_batch.holding_all_rows():
                loss = original(**arguments | dict(zip(names, rows, strict=True)))
            return whole_batch.share_of(loss, self._counts())

        return call
