"""The study of a model before its first step: one verdict on its layers, losses, metrics and states."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar._compat.models import keras_losses, keras_metrics, keras_model
from tfpar.reduction.losses_in_call import Way, cheapest_ways, in_part
from tfpar.reduction.verdict import Kind, Verdict
from tfpar.study import loss_relations, relation
from tfpar.study import metrics as study_metrics
from tfpar.study.known_layers import computes_rows_alone
from tfpar.study.mixing_layers import MixingLayer, Runs, joins
from tfpar.study.observation import CallError, Mode, Observation, observe, undisturbed
from tfpar.study.outputs import Outputs, Words, check_tracked, study_outputs
from tfpar.study.rows import SIZES, few_rows, parts_of
from tfpar.study.states import refusal
from tfpar.study.synthetic_rows import Rows, synthetic_rows

_RULE = "must be a sum or a mean over the batch to be computed by replicas or micro-batches"
_WAY_OUT = "Return one value per example, with sample weights instead of a mask, or train on SingleDevice()."


class Abilities(NamedTuple):
    """What an engine can do with the parts of a batch.

    Args:
        words: Its advice in refusals.
        gathers: Whether parts run at the same time and can gather the rows of the whole batch.
        adds_states: Whether each part updates metrics of its own, whose states are added up.
        gathers_layers: Whether layers that mix rows are called with the whole batch.
        accepts_mixing: Whether the user accepts that layers mix the rows of each part only.
    """

    words: Words
    gathers: bool
    adds_states: bool
    gathers_layers: bool = False
    accepts_mixing: bool = False


def study(
    model: keras.Model, batch: Any, kind: str, abilities: Abilities, gathered: Sequence[str] = ()
) -> tuple[Verdict, tuple[MixingLayer, ...]]:
    """Find out how the parts of a batch give the results of the whole batch, or refuse the model.

    Args:
        model: A built model; a compiled one for "train" and "evaluate".
        batch: Its first batch, `(inputs, targets, sample_weight)` as far as given.
        kind: What the next steps do: "train", "evaluate" or "predict".
        abilities: What the engine can do.
        gathered: The paths of layers that another worker found to need the whole batch.

    Returns:
        The verdict, and the layers to call with the whole batch.

    Raises:
        ValueError: If the parts cannot give the results of the whole batch.

    Example:
        >>> from tfpar.engines.replicas.replica_engine import ABILITIES
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "sigmoid")])
        >>> model.compile("sgd", keras.losses.Dice())  # divides by the sum of all targets and outputs
        >>> batch = tf.random.normal([8, 2]), tf.ones([8, 3])
        >>> verdict, mixing_layers = study(model, batch, "train", ABILITIES)
        >>> verdict.losses, mixing_layers
        (('whole',), ())
    """
    mode, has_loss = Mode(kind == "train", abilities.gathers), kind != "predict"
    outputs = study_outputs(
        model,
        batch,
        mode,
        abilities.words,
        gathers_layers=abilities.gathers_layers,
        accepts_mixing=abilities.accepts_mixing,
        gathered=gathered,
        is_known=not has_loss or _is_known(model),
    )
    _check_states(model, outputs, mode, abilities)
    verdict = Verdict(
        averaged=tuple(outputs.states.averaged), gathered=tuple(mixing.path for mixing in outputs.gathered)
    )
    if has_loss and outputs.runs is not None:
        verdict = _LossStudy(model, batch, outputs, outputs.runs, abilities).added_to(verdict)
    return verdict, outputs.gathered


def check_state_of_stages(model: keras.Model, batch: Any, kind: str, words: Words) -> None:
    """Refuse a model that changes variables that Keras does not track, which stages would lose.

    Args:
        model: A built model.
        batch: Its first batch.
        kind: What the next steps do: "train", "evaluate" or "predict".
        words: The advice in a refusal.

    Raises:
        ValueError: If the model changes such a variable.
    """
    mode, rows = Mode(kind == "train", gathers=False), few_rows(batch)
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(rows)
    if computes_rows_alone(model, mode.training) and (kind == "predict" or _is_known(model)):
        return
    changed: dict[str, str] = {}
    with contextlib.suppress(Exception):  # the step raises it too, with its own message
        seen = observe(model, inputs, mode)
        changed |= seen.untracked
        if kind != "predict":
            with undisturbed(model, _name_of_losses(model)) as seen_in_losses:
                keras_model.compute_loss(model, inputs, targets, seen.outputs, weights, mode.training)
            changed |= seen_in_losses.untracked
    check_tracked(model, [Observation(untracked=changed)], mode, words)


def _check_states(model: keras.Model, outputs: Outputs, mode: Mode, abilities: Abilities) -> None:
    states, kinds = outputs.states, [weight.aggregation for weight in model.weights]
    # TensorFlow aggregates these itself: ignoring the sizes of the parts, or counting an equal value n times.
    reduced = [number for number in states.averaged if kinds[number] != "none"]
    reduced += [number for number in states.equal if kinds[number] == "sum"]
    if others := states.others + (reduced if abilities.gathers else []):
        raise refusal(model, others, mode.training, abilities.words.state)


def _is_known(model: keras.Model) -> bool:
    """Return whether all losses and metrics are Keras' own with a value for each row, and layers add none."""
    if any(keras_model.overridden(model, name) for name in ("compute_loss", "compute_metrics")):
        return False
    if keras_metrics.own_metrics(model) or not all(map(keras_losses.is_by_example, keras_losses.flat_losses(model))):
        return False
    regularized = any(layer.activity_regularizer is not None for layer in keras_model.all_layers(model))
    return not regularized and all(map(keras_metrics.is_by_row, keras_metrics.compiled_metrics(model)))


