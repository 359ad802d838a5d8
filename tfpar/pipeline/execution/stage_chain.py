"""The loss of one batch, computed micro-batch by micro-batch after the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.live_tensors import Key, LiveTensors
from tfpar.pipeline.execution.loss_program import LossPart, LossProgram
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.model_loss import taken_after_stages
from tfpar.pipeline.execution.row_gradients import RowSums
from tfpar.pipeline.execution.stage_values import MaskedTensor
from tfpar.pipeline.execution.step_results import MetricsUpdate
from tfpar.pipeline.execution.step_state import LOSS
from tfpar.reduction.gradient_addition import plus


class StepPrograms(NamedTuple):
    """The compiled functions of a step.

    Args:
        programs: The stages.
        loss: The loss, after the last stage.
        metrics: The update of the metrics; None without metrics.
    """

    programs: Programs
    loss: LossProgram
    metrics: MetricsUpdate | None


_METRICS = Key("updated", "metrics")
_METRIC_STATES = Key("metric states", LOSS)


class BatchLoss:
    """The loss of a batch, computed micro-batch by micro-batch during an execution.

    Args:
        compiled: The compiled functions of the step.
        divisors: The divisors of the losses over the batch, float64 `[divisors]`.
        scale: The gradient of one unit of loss, a scalar in Keras' float type.
        updates_metrics: Whether the outputs update the metrics.
        adds_metrics: Whether the states of metrics begin at zero, to be added to those of the first replica.
    """

    def __init__(
        self,
        compiled: StepPrograms,
        divisors: tf.Tensor,
        scale: tf.Tensor,
        *,
        updates_metrics: bool,
        adds_metrics: bool = False,
    ) -> None:
        self._program = compiled.loss
        with tf.device(self._program.device):  # or a loop would send them there in every iteration
            self._divisors, self._scale = tf.identity(divisors), tf.identity(scale)
        self._metrics = compiled.metrics if updates_metrics else None
        states = [variable.value.read_value() for variable in compiled.loss.states]
        self._initial = list(map(tf.zeros_like, states)) if adds_metrics else states

    @property
    def variables(self) -> tuple[Sequence[keras.Variable], Sequence[keras.Variable]]:
        """The states that the loss reads and changes, and the weights that it reads."""
        return self._program.layer_states, self._program.parameters

    def __call__(self, execution: Execution, number: int, outputs: list[MaskedTensor]) -> LossPart:
        """Add the loss of a micro-batch to that of the batch, with the states that it changes.

        Args:
            execution: The execution that computed the outputs.
            number: The index of the micro-batch.
            outputs: The flat outputs of the model for the micro-batch.
        """
        program, live = self._program, execution.live
        one = execution.microbatch(number, program.device)
        states = live.get(_METRIC_STATES, self._initial)
        layer_states = execution.variables.loss_states(number)
        part = program.part(
            execution.number(number, program.device), one, outputs, states, layer_states,
            execution.variables.loss_parameters, self._divisors, self._scale,
        )  # fmt: skip
        live[_METRIC_STATES] = [
            tf.where(one.num_counted > 0, new, old) for new, old in zip(part.states, states, strict=True)
        ]
        execution.add("loss", LOSS, part.value)
        for index, of_output in enumerate(part.of_outputs):
            execution.add("loss of an output", index, of_output)
        self._add_weights(live, part.weights)
        execution.variables.note_loss(number, part.layer_states, one)
        if self._metrics is not None:
            self._update_metrics(self._metrics, live, one, outputs)
        return part

    def value(self, live: LiveTensors) -> tf.Tensor:
        """Return the loss of the batch without added losses, a scalar; it is computed after metrics are assigned.

        TensorFlow prunes the updates unless a result depends on theirs, which is zero.
        """
        value: tf.Tensor = live[Key("loss", LOSS)]
        with tf.device(self._program.device):
            for zero in self._updated(live):
                value += tf.cast(zero, value.dtype)
            return value

    def of_outputs(self, live: LiveTensors) -> list[tf.Tensor]:
        """Return the losses of single outputs, where Keras logs them, scalars."""
        return [live[key] for key in live.of_role("loss of an output")]

    def new_states(self, live: LiveTensors) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables of metrics that change, with their values after the batch; not those that are added."""
        own = self._program.updated_metrics(live[_METRIC_STATES])
        if self._metrics is None or self._metrics.is_added:
            return own
        return [*own, *self._metrics.updated(live[_METRICS])]

    def metrics_to_add(self, live: LiveTensors) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables of metrics, with the sums to add to those of the first replica."""
        return [] if self._metrics is None or not self._metrics.is_added else self._metrics.updated(live[_METRICS])

    def sums(self, live: LiveTensors) -> list[Any]:
        """Return the gradients of the weights that the loss itself reads, summed over micro-batches.

        Each is a tensor, a tuple with the rows of each lookup, or None.
        """
        rows = self._rows(live).total()
        dense = [live.get(Key("gradient of the loss", index)) for index in range(len(rows))]
        return [one if of_one is None else of_one for one, of_one in zip(dense, rows, strict=True)]

    @property
    def program(self) -> LossProgram:
        """The compiled loss."""
        return self._program

    def _add_weights(self, live: LiveTensors, gradients: Sequence[Any]) -> None:
        self._rows(live).add(gradients)
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.Tensor):
                key = Key("gradient of the loss", index)
                live[key] = plus(live.get(key), gradient)

    def _rows(self, live: LiveTensors) -> RowSums:
        program = self._program
        return RowSums(live, LOSS, program.trace.weight_gradients, program.kinds, program.device)

    def _update_metrics(
        self, metrics: MetricsUpdate, live: LiveTensors, one: Microbatch, outputs: Sequence[MaskedTensor]
    ) -> None:
        """Update the metrics after their update by the micro-batch before."""
        tensors, masks = [value.tensor for value in outputs], [value.mask for value in outputs]
        with tf.control_dependencies(None):
            before = live.get(_METRICS) or metrics.initial()
            batch = taken_after_stages(self._program.loss.model, one.batch)
            given = before, one.num_counted, one.part, batch, tensors, masks
            live[_METRICS] = list(metrics.function(*given))

    def _updated(self, live: LiveTensors) -> list[tf.Tensor]:
        """Return zeros that are computed after all updates of metrics."""
        in_place = self._metrics is not None and not self._metrics.variables
        return live.get(_METRICS, []) if in_place else []
