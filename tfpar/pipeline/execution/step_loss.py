"""The loss and metrics of one batch, micro-batch by micro-batch or for the whole batch at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar.pipeline.execution.live_tensors import Key
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.row_sums import RowSums
from tfpar.pipeline.execution.step_compiler import CompiledStep
from tfpar.pipeline.execution.step_state import LOSS, StepVariables
from tfpar.pipeline.loss.metrics_update import MetricsUpdate
from tfpar.pipeline.loss.microbatch_loss import LossArguments, LossResult, last_stage_batch
from tfpar.pipeline.stages.values import MaskedTensor

_METRICS, _WHOLE_METRICS = Key("updated", "metrics"), Key("updated", "metrics of the whole batch")
_METRIC_STATES, _LOSS = Key("metric states", LOSS), Key("loss", LOSS)


class StepLoss:
    """The loss and metrics of a batch, computed for each micro-batch or for the whole batch at once.

    Args:
        step: The compiled functions of the step.
        variables: The weights, states and live tensors of the step.
        divisors: The divisors of the losses over the batch, float64 `[divisors]`.
        scale: The gradient with respect to the loss, a scalar in Keras' float type.
        updates_metrics: Whether to update the metrics.
        adds_metrics: Whether metric states start at zero, to be added to those of the first replica.

    Attributes:
        compiled: The compiled loss.
        takes_whole: Whether the loss is computed for the whole batch at once.
        takes_outputs: Whether the loss or a metric is.
    """

    def __init__(
        self,
        step: CompiledStep,
        variables: StepVariables,
        divisors: tf.Tensor,
        scale: tf.Tensor,
        *,
        updates_metrics: bool,
        adds_metrics: bool = False,
    ) -> None:
        self.compiled, self._variables, self._live = step.loss, variables, variables.live
        with tf.device(self.compiled.device):  # otherwise a loop sends them in every iteration
            self._divisors, self._scale = tf.identity(divisors), tf.identity(scale)
        self._metrics = step.metrics if updates_metrics else None
        self._whole_metrics = step.whole_metrics if updates_metrics else None
        self.takes_whole = step.takes_whole_loss
        self.takes_outputs = self.takes_whole or self._whole_metrics is not None
        states = [variable.value.read_value() for variable in self.compiled.metric_states]
        self._initial = list(map(tf.zeros_like, states)) if adds_metrics else states
        traced, kinds = self.compiled.traced_weight_gradients, self.compiled.kinds
        self._rows = RowSums(self._live, LOSS, traced, kinds, self.compiled.device)

    def add(
        self, number: int, index: tf.Tensor, microbatch: Microbatch, outputs: Sequence[MaskedTensor]
    ) -> LossResult | None:
        """Add the loss of a micro-batch, and update the metrics.

        Args:
            number: The index of the micro-batch on its replica.
            index: Its index in the global batch, an int64 scalar.
            microbatch: The micro-batch.
            outputs: The flat outputs of the model.

        Returns:
            The loss of the micro-batch; None if the loss takes the whole batch.
        """
        result = None if self.takes_whole else self._add(number, index, microbatch, outputs)
        if self._metrics is not None:
            self._update_metrics(self._metrics, _METRICS, microbatch, outputs)
        return result

    def add_whole(self, batch: Microbatch, outputs: Sequence[MaskedTensor], *, counts: bool) -> Sequence[Any]:
        """Compute the loss and metrics that take the whole batch; return the gradients of the outputs.

        Args:
            batch: The global batch as one micro-batch.
            outputs: The flat outputs of the model.
            counts: Whether this worker counts the value. All workers use the gradients.
        """
        gradients: Sequence[Any] = []
        if self.takes_whole:
            with tf.device(batch.host):
                index = tf.zeros([], tf.int64)
            gradients = self._add(0, index, batch, outputs, counts=counts).gradients
        if self._whole_metrics is not None:
            self._update_metrics(self._whole_metrics, _WHOLE_METRICS, batch, outputs)
        return gradients

    def _add(
        self,
        number: int,
        index: tf.Tensor,
        microbatch: Microbatch,
        outputs: Sequence[MaskedTensor],
        *,
        counts: bool = True,
    ) -> LossResult:
        states = self._live.get(_METRIC_STATES, self._initial)
        result = self.compiled(
            LossArguments(
                last_stage_batch(self.compiled.model, microbatch.batch),
                outputs=[output.tensor for output in outputs],
                masks=[output.mask for output in outputs],
                metric_states=states,
                layer_states=self._variables.loss_states(number),
                parameters=self._variables.loss_parameters,
                number=index,
                num_counted=microbatch.num_counted,
                size=microbatch.size,
                num_examples=microbatch.num_examples,
                divisors=self._divisors,
                scale=self._scale,
            )
        )
        if not counts:
            result = result.not_counted(states)
            microbatch = dataclasses.replace(microbatch, num_counted=tf.zeros_like(microbatch.num_counted))
        self._live[_METRIC_STATES] = [
            tf.where(microbatch.num_counted > 0, new, old)
            for new, old in zip(result.metric_states, states, strict=True)
        ]
        self._live.add(_LOSS, result.value)
        for output, value in enumerate(result.output_losses):
            self._live.add(Key("loss of an output", output), value)
        self._add_gradients(result.weight_gradients)
        self._variables.record_loss(number, result.layer_states, microbatch)
        return result

    def value(self) -> tf.Tensor:
        """Return the loss of the batch without added losses, a scalar.

        It depends on the updates of metrics, whose results are zeros, because TensorFlow would prune them otherwise.
        """
        with tf.device(self.compiled.device):
            value: tf.Tensor = self._live.get(_LOSS, tf.zeros([], keras.config.floatx()))
            for zero in self._updated():
                value += tf.cast(zero, value.dtype)
            return value

    def output_losses(self) -> list[tf.Tensor]:
        """Return the loss of each output, if Keras logs them, scalars."""
        return [self._live[key] for key in self._live.keys("loss of an output")]

    def new_states(self) -> list[tuple[Any, tf.Tensor]]:
        """Return the metric variables that this replica assigns, with their values after the batch."""
        own = self.compiled.updated_metrics(self._live.get(_METRIC_STATES, self._initial))
        if self._metrics is None or self._metrics.is_added:
            return own
        return [*own, *self._metrics.updated(self._live[_METRICS])]

    def metrics_to_add(self) -> list[tuple[Any, tf.Tensor]]:
        """Return the metric variables to which replicas add, with the sums to add."""
        if self._metrics is None or not self._metrics.is_added:
            return []
        return self._metrics.updated(self._live[_METRICS])

    def sums(self) -> list[Any]:
        """Return the gradients of the weights that the loss itself reads, summed over micro-batches.

        Each is a tensor, a tuple with the rows of each lookup, or None. The result is empty if another replica computes
        the loss of the whole batch.
        """
        if _LOSS not in self._live:
            return []
        sums: list[Any] = self._rows.total()
        dense = [self._live.get(Key("gradient of the loss", index)) for index in range(len(sums))]
        return [total if rows is None else rows for total, rows in zip(dense, sums, strict=True)]

    def _add_gradients(self, gradients: Sequence[Any]) -> None:
        self._rows.add(gradients)
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.Tensor):
                self._live.add(Key("gradient of the loss", index), gradient)

    def _update_metrics(
        self, metrics: MetricsUpdate, key: Key, microbatch: Microbatch, outputs: Sequence[MaskedTensor]
    ) -> None:
        """Update metrics, after the update by the previous micro-batch."""
        tensors, masks = [output.tensor for output in outputs], [output.mask for output in outputs]
        with tf.control_dependencies(None):
            before = self._live.get(key) or metrics.initial()
            batch = last_stage_batch(self.compiled.model, microbatch.batch)
            self._live[key] = metrics(before, microbatch.num_counted, microbatch.fraction, batch, tensors, masks)

    def _updated(self) -> list[tf.Tensor]:
        """Return zero tensors that depend on the updates of metrics, so that TensorFlow does not prune these."""
        updates = (_METRICS, self._metrics), (_WHOLE_METRICS, self._whole_metrics)
        in_place = [key for key, metrics in updates if metrics is not None and not metrics.variables]
        return [zero for key in in_place for zero in self._live.get(key, [])]
