"""Find out, before the first step, how rows that stages look up for micro-batches are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import data, slices
from tfpar.pipeline.flows import Forward, Place, Travelling
from tfpar.pipeline.gradients import dense_part
from tfpar.pipeline.programs import Programs
from tfpar.pipeline.stage import StageProgram
from tfpar.pipeline.trial import pairs_of_parts
from tfpar.pipeline.variables import StepVariables
from tfpar.slices import Observed

Numbers = list[list[list[np.ndarray]]]  # row numbers by stage, weight and lookup


def find_kinds(programs: Programs, batch: Any, flat: Callable[[Any], dict[Any, Any]], *, mixing: bool) -> None:
    """Let stages know the kinds of their lookups that their graphs do not tell.

    Args:
        programs: The compiled stages, for training.
        batch: A batch of the model's inputs; its first examples are used.
        flat: Returns a batch of the graph's inputs for one of the model's.
        mixing: Whether a lookup of no kind counts as one of single examples, instead of being refused.

    Raises:
        ValueError: If rows of a weight are looked up in a way that micro-batches would change.
    """
    if not any(None in kinds for program in programs.stages for kinds in program.kinds):
        return
    seen = [
        (_row_numbers(programs, flat(data.join_batches(parts))), [_row_numbers(programs, flat(part)) for part in parts])
        for parts in pairs_of_parts(batch)
    ]
    for stage, program in enumerate(programs.stages):
        for number, kinds in enumerate(program.kinds):
            of_weight = [(whole[stage][number], [part[stage][number] for part in parts]) for whole, parts in seen]
            observed = [
                [Observed(whole[place], [part[place] for part in parts]) for whole, parts in of_weight]
                for place in range(len(kinds))
            ]
            program.kinds[number] = tuple(
                kind or slices.kind_of(of_one) or _without_kind(program.parameters[number], mixing=mixing)
                for kind, of_one in zip(kinds, observed, strict=True)
            )


def _without_kind(weight: keras.Variable, *, mixing: bool) -> slices.Kind:
    if mixing:
        return "listed"
    raise ValueError(
        "In a pipeline rows of a weight must be looked up by single examples or by the whole batch, received "
        f"{weight.path!r}, whose row numbers depend on the batch in another way. Compute them from each example alone, "
        "from constants or from positions, or use num_microbatches=1, or allow_mixing=True to train so all the same."
    )


def _row_numbers(programs: Programs, inputs: dict[Any, Any]) -> Numbers:
    """Run the stages, each with a gradient of ones behind it, and return what their lookups look up."""
    values = {value: Travelling(tensor) for value, tensor in inputs.items()}
    variables, found = StepVariables(programs.stages), []
    for index, program in enumerate(programs.stages):
        taken = [values[value].on(program.device) for value in program.stage.inputs]
        scale = tf.ones([program.num_losses], keras.config.floatx())
        sums = tf.ones([len(program.ways), 2], tf.float64)
        place = Place(tf.constant(0, tf.int64), tf.constant(1.0, tf.float64), sums)
        done = program.forward(taken, variables.read(index, 0), place, scale)
        values.update(zip(program.stage.outputs, done.made, strict=True))
        gradients = _gradients(program, done) if any(program.kinds) else [None for _ in program.kinds]
        found.append([[piece.indices.numpy() for piece in one] if isinstance(one, tuple) else [] for one in gradients])
    return found


def _gradients(program: StageProgram, done: Forward) -> list[Any]:
    upstream = [
        tf.ones_like(dense_part(made.tensor)) if flow.needs_gradient else None
        for made, flow in zip(done.made, program.sends, strict=True)
    ]
    _, gradients = program.backward(done, upstream, None)
    return program.weight_gradients(done, None) if gradients is None else gradients
