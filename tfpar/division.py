"""How the losses of one model divide over replicas, found out before the first step."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfpar import _compat, _compat_losses, _compat_random, data
from tfpar.reduction import ONE_VALUE, WAY_OUT, Counts, global_mean, global_sum, local_replica_id, reduce_loss
from tfpar.whole_batch import Trial, losses_in_call

Kind = Literal["mean", "sum"]


class Division:
    """How the losses of one model divide over replicas; found out before the first step.

    Keras' own losses are divided by their true weights, summed over the replicas. What a layer adds with `add_loss`,
    and what an overridden `compute_loss` returns, says nothing about how it was averaged, and on one device it makes
    no difference. So those are computed on two parts of a batch and on both together: a sum adds up, a mean averages,
    anything else cannot be divided. A loss object that `call` itself calls gives the loss of the whole batch there,
    as on one device, if what is made of it divides so; or else that of the part.

    Args:
        model: A built and compiled model.
        batch: Its first global batch, `(inputs, targets, sample_weight)` as far as given, `[batch, ...]` each.
        call: Runs the model, in the order in which its added losses shall count; None for the model's own.
        communicates: Whether parts can add up values while the model is called; micro-batches cannot.

    Raises:
        ValueError: If a loss cannot be divided over replicas.
    """

    def __init__(
        self, model: keras.Model, batch: Any, call: Callable[..., Any] = _compat.call_model, communicates: bool = True
    ) -> None:
        check_divisible(model)
        # With several outputs Keras keeps the loss of each in its logs, and needs it as of the global batch.
        self.in_parts = len(_compat.flat_losses(model)) < 2
        self._own_losses: dict[bool, Kind | None] = {True: None, False: None}
        self._added_losses: dict[bool, list[Kind]] = {True: [], False: []}
        # Whether a loss that `call` computes is that of the whole batch: in training, and in evaluation.
        self._whole_in_call = {True: communicates, False: communicates}
        if _compat.overridden(model, "compute_loss"):
            self._whole_in_call = {True: False, False: False}
            return  # asked as training or as evaluation asks it, in `find_own_loss`
        parts = _parts(batch)
        added_losses = functools.partial(_added_losses, call=call)
        with _compat_random.preserved_random_state(), restored(model):
            _check_shapes(model, parts[1:], call, training=False)
            find = functools.partial(self._find_added_losses, model, parts)
            evaluating = find(False, functools.partial(added_losses, training=False))
            training = functools.partial(added_losses, training=True)
            # As in evaluation, where that tells: found without the chance that training may bring into play.
            as_in_evaluation = None not in evaluating and len(training(model, parts[0])) == len(evaluating)
            if as_in_evaluation:
                self._whole_in_call[True] = self._whole_in_call[False]
            kinds = {False: evaluating, True: evaluating if as_in_evaluation else find(True, training)}
            self._added_losses = {key: [kind or "mean" for kind in found] for key, found in kinds.items()}

    def find_own_loss(
        self, model: keras.Model, batch: Any, training: bool, call: Callable[..., Any] = _compat.call_model
    ) -> None:
        """Find out how what an overridden `compute_loss` returns divides; a model that has none is left alone.

        Args:
            model: The model.
            batch: Its first global batch.
            training: What `compute_loss` is told, as by the steps that follow.
            call: Runs the model, as in training without its chance.

        Raises:
            ValueError: If it is neither a sum nor a mean over the batch.
        """
        if not _compat.overridden(model, "compute_loss"):
            return
        parts = _parts(batch)
        losses_of = functools.partial(_own_loss, call=call, training=training)
        with _compat_random.preserved_random_state(), restored(model):
            _check_shapes(model, parts[1:], call, training)
            try:
                (kind,) = self._kind_of_own_loss(model, parts, losses_of)
            except ValueError:
                if not training or losses_of(model, parts[0]) == losses_of(model, parts[0]):
                    raise
                # It draws random numbers in training, which hide what it is; evaluation does without.
                (kind,) = self._kind_of_own_loss(model, parts, functools.partial(losses_of, training=False))
        self._own_losses[training] = kind or "mean"

    def _kind_of_own_loss(self, model: keras.Model, parts: Sequence[Any], losses_of: Any) -> list[Kind | None]:
        return _kinds(model, parts, losses_of, f"What {type(model).__name__}.compute_loss returns")

    def _find_added_losses(
        self, model: keras.Model, parts: Sequence[Any], training: bool, losses_of: Callable[..., list[float]]
    ) -> list[Kind | None]:
        """Find out the kind of each loss that layers add; None for one that is zero on every part."""
        what = f"A loss added with add_loss to {model.name!r}"
        if self._whole_in_call[training]:
            with contextlib.suppress(ValueError):
                return _kinds(model, parts, losses_of, what, Trial())
            self._whole_in_call[training] = False
        return _kinds(model, parts, losses_of, what)

    def to_json(self) -> str:
        """Return what was found out, for other workers."""
        return json.dumps([*([found[True], found[False]] for found in self._found)])

    def take_over(self, text: str) -> None:
        """Believe what another worker found out, from examples of its own."""
        for found, (training, evaluating) in zip(self._found, json.loads(text), strict=True):
            found[True], found[False] = training, evaluating

    @property
    def _found(self) -> tuple[dict[bool, Any], ...]:
        return self._own_losses, self._added_losses, self._whole_in_call

    def added_factors(self, training: bool, counts: Counts) -> list[tf.Tensor]:
        """Return, for each loss that layers add, the share of a part's value that counts in the whole."""
        one = tf.ones((), keras.config.floatx())
        alone = counts._replace(add_up=None, in_parts=True)
        return [_reduce_kind(kind, one, alone) for kind in self._added_losses[training]]

    @contextlib.contextmanager
    def over_replicas(
        self,
        training: bool,
        num_examples: Sequence[tf.Tensor],
        share: tf.Tensor,
        everywhere: tf.Tensor | None,
        add_up: Callable[[tf.Tensor], tf.Tensor] | None = None,
    ) -> Iterator[None]:
        """Reduce every loss that Keras computes inside this context over all replicas.

        Args:
            training: Whether the model trains or is evaluated.
            num_examples: The number of examples of each local replica, int scalars, at least 1.
            share: Scalar, what each of them counts: 1, or less where every replica has all examples.
            everywhere: The size of the global batch; None where no worker knows it.
            add_up: Returns the sum over all parts of a divisor; None lets the replicas add up theirs.
        """
        added: dict[int, list[Any]] = collections.defaultdict(list)

        def counts() -> Counts:
            return Counts(share, num_examples[local_replica_id()], everywhere, training and self.in_parts, add_up)

        def reduce_values(values: Any, weight: Any, mask: Any, reduction: str | None, dtype: Any) -> tf.Tensor:
            return reduce_loss(values, weight, mask, reduction, dtype, counts())

        def reduce_added_loss(model: keras.Model, loss: Any) -> tf.Tensor:
            replica = local_replica_id()
            value = _compat.aggregate_added_loss(model, loss)
            position = next((index for index, other in enumerate(added[replica]) if other is loss), None)
            # A weight's penalty is not in the list: it is the same on every replica, and so a mean.
            kind = "mean" if position is None else self._added_losses[training][position]
            return _reduce_kind(kind, value, counts())

        with contextlib.ExitStack() as stack:
            stack.enter_context(_compat.collect_added_losses(lambda: added[local_replica_id()]))
            own_loss = self._own_losses[training]
            if own_loss is None:
                stack.enter_context(_compat.loss_reduction(reduce_values, reduce_added_loss))
            else:
                stack.enter_context(_compat.local_losses())
                stack.enter_context(_compat.compute_loss_then(lambda loss: _reduce_kind(own_loss, loss, counts())))
            in_call = losses_in_call(counts) if self._whole_in_call[training] else _compat_losses.losses_in_call()
            stack.enter_context(in_call)
            yield


