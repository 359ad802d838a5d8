"""Compilation of a model's steps, once for each kind of batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat.models import keras_metrics, keras_model
from tfpar.pipeline.loss.metrics_update import MetricsUpdate
from tfpar.pipeline.loss.microbatch_loss import MicrobatchLoss, last_stage_batch
from tfpar.pipeline.stages.compiler import CompiledStages, StageCompiler
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.reduction import metric_logs
from tfpar.reduction.gradients.gradient_addition import spec_of
from tfpar.reduction.loss_reduction import LossReduction
from tfpar.reduction.verdict import Verdict
from tfpar.reduction.whole_batch import not_dense


class CompiledStep(NamedTuple):
    """The compiled functions of a step on one replica.

    Args:
        stages: The stages.
        loss: The loss, after the last stage.
        metrics: The update of the metrics by a micro-batch; None if there are none.
        takes_whole_loss: Whether `loss` is computed from the outputs of all micro-batches together.
        whole_metrics: The update of the metrics of the whole batch, on the first replica; None if there are none.
    """

    stages: CompiledStages
    loss: MicrobatchLoss
    metrics: MetricsUpdate | None
    takes_whole_loss: bool = False
    whole_metrics: MetricsUpdate | None = None


class StepCompiler:
    """Compiles the stages, the loss and the metrics of a model, and caches them by the specs of a batch.

    Args:
        stages: Compiles the stages of a built and compiled model, whose weights are on the devices of their stages.
        num_microbatches: Number of micro-batches in a global batch.
        other_devices: The device of each stage, for each replica but the first.
        agree: Returns the chief's value of a JSON structure, in a job of several workers; None in one process.
    """

    def __init__(
        self,
        stages: StageCompiler,
        num_microbatches: int,
        other_devices: Sequence[Sequence[str]] = (),
        agree: Callable[[Any], Any] | None = None,
    ) -> None:
        self.staged = stages.staged
        self.compilation = keras_model.compilation(self.staged.model)
        self._stages, self.other_devices, self._agree = stages, other_devices, agree
        divides = num_microbatches > 1 or bool(other_devices) or agree is not None
        self.losses = LossReduction(self.staged.model, communicates=False, divides=divides)
        self._compiled: dict[Any, list[CompiledStep]] = {}

    def stages(self, inputs: Any, *, training: bool) -> CompiledStages:
        """Return the compiled stages.

        Args:
            inputs: Inputs of the model, or symbolic ones.
            training: Whether the model is trained.
        """
        trainable = tuple(map(id, self.staged.model.trainable_variables))
        return self._stages.compile(_specs(inputs), trainable, self.losses.ways(training), training=training)

    def stages_of_replicas(self, inputs: Any, *, training: bool) -> list[CompiledStages]:
        """Return the compiled stages of each replica. The arguments are those of `stages`."""
        first = self.stages(inputs, training=training)
        return [first, *map(first.on, self.other_devices)]

    def compile_replicas(self, batch: Any, *, training: bool) -> list[CompiledStep]:
        """Return the compiled stages, loss and metrics of each replica.

        Args:
            batch: A global batch, or a symbolic one.
            training: Whether the model is trained.

        Raises:
            ValueError: If the model overrides `compute_loss` and has other losses.
        """
        specs = _specs(batch)
        key = self._key(specs, training)
        if key not in self._compiled:
            compiled = self._compile(specs, training=training)
            self._compiled = {other: steps for other, steps in self._compiled.items() if other[0] != training}
            self._compiled[key] = compiled
        return self._compiled[key]

    def has_compiled(self, batch: Any, *, training: bool) -> bool:
        """Return whether `compile_replicas` has the functions for a batch in its cache."""
        return self._key(_specs(batch), training) in self._compiled

    def _key(self, specs: Any, training: bool) -> tuple[Any, ...]:
        # As in Keras, the first trace of a step determines the trained weights.
        return training, str(specs), bool(self.staged.model.jit_compile)

    def _compile(self, specs: Any, *, training: bool) -> list[CompiledStep]:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(specs)
        specs = last_stage_batch(self.staged.model, specs)
        stages, verdict = self.stages(inputs, training=training), self.losses.verdict(training)
        loss = self._compile_loss(stages, specs, verdict, training=training)
        if training:
            live = [value for value, has in zip(stages.outputs, loss.has_output_gradients, strict=True) if has]
            stages = self._stages.without_dead_ends(stages, live)
        _check_own_loss(self.staged.model, stages)
        metrics = self._compile_metrics(stages, specs, verdict, in_place=self._agree is None)
        is_whole, whole_metrics = verdict.takes_whole_loss, self._compile_whole_metrics(stages, specs, verdict)
        compiled = [CompiledStep(stages, loss, metrics, is_whole, whole_metrics)]
        for devices in self.other_devices:
            other = stages.on(devices)
            loss = self._compile_loss(other, specs, verdict, training=training)
            metrics = self._compile_metrics(other, specs, verdict, in_place=False)
            compiled.append(CompiledStep(other, loss, metrics, is_whole, whole_metrics))
        return compiled

    def _compile_metrics(
        self, stages: CompiledStages, specs: Any, verdict: Verdict, *, in_place: bool
    ) -> MetricsUpdate | None:
        if not keras_metrics.counts_metrics(self.staged.model) or verdict.whole_metrics:
            return None
        outputs, devices = [stages.specs[value] for value in stages.outputs], stages.stages[-1].devices
        whole = metric_logs.whole_metrics(self.staged.model, verdict)
        return MetricsUpdate(self.staged, outputs, specs, devices, whole, in_place=in_place)

    def _compile_whole_metrics(self, stages: CompiledStages, specs: Any, verdict: Verdict) -> MetricsUpdate | None:
        """Return the update of the metrics of the whole batch, which each worker computes in place."""
        whole = metric_logs.whole_metrics(self.staged.model, verdict)
        if not whole:
            return None
        outputs, devices = [_whole(stages.specs[value]) for value in stages.outputs], stages.stages[-1].devices
        others = metric_logs.other_metrics(self.staged.model, whole)
        return MetricsUpdate(self.staged, outputs, specs, devices, others, in_place=True)

    def _compile_loss(self, stages: CompiledStages, specs: Any, verdict: Verdict, *, training: bool) -> MicrobatchLoss:
        model, is_whole = self.staged.model, verdict.takes_whole_loss
        losses = LossReduction(model, communicates=False, divides=False) if is_whole else self.losses
        outputs = keras.tree.map_structure(
            lambda value: _whole(stages.specs[value]) if is_whole else stages.specs[value], self.staged.graph.outputs
        )
        in_stages = {id(state) for stage in stages.stages for state in stage.states}
        states = [state for metric in keras_metrics.own_metrics(model) for state in metric.variables]
        metric_states = [state for state in states if id(state) not in in_stages]
        return MicrobatchLoss(model, losses, training, stages.stages[-1].devices, outputs, specs, metric_states)


def _check_own_loss(model: keras.Model, stages: CompiledStages) -> None:
    """Refuse a model that overrides `compute_loss` and has other losses, which it would have to add.

    Args:
        model: A compiled model.
        stages: Its compiled stages.

    Raises:
        ValueError: If the model overrides `compute_loss`, and has a weight regularizer or a layer that adds a loss.
    """
    penalized = [variable.path for variable in model.trainable_variables if variable.regularizer is not None]
    adds = [compiled.stage.index for compiled in stages.stages if compiled.num_losses]
    if keras_model.overridden(model, "compute_loss") and (penalized or adds):
        what = f"a penalty on {penalized[0]!r}" if penalized else f"an added loss in stage {adds[0]}"
        raise ValueError(
            "In stages and shards, a model that overrides compute_loss cannot have regularizers or losses from "
            f"add_loss, received {type(model).__name__} with {what}. Do not override compute_loss, or train on "
            "SingleDevice()."
        )


def _whole(spec: ValueSpec) -> ValueSpec:
    """Return the spec of an output for all micro-batches together."""
    if not isinstance(spec.whole, tf.TensorSpec):
        raise not_dense(type(spec.whole).__name__)
    return dataclasses.replace(spec, spec=spec.whole)


def _specs(structure: Any) -> Any:
    """Return the specs of a batch, with an unknown batch size."""
    return tf.nest.map_structure(lambda tensor: None if tensor is None else spec_of(tensor), structure)
