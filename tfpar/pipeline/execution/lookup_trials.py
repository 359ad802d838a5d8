"""The kinds of lookups that a traced graph does not determine, inferred from trials on a few examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar.pipeline.execution.bundles import Bundle
from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.execution.live_tensors import LiveTensors
from tfpar.pipeline.execution.loss_program import LossProgram
from tfpar.pipeline.execution.microbatches import Microbatch, Microbatches
from tfpar.pipeline.execution.stage_functions import ForwardResults
from tfpar.pipeline.execution.stage_program import StageProgram
from tfpar.pipeline.execution.stage_values import MaskedTensor, Place
from tfpar.pipeline.execution.step_state import StepVariables
from tfpar.pipeline.graph.trial_batch import pairs_of_parts
from tfpar.reduction import indexed_slices
from tfpar.reduction.gradient_addition import dense_part
from tfpar.reduction.indexed_slices import Observed

Numbers = list[list[list[np.ndarray]]]  # row numbers by stage, the loss last, by weight and by lookup
Flat = Callable[[Any], dict[Any, Any]]


def infer_lookup_kinds(
    programs: Programs, loss: LossProgram, batch: Any, flat: Flat, *, allow_batch_dependence: bool
) -> tuple[Programs, LossProgram]:
    """Return stages and loss with the kinds of those lookups that their graphs do not determine.

    Args:
        programs: The compiled stages, for training.
        loss: The compiled loss, for training.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given; its first examples are used.
        flat: Returns the inputs of the graph for a batch of inputs of the model.
        allow_batch_dependence: Whether a lookup of no kind is treated as one of single examples, instead of refused.

    Raises:
        ValueError: If row numbers computed from a micro-batch can differ from those of the global batch.
    """
    users: list[StageProgram | LossProgram] = [*programs.stages, loss]
    if not any(None in kinds for user in users for kinds in user.kinds):
        return programs, loss
    seen, trials = [], programs._replace(stages=[program.without_xla() for program in programs.stages])
    for pair in pairs_of_parts(batch):
        both = data.join_batches(pair)
        whole, *parts = (
            _row_numbers(trials, loss, flat, Microbatches(both, count)[number])
            for count, number in ((1, 0), (2, 0), (2, 1))
        )
        seen.append((whole, parts))
    found = [
        tuple(
            _kinds_of_weight(
                weight,
                kinds,
                [_observed(trial, index, number) for trial in seen],
                allow_batch_dependence=allow_batch_dependence,
            )
            for number, (weight, kinds) in enumerate(zip(user.parameters, user.kinds, strict=True))
        )
        for index, user in enumerate(users)
    ]
    return with_kinds(programs, loss, found)


def kinds_of(programs: Programs, loss: LossProgram) -> list[Any]:
    """Return the kinds of all lookups: of each stage, the loss last, by weight and lookup."""
    return [*(one.kinds for one in programs.stages), loss.kinds]


def with_kinds(programs: Programs, loss: LossProgram, kinds: Sequence[Any]) -> tuple[Programs, LossProgram]:
    """Return stages and loss with other kinds of lookups, in the order of `kinds_of`."""
    *of_stages, of_loss = (tuple(map(tuple, of_user)) for of_user in kinds)
    stages = [dataclasses.replace(one, kinds=of_one) for one, of_one in zip(programs.stages, of_stages, strict=True)]
    return programs._replace(stages=stages), dataclasses.replace(loss, kinds=of_loss)


def _observed(trial: tuple[Numbers, list[Numbers]], index: int, number: int) -> list[Observed]:
    """Return the row numbers of each lookup of one weight in one trial."""
    whole, parts = trial
    of_parts = zip(*(part[index][number] for part in parts), strict=True)
    return [Observed(*both) for both in zip(whole[index][number], of_parts, strict=True)]


def _kinds_of_weight(
    weight: keras.Variable,
    kinds: Sequence[indexed_slices.Kind | None],
    trials: Sequence[Sequence[Observed]],
    *,
    allow_batch_dependence: bool,
) -> tuple[indexed_slices.Kind, ...]:
    return tuple(
        kind
        or indexed_slices.kind_of([trial[place] for trial in trials])
        or _without_kind(weight, allow_batch_dependence=allow_batch_dependence)
        for place, kind in enumerate(kinds)
    )


def _without_kind(weight: keras.Variable, *, allow_batch_dependence: bool) -> indexed_slices.Kind:
    if allow_batch_dependence:
        return "listed"
    ON_WHOLE_BATCH = "use a Pipeline with num_microbatches=1"
    raise ValueError(
        "In a pipeline, the row numbers of a lookup must be computed from each example alone, from constants or from "
        f"positions, received lookups in {weight.path!r} whose row numbers depend on several examples. Change how they "
        f"are computed, {ON_WHOLE_BATCH}, or set allow_batch_dependent_layers=True to train with the row numbers "
        "of each micro-batch."
    )


def _row_numbers(programs: Programs, loss: LossProgram, flat: Flat, microbatch: Microbatch) -> Numbers:
    """Run the stages, each with output gradients of ones, and the loss; return the row numbers of their lookups."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(microbatch.batch)
    values = {value: MaskedTensor(tensor) for value, tensor in flat(inputs).items()}
    live, found = LiveTensors(), []
    variables = StepVariables(programs.stages, live, loss.layer_states, loss.parameters)
    for index, program in enumerate(programs.stages):
        taken = [values[value].on(program.device) for value in program.stage.inputs]
        scale = tf.ones([program.num_losses], keras.config.floatx())
        sums = tf.ones([len(program.ways), 2], tf.float64)
        place = Place(tf.constant(0, tf.int64), tf.constant(1.0, tf.float64), sums)
        parameters = variables.weights(index)
        done = program.forward(parameters, variables.states(index, 0), taken, place, scale, microbatch.rows)
        variables.note(index, 0, done.new_states, microbatch)
        outputs = list(map(MaskedTensor, done.outputs, done.masks))
        values.update(zip(program.stage.outputs, outputs, strict=True))
        rows = _rows(program, parameters, done, microbatch) if any(program.kinds) else [None for _ in program.kinds]
        found.append(_numbers(rows))
    outputs = [values[value].on(*loss.devices) for value in programs.outputs]
    of_loss = (
        _gradients_of_loss(loss, microbatch, outputs, variables) if any(loss.kinds) else [None for _ in loss.kinds]
    )
    return [*found, _numbers(of_loss)]


def _numbers(gradients: Sequence[Any]) -> list[list[np.ndarray]]:
    return [[rows.indices.numpy() for rows in one] if isinstance(one, tuple) else [] for one in gradients]


def _gradients_of_loss(
    loss: LossProgram, microbatch: Microbatch, outputs: Sequence[MaskedTensor], variables: StepVariables
) -> list[Any]:
    states = [state.value.read_value() for state in loss.states]
    divisors, scale = tf.ones([loss.num_divisors], tf.float64), tf.ones((), keras.config.floatx())
    number, layer_states = tf.constant(0, tf.int64), variables.loss_states(0)
    part = loss.part(number, microbatch, outputs, states, layer_states, variables.loss_parameters, divisors, scale)
    return list(part.weights)


def _rows(program: StageProgram, parameters: Bundle, done: ForwardResults, microbatch: Microbatch) -> list[Any]:
    upstream = [
        tf.nest.map_structure(lambda one: tf.ones_like(dense_part(one)), output) if spec.needs_gradient else None
        for output, spec in zip(done.outputs, program.output_specs, strict=True)
    ]
    results = program.backward(parameters, done.saved, upstream, None, microbatch.rows)
    return program.weight_gradients(parameters, results.saved, None).rows if program.splits_backward else results.rows
