"""Find out whether the parts of a batch give a model's outputs for the whole batch, and the states of its layers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.random_numbers import python_random
from tfpar.messages.reasons import reason_of
from tfpar.study import relation
from tfpar.study.gathered_calls import with_whole_batch
from tfpar.study.known_layers import check_parts, computes_rows_alone, in_dataset
from tfpar.study.mixing_layers import MixingLayer, Runs, calls_at, find_mixing
from tfpar.study.observation import CallError, Mode, Observation
from tfpar.study.rows import SIZES, few_rows, varied
from tfpar.study.states import States, find_states

BatchDependentLayers = Literal["refuse", "gather"]

_STATE_OF_GENERATOR = "seed_generator_state"  # the name that Keras gives it


class Words(NamedTuple):
    """What a strategy advises in a refusal.

    Args:
        alone: The way out for a model that needs its whole batch, such as `"train on SingleDevice()"`.
        mixing: The way out for a layer that mixes the rows of a batch.
        state: The way out for a state that is not a mean over the parts of a batch.
    """

    alone: str
    mixing: str
    state: str = "Reduce with a mean, or train on SingleDevice()."


class Outputs(NamedTuple):
    """What a study finds out about the outputs and states of a model.

    Args:
        gathered: The layers to call with the whole batch.
        states: The states that custom layers update.
        runs: Further runs on the same rows; None for a model that is known to compute each row alone.
        whole: The run on all rows.
        parts: The runs on the parts of them.
    """

    gathered: tuple[MixingLayer, ...] = ()
    states: States = States([], [], [])
    runs: Runs | None = None
    whole: Observation = Observation()
    parts: Sequence[Observation] = ()


def study_outputs(
    model: keras.Model,
    batch: Any,
    mode: Mode,
    words: Words,
    *,
    gathers_layers: bool = False,
    accepts_mixing: bool = False,
    gathered: Sequence[str] = (),
    is_known: bool = False,
) -> Outputs:
    """Find out whether the parts of a batch give the outputs of the whole batch, or refuse the model.

    Args:
        model: A built model.
        batch: Its first batch, `(inputs, targets, sample_weight)` as far as given.
        mode: How the model runs.
        words: The advice in refusals.
        gathers_layers: Whether layers that mix rows are called with the whole batch.
        accepts_mixing: Whether layers that mix rows are accepted, and states of any kind.
        gathered: The paths of layers that another worker found to need the whole batch.
        is_known: Whether to skip the runs if all layers are known to compute each row alone.

    Raises:
        ValueError: If a layer mixes rows, fails on a few rows, draws from NumPy or Python, or changes a variable that
            Keras does not track.
    """
    check_parts(model, mode.training)
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    is_dense = all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(inputs) if leaf is not None)
    if is_known and is_dense and computes_rows_alone(model, mode.training):
        return Outputs()
    rows = few_rows(inputs)
    gathers = calls_at(_runs(model, rows, mode, (), words)[0], gathered) if gathered else []
    while True:
        runs, whole, parts = _runs(model, rows, mode, gathers, words)
        check_tracked(model, [whole, *parts], mode, words)
        if accepts_mixing:
            return Outputs((), States([], [], []), runs, whole, parts)
        _check_axes(model, whole, parts, words)
        mixing = find_mixing(runs, whole, parts)
        if mixing is None:
            return Outputs(tuple(gathers), find_states(runs, whole, parts), runs, whole, parts)
        is_gathered = any(mixing.operation is earlier.operation for earlier in gathers)
        if is_gathered or not gathers_layers:
            raise _refusal(model, mixing, mode.training, words, is_gathered=is_gathered)
        gathers.append(mixing)


def check_choice(batch_dependent_layers: str) -> None:
    """Refuse an unknown value of `batch_dependent_layers`.

    Raises:
        ValueError: If it is neither "refuse" nor "gather".
    """
    if batch_dependent_layers not in ("refuse", "gather"):
        raise ValueError(f"batch_dependent_layers must be 'refuse' or 'gather', received {batch_dependent_layers!r}.")


def _runs(
    model: keras.Model, rows: Any, mode: Mode, gathered: Sequence[MixingLayer], words: Words
) -> tuple[Runs, Observation, list[Observation]]:
    """Run a model on varied rows, or on unchanged ones if it fails, for example because rows must sum to 1."""
    with_gathered = functools.partial(with_whole_batch, gathered)
    replays_losses = not keras_model.overridden(model, "compute_loss")
    try:
        runs = Runs(model, varied(rows), mode, replays_losses, with_gathered)
        return runs, runs.whole(), runs.parts()
    except CallError:
        _check_lengths(model, rows)
        runs = Runs(model, rows, mode, replays_losses, with_gathered)
        try:
            return runs, runs.whole(), runs.parts()
        except CallError as failure:
            raise _failure(failure, words) from failure.error


def _check_lengths(model: keras.Model, rows: Any) -> None:
    """Refuse a model that fails on lengths other than the single one of its ragged inputs."""
    ragged = [leaf.row_lengths() for leaf in tf.nest.flatten(rows) if isinstance(leaf, tf.RaggedTensor)]
    if ragged and all(int(tf.reduce_max(lengths)) == int(tf.reduce_min(lengths)) for lengths in ragged):
        raise ValueError(
            f"Parts of a batch pad ragged inputs to different lengths, and {model.name!r} fails on lengths other than "
            "those of the first batch. Convert ragged inputs in the dataset, with to_tensor(), or train on "
            "SingleDevice()."
        )


def _failure(failure: CallError, words: Words) -> ValueError:
    first, second = SIZES
    return ValueError(
        f"Every layer must run on any number of examples, and {failure.path!r} does not run on {first}, {second} and "
        f"{first + second}: {reason_of(failure.error)}. Declare the number of examples as None, or -1 in a reshape, or "
        f"{words.alone}."
    )


def check_tracked(model: keras.Model, seen: Sequence[Observation], mode: Mode, words: Words) -> None:
    """Refuse random numbers of NumPy or Python, and changes of variables that Keras does not track."""
    if drawing := [path for run in seen for path in run.python_draws]:
        names = list(dict.fromkeys(drawing))
        raise python_random.refusal(names, words.alone, in_dataset(keras_model.all_layers(model)))
    for variable, path in [item for run in seen for item in run.untracked.items()]:
        is_generator = variable.endswith(_STATE_OF_GENERATOR)
        if is_generator and mode.gathers:  # replicas draw from generators that Keras does not track
            continue
        way_out = "Create it with self.add_weight(trainable=False) in a layer"
        if is_generator:
            way_out = "Keep the generator in an attribute of a layer"
        raise ValueError(
            f"A layer or a loss must keep its state in weights that Keras tracks, received {path!r}, which changes "
            f"the untracked variable {variable!r} in its call. {way_out}, or use SingleDevice()."
        )


def _check_axes(model: keras.Model, whole: Observation, parts: Sequence[Observation], words: Words) -> None:
    """Refuse outputs whose first axis is not that of the rows."""
    leaves = zip(*(tf.nest.flatten(run.outputs) for run in (whole, *parts)), strict=False)
    for number, (values, *others) in enumerate(leaves):
        if isinstance(values, tf.Tensor) and relation.is_joined_elsewhere(
            np.asarray(values), list(map(np.asarray, others))
        ):
            is_sequential = isinstance(model, keras.Sequential)
            names = [model.layers[-1].name] if is_sequential else getattr(model, "output_names", [])
            raise ValueError(
                "Every output of a model must have the examples as its first axis, so that parts of a batch can be "
                f"joined, received {(names[number] if number < len(names) else model.name)!r}. Move the axis with "
                f"keras.ops.transpose, or {words.alone}."
            )


def _refusal(model: keras.Model, mixing: MixingLayer, training: bool, words: Words, *, is_gathered: bool) -> ValueError:
    way_out = words.mixing
    if is_gathered:
        way_out = (
            "calling it with the whole batch does not give the result of one device; call tfpar.gather in the layer, "
            f"or {words.alone}"
        )
    layers = [layer for layer in keras_model.all_layers(model) if layer is mixing.operation]
    return ValueError(
        f"Every layer must compute each example alone, or parts of a batch change the result, received {mixing.path!r}"
        f"{'' if training else ' in inference'}, where an example depends on the others of its batch; "
        f"{in_dataset(layers)}{way_out}."
    )
