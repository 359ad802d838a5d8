"""The execution of one batch: its compiled functions, its loss and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.loss_program import LossPart, LossProgram
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.stage_values import MaskedTensor
from tfpar.reduction.gradient_addition import plus


class StepPrograms(NamedTuple):
    """The compiled functions of a step.

    Args:
        programs: The stages.
        loss: The loss, after the last stage.
        update_metrics: A function of the number of examples without padding, the part of the global batch, the
            micro-batch, the outputs and their masks; None without metrics.
    """

    programs: Programs
    loss: LossProgram
    update_metrics: Any


class BatchLoss:
    """The loss of a batch, computed micro-batch by micro-batch during an execution.

    Args:
        compiled: The compiled functions of the step.
        microbatches: The micro-batches of the batch.
        divisors: The divisors of the losses over the batch, float64 `[divisors]`.
        scale: The gradient of one unit of loss, a scalar in Keras' float type.
        updates_metrics: Whether the outputs update the metrics.
    """

    def __init__(
        self,
        compiled: StepPrograms,
        microbatches: Sequence[Microbatch],
        divisors: tf.Tensor,
        scale: tf.Tensor,
        *,
        updates_metrics: bool,
    ) -> None:
        self._compiled, self._microbatches, self._divisors, self._scale = compiled, microbatches, divisors, scale
        self._updates_metrics = updates_metrics and compiled.update_metrics is not None
        self._program = compiled.loss
        self._states = [variable.value.read_value() for variable in compiled.loss.states]
        self._weights: list[Any] = [None] * len(compiled.loss.parameters)

    def __call__(self, execution: Execution, number: int, outputs: list[MaskedTensor]) -> LossPart:
        """Return the part of a micro-batch of the loss; note the states that it changes.

        Args:
            execution: The execution that computed the outputs.
            number: The index of the micro-batch.
            outputs: The flat outputs of the model for the micro-batch.
        """
        program, one = self._program, self._microbatches[number]
        layer_states, parameters = (
            [execution.state(variable, number) for variable in variables]
            for variables in (program.layer_states, program.parameters)
        )
        part = program.part(number, one, outputs, self._states, layer_states, parameters, self._divisors, self._scale)
        pairs = zip(part.states, self._states, strict=True)
        self._states = [tf.where(one.num_counted > 0, new, old) for new, old in pairs]
        if part.weights:
            self._weights = program.sum_rows(self._weights, part.weights)
        execution.note(program.layer_states, number, part.layer_states)
        if self._updates_metrics:
            tensors, masks = [value.tensor for value in outputs], [value.mask for value in outputs]
            self._compiled.update_metrics(one.num_counted, one.part, one.batch, tensors, masks)
        return part

    def new_states(self) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables of metrics that `compute_loss` itself updates, with their values after the batch."""
        return self._program.updated_metrics(self._states)

    def gradients(self) -> list[tuple[keras.Variable, Any]]:
        """Return the weights that the loss itself reads, each with its summed gradient."""
        return list(zip(self._program.parameters, self._program.joined(self._weights), strict=True))


class StepContext(NamedTuple):
    """The execution of one batch and its loss.

    Args:
        execution: The actions on the batch.
        loss: The loss of the batch.
    """

    execution: Execution
    loss: BatchLoss

    def gradients(self) -> dict[int, Any]:
        """Return the gradient of each weight, summed over micro-batches, stages and the loss, by the weight's `id`."""
        found = self.execution.gradients()
        for variable, gradient in self.loss.gradients():
            with tf.device(variable.value.device):
                found[id(variable)] = plus(found.get(id(variable)), gradient)
        return {key: gradient for key, gradient in found.items() if gradient is not None}