class _LossStudy:
    """The study of losses and metrics, for a model whose layers have passed."""

    def __init__(self, model: keras.Model, batch: Any, outputs: Outputs, runs: Runs, abilities: Abilities) -> None:
        self._model, self._batch, self._runs, self._abilities = model, batch, runs, abilities
        self._whole, self._parts = outputs.whole, outputs.parts
        self._training = runs.mode.training
        self._has_own_loss = keras_model.overridden(model, "compute_loss")
        self._whole_in_call = True
        if runs.losses and not self._has_own_loss:
            self._whole, self._parts = runs.whole(), runs.parts()
            self._whole_in_call = all(loss.add_up(_TOLERANCE) for loss in runs.losses)
        if not self._whole_in_call:
            self._runs = runs.with_losses_of_parts()
            self._whole, self._parts = self._runs.whole(), self._runs.parts()

    def added_to(self, verdict: Verdict) -> Verdict:
        """Complete a verdict by the losses and metrics."""
        ways, added = self._ways(), self._added()
        _check_counted(self._whole, self._parts)
        name = _name_of_losses(self._model)
        with undisturbed(self._model, name) as seen:
            losses, own_loss = self._losses()
        with undisturbed(self._model, name):
            metrics, whole_metrics = self._metrics()
            reads_inputs = (own_loss == "whole" or whole_metrics) and self._reads_inputs(own_loss == "whole")
        check_tracked(self._model, [seen], self._runs.mode, self._abilities.words)
        complete = dataclasses.replace(
            verdict,
            losses=losses if set(losses) - {"rows"} else (),
            own_loss=own_loss,
            added=added,
            whole_in_call=self._whole_in_call,
            ways=ways,
            metrics=metrics,
            whole_metrics=whole_metrics,
            reads_inputs=reads_inputs,
        )
        if own_loss == "whole" and added:
            raise ValueError(
                f"{type(self._model).__name__}.compute_loss {_RULE} if layers add losses, and it is neither. Do not "
                "override compute_loss, or train on SingleDevice()."
            )
        return complete

    @functools.cached_property
    def _rows(self) -> list[Rows]:
        """Rows of the batch with the outputs of the model, and rows with synthetic outputs."""
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(few_rows(self._batch))
        return [Rows(inputs, targets, weights, self._whole.outputs), *synthetic_rows(self._batch, self._whole.outputs)]

    def _losses(self) -> tuple[tuple[Kind, ...], Kind | None]:
        if self._has_own_loss:
            return (), loss_relations.compute_loss_kind(self._model, self._rows, self._training)
        if all(map(keras_losses.is_by_example, keras_losses.flat_losses(self._model))):
            return (), None
        return loss_relations.loss_kinds(self._model, self._rows), None

    def _metrics(self) -> tuple[tuple[int, ...], bool]:
        adds_states = self._abilities.adds_states
        if keras_model.overridden(self._model, "compute_metrics"):
            return (), study_metrics.takes_whole_batch(self._model, self._rows, adds_states)
        if all(map(keras_metrics.is_by_row, keras_metrics.compiled_metrics(self._model))):
            return (), False
        return study_metrics.whole_metrics(self._model, self._rows, adds_states), False

    def _reads_inputs(self, is_loss: bool) -> bool:
        """Return whether an overridden method that takes the whole batch depends on the inputs."""
        rows = self._rows[0]
        try:
            if is_loss:
                with_inputs, without = (
                    loss_relations.own_loss(self._model, variant, self._training)
                    for variant in (rows, rows._replace(inputs=None))
                )
                return not relation.close(np.asarray(with_inputs), np.asarray(without))
            study_metrics.update(self._model, rows._replace(inputs=None))
        except Exception:
            return True
        return False

    def _added(self) -> tuple[Kind, ...]:
        """Return the kinds of the losses that layers add, judged with the current weights and with others."""
        runs, seen = self._runs, [(self._whole, self._parts)]
        if not self._whole.added and not any(part.added for part in self._parts):
            return ()
        if not keras_model.computes_in_half(self._model):
            spread = spread_weights(self._model)
            with contextlib.suppress(CallError):
                seen.append((runs.whole(states=spread), runs.parts([spread, spread])))
        kinds = [_added_kinds(self._model, whole, parts) for whole, parts in seen]
        return tuple(_common(self._model, columns) for columns in zip(*kinds, strict=True))

    def _ways(self) -> tuple[Way, ...]:
        """Return what losses in `call` need of the whole batch, where parts run one after another."""
        if self._has_own_loss or self._abilities.gathers or not self._runs.losses:
            return ()
        if not self._whole_in_call:
            return tuple("alone" for _ in self._runs.losses)
        run = functools.partial(keras_model.call_model, self._model, self._runs.rows, self._training)
        with keras_losses.collect_added_losses(list), tf_function.own_traces():
            ways = cheapest_ways(run)
        return ways if self._uses_linearly(ways) else tuple("whole" for _ in ways)

    def _uses_linearly(self, ways: Sequence[Way]) -> bool:
        """Return whether the losses of parts give the outputs and added losses of the whole batch."""
        totals = tf.stack(
            [tf.stack([tf.cast(value, tf.float64) for value in loss.whole]) for loss in self._runs.losses]
        )
        parts = []
        for part in parts_of(self._runs.rows):
            with in_part(ways, totals, tf.constant(part.size / sum(SIZES))):
                parts.append(observe(self._model, part.rows, self._runs.mode))
        whole = self._whole
        added = zip(whole.added, *(part.added for part in parts), strict=True)
        kinds = [relation.relations(*_arrays(value, of_parts), SIZES) for value, *of_parts in added]
        return all("mean" in kind for kind in kinds) and joins(whole.outputs, [part.outputs for part in parts])


