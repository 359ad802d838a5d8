"""The decomposition of one model's losses over replicas or micro-batches, from trials before the first step."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_losses, keras_losses_in_call, keras_metrics, keras_model
from tfpar._compat.tf_divided_memory import memories_of
from tfpar.messages.reasons import message_of
from tfpar.pipeline.graph.trial_batch import moving_statistics
from tfpar.reduction import metric_trials, own_losses, part_trials, trial_losses
from tfpar.reduction.losses import BatchWeights, dense_losses, reduce_kind, reduce_loss
from tfpar.reduction.losses_in_call import PartTrial, Way, cheapest_ways, other_ways
from tfpar.reduction.replicas import local_replica_id
from tfpar.reduction.sum_or_mean import Kind, kinds_of, parts_of, unchanged
from tfpar.reduction.whole_batch import Trial, losses_in_call


class LossDecomposition:
    """The kinds of the losses of one model: sums or means over the batch.

    A loss of Keras is a sum and a weight, and both are reduced over the replicas. A loss from `add_loss`, from an
    overridden `compute_loss` or from a loss function that returns a scalar has no weight. A trial computes such a loss
    on two parts of a batch and on both together: it is a sum if the values of the parts add up, a mean if they average,
    and refused otherwise. Scalars of metric functions are classified in the same way and must be means.

    A loss object inside of `call` returns the loss of the whole batch, as on one device, if the losses that depend on
    it are then sums or means; otherwise the loss of the part. `tfpar.reduction.losses_in_call` describes its value in a
    micro-batch.

    Args:
        model: A built and compiled model.
        batch: Its first global batch, `(inputs, targets, sample_weight)` as far as given, `[batch, ...]` each.
        call: Calls the model, with its added losses in the order of the step.
        communicates: Whether parts can all-reduce values inside of `call`; micro-batches cannot.
        values_call: Calls the model where the values of its outputs count; None for `call`.
        divides: Whether the batch has parts; the losses of an only micro-batch are those of Keras.
        adds_states: Whether parts have metrics of their own, whose states are added.

    Raises:
        ValueError: If a loss is neither a sum nor a mean over the batch; for added losses see `check`.
    """

    def __init__(
        self,
        model: keras.Model,
        batch: Any,
        call: Callable[..., Any] = keras_model.call_model,
        communicates: bool = True,
        values_call: Callable[..., Any] | None = None,
        divides: bool = True,
        adds_states: bool = True,
    ) -> None:
        if divides:
            trial_losses.check_divisible(model)
        self._own_losses: dict[bool, Kind | None] = {True: None, False: None}
        self._added_losses: dict[bool, list[Kind]] = {True: [], False: []}
        self._refusals: dict[bool, str] = {}  # of added losses, in training and in evaluation
        # In the order in which Keras reduces the losses of `compile`; None for a loss with a value per example.
        self._scalar_losses: list[Kind | None] = []
        # Whether a loss inside of `call` is the loss of the whole batch: in training, and in evaluation.
        self._whole_in_call = {True: communicates, False: communicates}
        # If parts do not communicate, the way of each of these losses.
        self.ways: dict[bool, tuple[Way, ...]] = {True: (), False: ()}
        self._communicates, self._divides = communicates, divides
        # Some models run in training only: in inference RandomCrop returns images of another size.
        self._infers = True
        parts = parts_of(batch)
        call, values_call = (self._in_either_mode(one) for one in (call, values_call or call))
        with unchanged(model):
            if divides:
                self._decompose(model, batch, parts, (call, values_call), adds_states)
            else:
                self._count_added_losses(model, parts[2], call)
        # With several outputs Keras logs the loss of each, which must be the value over the global batch.
        self.partial_values = not keras_metrics.trackers_of_losses(model)

    def _decompose(
        self, model: keras.Model, batch: Any, parts: Sequence[Any], calls: Sequence[Callable[..., Any]], adds: bool
    ) -> None:
        call, values_call = calls
        if trial_losses.scalar_metrics(model, parts[2], call):
            metric_trials.check_scalars(model, parts, values_call)
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(parts[2])
        outputs_of = functools.cache(functools.partial(call, model, inputs, training=False))
        metric_trials.check_metrics(model, batch, outputs_of, adds)
        if not keras_model.overridden(model, "compute_loss"):
            self._find_losses(model, parts, call, values_call)
            self._check_made_up(model, batch, outputs_of)
        else:  # `find_own_loss` classifies it for training and evaluation
            self._whole_in_call = {True: False, False: False}
        if keras_metrics.own_metrics(model):
            self._check_counted_scalars(model, parts, values_call)

    def _count_added_losses(self, model: keras.Model, batch: Any, call: Callable[..., Any]) -> None:
        """Count the losses that layers add, which are those of the batch where it is the only part."""
        self._whole_in_call = {True: False, False: False}
        for training in (False, True):
            self._added_losses[training] = ["mean" for _ in trial_losses.added_losses(model, batch, training, call)]

    def _check_made_up(self, model: keras.Model, batch: Any, outputs_of: Callable[[], Any]) -> None:
        """Compare the losses of made-up outputs, for losses that are not known to have a value per example."""
        losses = keras_losses.flat_losses(model)
        is_known = all(map(keras_losses.is_by_example, losses)) and not any(self._scalar_losses)
        if not is_known:
            found = part_trials.loss_kinds(model, batch, outputs_of(), False, Trial() if self._communicates else None)
            kinds = zip(self._scalar_losses, found, strict=False)
            self._scalar_losses = [other or kind for kind, other in kinds]

    def _check_counted_scalars(self, model: keras.Model, parts: Sequence[Any], call: Callable[..., Any]) -> None:
        """Refuse scalars that layers, or an overridden `compute_metrics`, count in metrics of the wrong kind."""

        def call_of(model: keras.Model, part: Any) -> Callable[[], Any]:
            return functools.partial(call, model, keras.utils.unpack_x_y_sample_weight(part)[0], training=False)

        trial_losses.check_counted_scalars(model, parts, call_of, self._trial(parts, training=False))
        if keras_model.overridden(model, "compute_metrics"):
            metrics_of = functools.partial(trial_losses.metrics_of, call=call)
            who = f"{type(model).__name__}.compute_metrics"
            trial_losses.check_counted_scalars(model, parts, metrics_of, who=who)

    def _in_either_mode(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of the model in training mode if inference fails."""

        def called(model: keras.Model, inputs: Any, training: bool) -> Any:
            if not training and self._infers:
                try:
                    return call(model, inputs, training=False)
                except Exception:
                    self._infers = False
            return call(model, inputs, training=True)

        return called

    def _find_losses(
        self, model: keras.Model, parts: Sequence[Any], call: Callable[..., Any], values_call: Callable[..., Any]
    ) -> None:
        if not self._communicates:
            self._find_ways(model, parts[2], call)
        shapes = trial_losses.check_shapes(model, parts[1:], call, training=False)
        added_losses = functools.partial(trial_losses.added_losses, call=call)
        for training in (False, True):
            losses_of = functools.partial(added_losses, training=training)
            try:
                kinds = self._added_kinds(model, parts, training, losses_of)
            except ValueError as error:  # the model may still be used in the other mode
                self._refusals[training] = message_of(error)
            else:
                self._added_losses[training] = [kind or "mean" for kind in kinds]
        if () in shapes:
            trial = Trial() if self._whole_in_call[True] else None
            self._scalar_losses = trial_losses.scalar_kinds(model, parts, values_call, trial)

    def _added_kinds(
        self, model: keras.Model, parts: Sequence[Any], training: bool, losses_of: Callable[..., list[float]]
    ) -> list[Kind | None]:
        """Return the kinds of the losses that layers add, in training from moving statistics."""
        with moving_statistics() if training else contextlib.nullcontext():
            try:
                return self._find_added_losses(model, parts, training, losses_of)
            except ValueError:
                values, again = (losses_of(model, parts[0]) for _ in range(2))
                known = self._added_losses[False]
                if not training or values == again or False in self._refusals or len(values) != len(known):
                    raise
        # Random numbers in training hide the kinds of the losses, and evaluation has none.
        self._whole_in_call[True], self.ways[True] = self._whole_in_call[False], self.ways[False]
        return list(known)

    def adds_losses(self, training: bool) -> bool:
        """Return whether layers add losses, in training or in inference."""
        return bool(self._added_losses[training]) or training in self._refusals

    def check(self, training: bool) -> None:
        """Refuse a model with an added loss that is neither a sum nor a mean over the batch.

        Args:
            training: Whether train steps follow, or evaluate steps.

        Raises:
            ValueError: If there is one in this mode.
        """
        if training in self._refusals:
            raise ValueError(self._refusals[training])

    def find_own_loss(
        self, model: keras.Model, batch: Any, training: bool, call: Callable[..., Any] = keras_model.call_model
    ) -> None:
        """Classify the loss of an overridden `compute_loss`; without one there is nothing to do.

        Args:
            model: The model.
            batch: Its first global batch.
            training: The argument `training` of `compute_loss`, as in the next steps.
            call: Calls the model, without random numbers.

        Raises:
            ValueError: If the loss is neither a sum nor a mean over the batch.
        """
        if not keras_model.overridden(model, "compute_loss"):
            return
        call = self._in_either_mode(call)
        if not self._divides:
            # Few examples show whether it is a scalar; it need not run on them.
            with unchanged(model), contextlib.suppress(tf.errors.InvalidArgumentError):
                own_losses.own_loss(model, parts_of(batch)[2], call, training)
            self._own_losses[training] = "mean"
            return
        with unchanged(model):
            parts = own_losses.parts_that_run(model, batch, call, training)
            trial_losses.check_shapes(model, parts[1:], call, training)
            trial = Trial(replays_losses=False) if self._communicates else None
            try:
                kind = trial_losses.kind_of_own_loss(model, parts, call, training, trial)
            except ValueError:
                one, again = (own_losses.own_loss(model, parts[0], call, training) for _ in range(2))
                if not training or one == again:
                    raise
                # Random numbers in training hide the kind of the loss; evaluation has none.
                kind = trial_losses.kind_of_own_loss(model, parts, call, False, trial)
            outputs = call(model, keras.utils.unpack_x_y_sample_weight(parts[2])[0], training=False)
            part_trials.loss_kinds(model, batch, outputs, training, trial)
        self._own_losses[training] = kind or "mean"

    def is_own(self, training: bool) -> bool:
        """Return whether the loss is that of an overridden `compute_loss`, of the part."""
        return self._own_losses[training] is not None

    def _find_added_losses(
        self, model: keras.Model, parts: Sequence[Any], training: bool, losses_of: Callable[..., list[float]]
    ) -> list[Kind | None]:
        """Return the kind of each loss that layers add; None for a loss that is zero on every part."""
        what = f"A loss added with add_loss to {model.name!r}"
        if self._whole_in_call[training]:
            with contextlib.suppress(ValueError):
                return kinds_of(model, parts, losses_of, what, Trial())
            self._whole_in_call[training] = False
        for ways in other_ways(self.ways[training]) if self.ways[training] else ():
            with contextlib.suppress(ValueError):
                return kinds_of(model, parts, losses_of, what, self._trial(parts, training))
            self.ways[training] = ways
        return kinds_of(model, parts, losses_of, what, self._trial(parts, training))

    def _find_ways(self, model: keras.Model, batch: Any, call: Callable[..., Any]) -> None:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        trainable = [memory for variable in model.trainable_variables for memory in memories_of(variable)]
        self.ways[True] = cheapest_ways(functools.partial(call, model, inputs, True), trainable)
        if self._infers:
            self.ways[False] = cheapest_ways(functools.partial(call, model, inputs, False), trainable)
        if not self._infers:  # unknown before this call
            self.ways[False] = self.ways[True]

    def _trial(self, parts: Sequence[Any], training: bool) -> Trial | PartTrial | None:
        """Return the trial for losses inside of `call`, as replicas or micro-batches compute them."""
        if self._whole_in_call[training]:
            return Trial()
        return PartTrial(self.ways[training]) if self.ways[training] else None

    def to_json(self) -> str:
        """Return the kinds of the losses as JSON, for a broadcast."""
        return json.dumps([self._scalar_losses, *([found[True], found[False]] for found in self._found)])

    def load_json(self, text: str) -> None:
        """Replace the kinds of the losses by those of another worker."""
        self._scalar_losses, *others = json.loads(text)
        for found, (training, evaluating) in zip(self._found, others, strict=True):
            found[True], found[False] = training, evaluating
        self.ways = {training: tuple(ways) for training, ways in self.ways.items()}

    @property
    def _found(self) -> tuple[dict[bool, Any], ...]:
        return self._own_losses, self._added_losses, self._whole_in_call, self.ways

    def added_factors(self, training: bool, counts: BatchWeights) -> list[tf.Tensor]:
        """Return, for each loss that layers add, the weight of a part's value in the value of the whole batch."""
        one = tf.ones((), keras.config.floatx())
        alone = counts._replace(sum_divisors=None, partial_values=True)
        return [reduce_kind(kind, one, alone) for kind in self._added_losses[training]]

    @contextlib.contextmanager
    def reduce_globally(
        self,
        training: bool,
        num_examples: Sequence[tf.Tensor],
        example_weight: tf.Tensor,
        everywhere: tf.Tensor | Callable[[], tf.Tensor] | None,
        sum_divisors: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> Iterator[None]:
        """Reduce every loss that Keras computes inside this context over all replicas.

        Args:
            training: Whether the model trains or is evaluated.
            num_examples: The size of the per-replica batch of each local replica, int scalars, at least 1.
            example_weight: Scalar, the weight of an example: 1, or less if several replicas compute it.
            everywhere: The size of the global batch, or a function that sums it; None if it is unknown on every worker.
            sum_divisors: Returns the sum of a divisor over all parts; None for an all-reduce over the replicas.
        """
        added: dict[int, list[Any]] = collections.defaultdict(list)
        positions: collections.Counter[int] = collections.Counter()

        def counts() -> BatchWeights:
            size, partial_values = num_examples[local_replica_id()], training and self.partial_values
            return BatchWeights(example_weight, size, everywhere, partial_values, sum_divisors)

        def reduce_values(values: Any, weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
            if not self._divides:
                dense = dense_losses(values, reduction)
                loss: tf.Tensor = keras_losses.reduce_weighted_values(dense, weight, mask, reduction, dtype)
                if loss.shape.rank == 0:
                    return loss
            replica = local_replica_id()
            kind = self._scalar_losses[positions[replica]] if self._scalar_losses else None
            positions[replica] += 1
            if kind is not None:
                trial_losses.check_unweighted(tf.convert_to_tensor(values), weight, mask)
                return reduce_kind(kind, tf.convert_to_tensor(values, dtype), counts())
            return reduce_loss(values, weight, mask, reduction, dtype, counts())

        def reduce_added_loss(model: keras.Model, loss: Any) -> tf.Tensor:
            replica = local_replica_id()
            value = keras_losses.aggregate_added_loss(model, loss)
            position = next((index for index, other in enumerate(added[replica]) if other is loss), None)
            if position is not None and position >= len(self._added_losses[training]):
                raise ValueError(
                    f"{model.name!r} adds more losses than in its first batch since compile(), such as those of an "
                    "activity_regularizer set later. Call compile() again."
                )
            # The penalty of a weight is not in the list: it has the same value on every replica, as a mean does.
            kind = "mean" if position is None else self._added_losses[training][position]
            return reduce_kind(kind, value, counts())

        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_losses.collect_added_losses(lambda: added[local_replica_id()]))
            own_loss = self._own_losses[training]
            if own_loss is None:
                stack.enter_context(keras_losses.loss_reduction(reduce_values, reduce_added_loss))
            else:
                stack.enter_context(keras_losses.local_losses())
                stack.enter_context(keras_losses.compute_loss_then(lambda loss: reduce_kind(own_loss, loss, counts())))
            in_call = losses_in_call(counts) if self._whole_in_call[training] else keras_losses_in_call.losses_in_call()
            stack.enter_context(in_call)
            yield