def _reduce_kind(kind: Kind | None, value: tf.Tensor, counts: Counts) -> tf.Tensor:
    share = tf.cast(counts.share, value.dtype)
    if kind == "sum":
        return global_sum(share * value, counts.in_parts)
    weight = share * tf.cast(counts.here, value.dtype)
    all_weight = None if counts.everywhere is None else tf.cast(counts.everywhere, value.dtype)
    return global_mean(weight * value, weight, all_weight, counts.in_parts)


def check_divisible(model: keras.Model) -> None:
    """Refuse losses whose part over some examples cannot be told from outside.

    Raises:
        ValueError: If a loss object reduces in a `__call__` of its own, or compares the examples of a batch, or if
            `compute_loss` is overridden with several losses.
    """
    losses = _compat.flat_losses(model)
    for loss in losses:
        if isinstance(loss, keras.losses.Circle):
            raise ValueError(
                "keras.losses.Circle compares all examples of a batch, and a replica sees only its part. "
                "Train on SingleDevice()."
            )
        if isinstance(loss, keras.losses.Loss) and type(loss).__call__ is not keras.losses.Loss.__call__:
            raise ValueError(
                f"Under several replicas a loss must leave the average over the batch to Keras, and "
                f"{type(loss).__name__} has a __call__ of its own. Override `call` and return one value per example."
            )
    if _compat.overridden(model, "compute_loss") and len(losses) > 1:
        raise ValueError(
            f"Under several replicas a model that overrides compute_loss can be compiled with one loss, and "
            f"{type(model).__name__} has {len(losses)}. Leave compute_loss to Keras, or train on SingleDevice()."
        )


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """Return one example, up to three others (the same if there are none), and all of them."""
    num_examples = int(data.num_rows(batch))
    first = data.take_rows(batch, 0, 1)
    others = data.take_rows(batch, 1, min(4, num_examples)) if num_examples > 1 else first
    return first, others, data.join_batches([first, others])


