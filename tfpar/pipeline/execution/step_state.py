"""The weights and states of all stages in one step, and the new values of the states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.stage_program import StageProgram


class StepVariables:
    """The weights and states of all stages in one step.

    Every weight and state (a moving average, a random seed) is read once: each micro-batch starts with its value before
    the step. Where several stages use a layer, each starts with the value of its state after the stage before.

    Args:
        programs: The compiled stages.
    """

    def __init__(self, programs: Sequence[StageProgram]) -> None:
        self._programs = programs
        self._read: dict[int, tf.Tensor] = {}
        self._copies: dict[tuple[int, str], tf.Tensor] = {}
        self._now: dict[tuple[int, int], tf.Tensor] = {}  # by state and micro-batch
        self._changed: dict[int, tuple[keras.Variable, list[tuple[tf.Tensor, Microbatch]]]] = {}
        self._change_weights: dict[Any, tf.Tensor] = {}  # by micro-batches and shape

    def read(self, stage: int, number: int) -> list[tf.Tensor]:
        """Return the values of a stage's parameters and states for a micro-batch."""
        program = self._programs[stage]
        parameters = [self._on(variable, program.device) for variable in program.parameters]
        return [*parameters, *(self.state(variable, number, program.device) for variable in program.states)]

    def state(self, variable: keras.Variable, number: int, device: str) -> tf.Tensor:
        """Return the value of a state for a micro-batch, as last noted."""
        return self._now.get((id(variable), number), self._on(variable, device))

    def _on(self, variable: keras.Variable, device: str) -> tf.Tensor:
        key = (id(variable), device)
        if key not in self._copies:
            if id(variable) not in self._read:
                with tf.control_dependencies(None), tf.device(variable.value.device):
                    self._read[id(variable)] = variable.value.read_value()
            with tf.control_dependencies(None), tf.device(device):
                self._copies[key] = tf.identity(self._read[id(variable)])
        return self._copies[key]

    def note(
        self,
        variables: Sequence[keras.Variable],
        number: int,
        states: Sequence[tf.Tensor | None],
        microbatch: Microbatch,
    ) -> None:
        """Note the values of states after a stage, or the loss, of a micro-batch; None for an unchanged one."""
        for variable, state in zip(variables, states, strict=True):
            if state is None:
                continue
            self._now[id(variable), number] = state
            _, found = self._changed.setdefault(id(variable), (variable, []))
            found[:] = [pair for pair in found if pair[1] is not microbatch] + [(state, microbatch)]

    def new_states(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return each changed state with the mean of its new values over micro-batches, weighted by their sizes.

        An integer state changes as in one micro-batch: a seed advances once a step. The states of metrics that layers
        hold are summed.
        """
        return [(variable, self._merged(variable, found)) for variable, found in self._changed.values()]

    def _merged(self, variable: keras.Variable, found: list[tuple[tf.Tensor, Microbatch]]) -> tf.Tensor:
        first, counts = found[0][0], any(id(variable) in program.metric_states for program in self._programs)
        with tf.device(variable.value.device):
            if not first.dtype.is_floating and not counts:
                return tf.identity(first)
            # The mean of the changes, so that an unchanged state is equal to the last bit; of all micro-batches at
            # once, since operations for each would be half of the graph of a model with BatchNormalization.
            before = self._read[id(variable)]
            states, microbatches = zip(*found, strict=True)
            changes = tf.stack(states) - before
            weights = self._weights(microbatches, changes.shape.rank, first.dtype, counts=counts)
            return before + tf.reduce_sum(weights * changes, 0)

    def _weights(self, microbatches: Sequence[Microbatch], rank: int, dtype: Any, *, counts: bool) -> tf.Tensor:
        """Return the weight of the change by each micro-batch, `[microbatches, 1, ...]`."""
        key = tuple(map(id, microbatches)), rank, dtype, counts
        if key not in self._change_weights:
            weights = tf.stack([one.example_weight if counts else one.part for one in microbatches])
            self._change_weights[key] = tf.cast(tf.reshape(weights, [-1] + [1] * (rank - 1)), dtype)
        return self._change_weights[key]
