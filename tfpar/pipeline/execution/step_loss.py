"""The loss of one batch after the last stage: micro-batch by micro-batch, or for all of them together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.pipeline.execution.executor import Execution
from tfpar.pipeline.execution.live_tensors import Key, LiveTensors
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.row_sums import RowSums
from tfpar.pipeline.execution.step_compiler import CompiledStep
from tfpar.pipeline.execution.step_state import LOSS
from tfpar.pipeline.loss.metrics_update import MetricsUpdate
from tfpar.pipeline.loss.microbatch_loss import LossArguments, LossResult, taken_after_stages
from tfpar.pipeline.stages.values import MaskedTensor
from tfpar.reduction.gradient_addition import plus

_METRICS, _WHOLE_METRICS = Key("updated", "metrics"), Key("updated", "metrics of the whole batch")
_METRIC_STATES = Key("metric states", LOSS)


class StepLoss:
    """The loss of a batch, computed micro-batch by micro-batch during an execution, or once for all of them.

    Args:
        step: The compiled functions of the step.
        divisors: The divisors of the losses over the batch, float64 `[divisors]`.
        scale: The gradient of one unit of loss, a scalar in Keras' float type.
        updates_metrics: Whether the outputs update the metrics.
        adds_metrics: Whether the states of metrics begin at zero, to be added to those of the first replica.

    Attributes:
        compiled: The loss of a micro-batch.
        takes_whole: Whether the loss takes the whole batch.
        takes_outputs: Whether the loss or a metric does.
    """

    def __init__(
        self,
        step: CompiledStep,
        divisors: tf.Tensor,
        scale: tf.Tensor,
        *,
        updates_metrics: bool,
        adds_metrics: bool = False,
    ) -> None:
        self.compiled = step.loss
        with tf.device(self.compiled.device):  # or a loop would send them there in every iteration
            self._divisors, self._scale = tf.identity(divisors), tf.identity(scale)
        self._metrics = step.metrics if updates_metrics else None
        self._whole_metrics = step.whole_metrics if updates_metrics else None
        self.takes_whole = step.takes_whole_loss
        self.takes_outputs = self.takes_whole or self._whole_metrics is not None
        states = [variable.value.read_value() for variable in self.compiled.metric_states]
        self._initial = list(map(tf.zeros_like, states)) if adds_metrics else states

    @property
    def variables(self) -> tuple[Sequence[keras.Variable], Sequence[keras.Variable]]:
        """The states that the loss reads and changes, and the weights that it reads."""
        return self.compiled.layer_states, self.compiled.parameters

    def __call__(self, execution: Execution, number: int, outputs: list[MaskedTensor]) -> LossResult | None:
        """Add the loss of a micro-batch to that of the batch, with the states that it changes.

        Args:
            execution: The execution that computed the outputs.
            number: The index of the micro-batch.
            outputs: The flat outputs of the model for the micro-batch.

        Returns:
            The part of the micro-batch; None where the loss takes the whole batch.
        """
        device = self.compiled.device
        microbatch, part = execution.microbatch(number, device), None
        if not self.takes_whole:
            part = self._add(execution, number, execution.number(number, device), microbatch, outputs)
        if self._metrics is not None:
            self._update_metrics(self._metrics, _METRICS, execution.live, microbatch, outputs)
        return part

    def of_batch(
        self, execution: Execution, batch: Microbatch, outputs: list[MaskedTensor], *, counts: bool
    ) -> Sequence[Any]:
        """Compute the loss and update the metrics that take the whole batch; return the gradients of the outputs.

        Args:
            execution: The execution of the first replica.
            batch: All examples of the global batch as one micro-batch.
            outputs: The flat outputs of the model for them.
            counts: Whether this worker counts the value; all have the gradients.
        """
        gradients: Sequence[Any] = []
        if self.takes_whole:
            with tf.device(batch.host):
                number = tf.zeros([], tf.int64)
            gradients = self._add(execution, 0, number, batch, outputs, counts=counts).gradients
        if self._whole_metrics is not None:
            self._update_metrics(self._whole_metrics, _WHOLE_METRICS, execution.live, batch, outputs)
        return gradients

    def _add(
        self,
        execution: Execution,
        number: int,
        index: tf.Tensor,
        microbatch: Microbatch,
        outputs: list[MaskedTensor],
        *,
        counts: bool = True,
    ) -> LossResult:
        """Add the loss of a micro-batch, whose index is `number` on its replica and `index` in the global batch."""
        live = execution.live
        states = live.get(_METRIC_STATES, self._initial)
        part = self.compiled(
            LossArguments(
                taken_after_stages(self.compiled.model, microbatch.batch),
                outputs=[output.tensor for output in outputs],
                masks=[output.mask for output in outputs],
                metric_states=states,
                layer_states=execution.variables.loss_states(number),
                parameters=execution.variables.loss_parameters,
                number=index,
                num_counted=microbatch.num_counted,
                size=microbatch.size,
                num_examples=microbatch.num_examples,
                divisors=self._divisors,
                scale=self._scale,
            )
        )
        if not counts:
            part = part.not_counted(states)
            microbatch = dataclasses.replace(microbatch, num_counted=tf.zeros_like(microbatch.num_counted))
        live[_METRIC_STATES] = [
            tf.where(microbatch.num_counted > 0, new, old) for new, old in zip(part.metric_states, states, strict=True)
        ]
        execution.add("loss", LOSS, part.value)
        for output, value in enumerate(part.of_outputs):
            execution.add("loss of an output", output, value)
        self._add_weights(live, part.weight_gradients)
        execution.variables.note_loss(number, part.layer_states, microbatch)
        return part

    def value(self, live: LiveTensors) -> tf.Tensor:
        """Return the loss of the batch without added losses, a scalar; it is computed after metrics are assigned.

        TensorFlow prunes the updates unless a result depends on theirs, which is zero.
        """
        with tf.device(self.compiled.device):
            value: tf.Tensor = live.get(Key("loss", LOSS), tf.zeros([], keras.config.floatx()))
            for zero in self._updated(live):
                value += tf.cast(zero, value.dtype)
            return value

    def of_outputs(self, live: LiveTensors) -> list[tf.Tensor]:
        """Return the losses of single outputs, where Keras logs them, scalars."""
        return [live[key] for key in live.of_role("loss of an output")]

    def new_states(self, live: LiveTensors) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables of metrics that change, with their values after the batch; not those that are added."""
        own = self.compiled.updated_metrics(live.get(_METRIC_STATES, self._initial))
        if self._metrics is None or self._metrics.is_added:
            return own
        return [*own, *self._metrics.updated(live[_METRICS])]

    def metrics_to_add(self, live: LiveTensors) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables of metrics, with the sums to add to those of the first replica."""
        return [] if self._metrics is None or not self._metrics.is_added else self._metrics.updated(live[_METRICS])

    def sums(self, live: LiveTensors) -> list[Any]:
        """Return the gradients of the weights that the loss itself reads, summed over micro-batches.

        Each is a tensor, a tuple with the rows of each lookup, or None. There are none where the first replica computes
        the loss of the whole batch.
        """
        if Key("loss", LOSS) not in live:
            return []
        rows = self._rows(live).total()
        dense = [live.get(Key("gradient of the loss", index)) for index in range(len(rows))]
        return [one if of_one is None else of_one for one, of_one in zip(dense, rows, strict=True)]

    def _add_weights(self, live: LiveTensors, gradients: Sequence[Any]) -> None:
        self._rows(live).add(gradients)
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.Tensor):
                key = Key("gradient of the loss", index)
                live[key] = plus(live.get(key), gradient)

    def _rows(self, live: LiveTensors) -> RowSums:
        loss = self.compiled
        return RowSums(live, LOSS, loss.traced_weight_gradients, loss.kinds, loss.device)

    def _update_metrics(
        self,
        metrics: MetricsUpdate,
        key: Key,
        live: LiveTensors,
        microbatch: Microbatch,
        outputs: Sequence[MaskedTensor],
    ) -> None:
        """Update metrics after their update by the micro-batch before."""
        tensors, masks = [value.tensor for value in outputs], [value.mask for value in outputs]
        with tf.control_dependencies(None):
            before = live.get(key) or metrics.initial()
            batch = taken_after_stages(self.compiled.model, microbatch.batch)
            live[key] = metrics(before, microbatch.num_counted, microbatch.part, batch, tensors, masks)

    def _updated(self, live: LiveTensors) -> list[tf.Tensor]:
        """Return zeros that are computed after all updates of metrics."""
        updates = (_METRICS, self._metrics), (_WHOLE_METRICS, self._whole_metrics)
        in_place = [key for key, metrics in updates if metrics is not None and not metrics.variables]
        return [zero for key in in_place for zero in live.get(key, [])]