def _added_losses(model: keras.Model, batch: Any, training: bool, call: Callable[..., Any]) -> list[float]:
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    added: list[Any] = []
    with _compat.collect_added_losses(lambda: added):
        call(model, inputs, training=training)
    return [float(tf.reduce_sum(loss)) for loss in added]


def _check_shapes(model: keras.Model, parts: Sequence[Any], call: Callable[..., Any], training: bool) -> None:
    """Refuse a loss whose values for one example depend in number on how many others there are."""
    shapes: list[list[tuple[int, ...]]] = [[] for _ in parts]

    for part, seen in zip(parts, shapes, strict=True):

        def note(values: Any, *others: Any, seen: list[tuple[int, ...]] = seen) -> tf.Tensor:
            seen.append(tuple(tf.convert_to_tensor(values).shape))
            return tf.zeros((), tf.convert_to_tensor(values).dtype)

        def nothing(model: keras.Model, loss: Any) -> tf.Tensor:
            return tf.zeros((), tf.convert_to_tensor(loss).dtype)

        with _compat.loss_reduction(note, nothing), _compat_losses.losses_in_call():
            _own_loss(model, part, call, training)
    for of_few, of_all in zip(*shapes, strict=True):
        if of_few[1:] != of_all[1:]:
            raise ValueError(f"{ONE_VALUE}, and this one returned values of shapes {of_few} and {of_all}. {WAY_OUT}")


def _own_loss(model: keras.Model, batch: Any, call: Callable[..., Any], training: bool) -> list[float]:
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
    outputs = call(model, inputs, training=False)
    return [float(_compat.compute_loss(model, inputs, targets, outputs, weights, training))]


@contextlib.contextmanager
def restored(model: keras.Model) -> Iterator[None]:
    """Leave the model's weights and states as they were before this context."""
    before = [(variable, variable.numpy()) for variable in model.variables]
    try:
        yield
    finally:
        for variable, value in before:
            if not np.array_equal(variable.numpy(), value, equal_nan=True):
                variable.assign(value)


def _shake(model: keras.Model) -> None:
    """Move all weights a little."""
    random = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign_add(random.uniform(0.1, 0.3, variable.shape))


def _kinds(
    model: keras.Model,
    parts: Sequence[Any],
    losses_of: Callable[[keras.Model, Any], list[float]],
    what: str,
    trial: Trial | None = None,
) -> list[Kind | None]:
    """Classify each loss by its values on one example, on some others, and on all of them together.

    Args:
        model: The model.
        parts: One example, some others, all of them.
        losses_of: Returns the losses of a part.
        what: Names a loss in messages.
        trial: Gives parts the losses of all examples that `call` computes; None for those of the part.

    Returns:
        The kind of each; None where it is zero on every part.
    """

    def measure() -> list[list[float]]:
        with trial.recording() if trial else _compat_losses.losses_in_call():
            both = losses_of(model, parts[2])
        found = []
        for start, part in enumerate(parts[:2] if both else ()):  # most models add no loss, and large ones take long
            with trial.replaying(start) if trial else _compat_losses.losses_in_call():
                found.append(losses_of(model, part))
        return [*found, both] if both else []

    num_others = float(data.num_rows(parts[1]))
    kinds = [_kind(values, num_others, what) for values in zip(*measure(), strict=True)]
    if None in kinds:  # nothing to see with these weights: zero on every part
        with restored(model):
            _shake(model)
            again = zip(*measure(), strict=True)
        kinds = [kind or _kind(values, num_others, what) for kind, values in zip(kinds, again, strict=True)]
    return kinds


def _kind(values: Sequence[float], num_others: float, what: str) -> Kind | None:
    one, others, both = values
    if one == others == both == 0:
        return None
    if _close((one + num_others * others) / (1 + num_others), both):
        return "mean"
    if _close(one + others, both):
        return "sum"
    raise ValueError(
        f"{what} must be a sum or a mean over the batch to be divided over replicas, received {one:.6g} and "
        f"{others:.6g} on two parts of a batch and {both:.6g} on both. Let it sum or average over the examples, or "
        f"train on SingleDevice()."
    )


def _close(value: float, expected: float) -> bool:
    return abs(value - expected) <= 1e-3 * max(abs(value), abs(expected), 1e-12)