_TOLERANCE = 1e-4


def _name_of_losses(model: keras.Model) -> str:
    """Return the name of the first custom loss, or else of the model."""
    losses = [loss for loss in keras_losses.flat_losses(model) if not keras_losses.is_of_keras(loss)]
    return next(map(keras_losses.name_of, losses), model.name)


def _arrays(whole: tf.Tensor, parts: Sequence[tf.Tensor]) -> tuple[np.ndarray, list[np.ndarray]]:
    return np.asarray(whole), list(map(np.asarray, parts))


def spread_weights(model: keras.Model) -> dict[int, tf.Tensor]:
    """Return random values for the trainable weights, by index, about as far from the current ones as these are large.

    A new model returns almost the same for every row, where many losses look like means.
    """
    random, values = np.random.default_rng(1), {}
    for number, weight in enumerate(model.weights):
        if weight.trainable and tf.as_dtype(weight.dtype).is_floating:
            value = np.asarray(weight.numpy(), np.float64)
            scale = np.std(value) + 1 / np.sqrt(value.shape[0]) if value.ndim > 1 else 0.3
            values[number] = tf.cast(value + random.normal(0.0, scale, value.shape), weight.dtype)
    return values


def _added_kinds(
    model: keras.Model, whole: Observation, parts: Sequence[Observation]
) -> list[tuple[relation.Relations, list[float]]]:
    """Return the relations of each added loss, and its values for the parts and for the whole batch."""
    if any(len(part.added) != len(whole.added) for part in parts):
        raise _refusal_of_added(model, [])
    columns = zip(whole.added, *(part.added for part in parts), strict=True)
    return [
        (relation.relations(*_arrays(total, of_parts), SIZES), [float(value) for value in (*of_parts, total)])
        for total, *of_parts in columns
    ]


def _common(model: keras.Model, column: Sequence[tuple[relation.Relations, list[float]]]) -> Kind:
    common = relation.common_relations(relations for relations, _ in column)
    if "mean" in common:
        return "mean"
    if "sum" in common:
        return "sum"
    raise _refusal_of_added(model, column[-1][1])


def _refusal_of_added(model: keras.Model, values: Sequence[float]) -> ValueError:
    received = ", ".join(f"{value:.6g}" for value in values[:-1])
    numbers = f", received {received} on two parts of a batch and {values[-1]:.6g} on both" if values else ""
    return ValueError(f"A loss added with add_loss to {model.name!r} {_RULE}{numbers}. {_WAY_OUT}")


def _check_counted(whole: Observation, parts: Sequence[Observation]) -> None:
    """Refuse scalars that layers count in metrics if parts of a batch would give another result."""
    columns = zip(whole.counted, *(part.counted for part in parts), strict=False)
    for (metric, value), *of_parts in columns:
        needed = "sum" if isinstance(metric, keras.metrics.Sum) else "mean"
        relations = relation.relations(*_arrays(value, [part for _, part in of_parts]), SIZES)
        if needed in relations:
            continue
        other = {"sum": "mean", "mean": "sum"}[needed]
        if other not in relations:
            raise ValueError(
                f"A scalar that a layer counts in a metric {_RULE}, but {metric.name!r} counts neither. {_WAY_OUT}"
            )
        raise ValueError(
            f"A layer must count a {needed} over the batch in a keras.metrics.{needed.capitalize()} to be right on "
            f"replicas and micro-batches, but {metric.name!r} counts a {other}. Count one value per example, "
            "[batch, ...], or train on SingleDevice()."
        )
