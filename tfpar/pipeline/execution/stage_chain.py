"""One batch on its way through the compiled stages of a model and the loss behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfpar.pipeline.execution.compiled_stages import Programs
from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.loss_program import LossProgram
from tfpar.reduction.gradient_addition import plus


class StepPrograms(NamedTuple):
    """The compiled functions behind a step.

    Args:
        programs: Of the stages.
        loss: Behind the last stage.
        update_metrics: Takes how many examples count, which part of the batch they are, a micro-batch, the outputs and
            their masks; None without metrics.
    """

    programs: Programs
    loss: LossProgram
    update_metrics: Any


class StepContext(NamedTuple):
    """A batch on its way through the stages.

    Args:
        execution: What runs on it.
        loss: The loss behind the last stage.
        states: What the states of that are after the micro-batches so far.
        weights: The gradients of its own of the weights that it reads, as it adds them up; None for none.
    """

    execution: Execution
    loss: LossProgram
    states: list[tf.Tensor]
    weights: list[Any]

    def gradients(self) -> dict[int, Any]:
        """Return the gradient of each weight, summed over micro-batches, stages and the loss, by the weight's `id`."""
        found = self.execution.gradients()
        for variable, gradient in zip(self.loss.parameters, self.loss.joined(self.weights), strict=True):
            with tf.device(variable.value.device):
                found[id(variable)] = plus(found.get(id(variable)), gradient)
        return {key: gradient for key, gradient in found.items() if gradient is not None}
