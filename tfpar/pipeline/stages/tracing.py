"""Tracing of a stage: its forward pass and, for training, its backward pass.

values ─► layer calls ─► outputs, losses, new states          forward
input and weight gradients ◄─ gradients of the outputs        backward, by tf.gradients in the same graph
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat.graphs import tf_tapes
from tfpar._compat.models import keras_losses_in_call, keras_model, keras_probabilities, keras_remat
from tfpar._compat.random_numbers import random_state
from tfpar._compat.variables import sharded_memory
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.ir import Value
from tfpar.pipeline.partition.layer_settings import call_settings
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.refusals import refuse_assigned, refuse_hidden_reads, refuse_mixed_losses
from tfpar.pipeline.stages.shards import ShardedCalls, copy_shards
from tfpar.pipeline.stages.sparse_rows import rows_by_lookup
from tfpar.pipeline.stages.trace import BackwardTrace, StageTrace, StageVariables, trace_with_record
from tfpar.pipeline.stages.values import BatchPosition, ValueSpec
from tfpar.placement.weight_devices import follow_data
from tfpar.recomputation.recorded_calls import Recording
from tfpar.reduction.gradients.gradient_addition import dense_part, dense_parts, reached_from, tensors_of
from tfpar.reduction.gradients.row_numbers import Source, Sources
from tfpar.reduction.losses_in_call import Way, in_part
from tfpar.reduction.vocabulary import gathered_classes


@dataclasses.dataclass(frozen=True)
class StageTracer:
    """Traces the forward pass of a stage and, for training, its backward pass.

    Args:
        stage: The layer calls, inputs and outputs.
        inputs: The spec of each input.
        variables: The variables whose values are arguments of the graph.
        devices: The device of each shard of the stage.
        sharded_calls: The sharded layer calls; None for a stage on one device.
        sharded_outputs: Outputs that may be sent in shards, because only the loss reads them.
        training: Whether the model is trained.
        accumulates: Whether gradients are added to those of earlier micro-batches.
        unused_outputs: Outputs that no loss depends on.
        ways: For each loss that layers of this or a later stage compute, the totals over the batch that it needs.
        recomputed: Layers whose activations are recomputed, besides those of a `keras.RematScope`.
    """

    stage: Stage
    inputs: Sequence[ValueSpec]
    variables: StageVariables
    devices: Sequence[str]
    sharded_calls: ShardedCalls | None
    sharded_outputs: Container[Value]
    training: bool
    accumulates: bool
    unused_outputs: frozenset[Value]
    ways: Sequence[Way]
    recomputed: Collection[keras.Layer] = ()

    @property
    def key(self) -> Hashable:
        """A key that is equal for stages of the model with the same trace, if the trace serves equal stages."""
        variables = [*self.variables.parameters, *self.variables.states]
        shapes = [(tuple(variable.shape), variable.dtype) for variable in variables]
        values = [*self.stage.inputs, *(value for call in self.stage.calls for value in call.outputs)]
        outputs = [(values.index(value), value in self.unused_outputs) for value in self.stage.outputs]
        sizes = len(self.variables.parameters), self.variables.num_trained
        recomputed = [keras_remat.holds_any(call.operation, self.recomputed) for call in self.stage.calls]
        return (
            call_settings(self.stage.calls, self.stage.inputs),
            tuple(self.inputs),
            tuple(shapes),
            sizes,
            tuple(outputs),
            tuple(recomputed),
        )

    def trace(self) -> StageTrace:
        """Return the traced graph of the stage.

        Raises:
            ValueError: If a layer assigns a trained weight, hides one from its gradient, or uses a loss in a way that
                micro-batches do not support.
        """
        specs = [spec.spec for spec in self.inputs] + [spec.mask for spec in self.inputs if spec.mask is not None]
        variables = [*self.variables.parameters, *self.variables.states]
        variable_specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        scale = tf.TensorSpec([None], keras.config.floatx())
        _, trace = trace_with_record(
            _concrete_function, self._body, specs, variable_specs, BatchPosition.specs(), scale
        )
        return trace

    def _body(
        self, values: list[Any], variable_values: list[tf.Tensor], position: BatchPosition, scale: tf.Tensor
    ) -> tuple[Any, StageTrace]:
        with host_sizes.sizes_on_host():
            trace = self._traced(values, variable_values, position, scale)
        return tensors_of([trace.outputs, trace.backward.input_gradients, trace.backward.sums]), trace

    def _traced(
        self, values: list[Any], arguments: list[tf.Tensor], position: BatchPosition, scale: tf.Tensor
    ) -> StageTrace:
        graph, variables = tf.compat.v1.get_default_graph(), self.variables
        sources = self._sources(values, arguments)
        variable_values = copy_shards([*variables.parameters, *variables.states], arguments, self.devices)
        tensors, recording = self._received(values), Recording()
        with keras_remat.recorded(recording.record, self.recomputed):
            forward = self._forward(tensors, variable_values, position)
        repeated = frozenset(recording.repeated(graph))
        with tf.device(self.devices[0]):
            sent = self._sent(tensors)
            # A layer may add one value for each example; Keras sums them.
            losses = tuple(tf.reduce_sum(loss) for loss in forward.losses)
            pairs = zip(self.inputs, values, strict=False)  # masks come after the values
            differentiable = [dense_part(tensor) if spec.needs_gradient else None for spec, tensor in pairs]
            if self.training:
                refuse_mixed_losses(self.stage, forward.whole_losses, sent.outputs, losses, values)
                inputs = [tensor for tensor in differentiable if tensor is not None]
                refuse_hidden_reads(graph, variables.parameters, arguments[: variables.num_trained], inputs)
            serves_equal_stages = self.sharded_calls is None and _follows_from_calls(graph, forward)
            with contextlib.nullcontext() if self.sharded_calls is None else follow_data():
                backward = self._backward(sent.outputs, losses, scale, differentiable, variable_values, sources)
        return StageTrace(
            graph, tuple(values), tuple(variable_values), position, scale, sent.outputs, sent.activations, sent.masks,
            forward.new_states, losses, forward.ways, forward.uses_global_generator, serves_equal_stages,
            sent.unmasked, backward, self.devices, sources, repeated,
        )  # fmt: skip

    def _sources(self, values: Sequence[Any], variable_values: Sequence[tf.Tensor]) -> Sources:
        """Return what the arguments depend on. States may differ between micro-batches."""
        num_trained = self.variables.num_trained
        pairs = zip(self.inputs, values, strict=False)
        known = {tensor.ref(): spec.source for spec, value in pairs for tensor in tensors_of(value)}
        known |= {tensor.ref(): Source.CONSTANT for tensor in variable_values[:num_trained]}
        return Sources(known | {tensor.ref(): Source.POSITIONS for tensor in variable_values[num_trained:]})

    def _received(self, values: Sequence[Any]) -> dict[Value, Any]:
        """Return the inputs of the stage from the tensors and masks that were sent."""
        masks = iter(values[len(self.inputs) :])
        with tf.device(self.devices[0]):
            return {
                value: spec.received(tensor, next(masks) if spec.mask is not None else None)
                for value, spec, tensor in zip(self.stage.inputs, self.inputs, values, strict=False)
            }

    def _forward(self, tensors: dict[Value, Any], values: Sequence[tf.Tensor], position: BatchPosition) -> _Forward:
        """Add the layer calls to the graph, and their outputs to `tensors`."""
        variables = self.variables
        pairs = list(zip((*variables.parameters, *variables.states), values, strict=True))
        whole = [pair for pair in pairs if sharded_memory.shard_of(pair[0]) is None]
        with (
            sharded_memory.with_values([pair for pair in pairs if sharded_memory.shard_of(pair[0]) is not None]),
            tf.device(self.devices[0]),
            tf_tapes.replaced(whole, collect_losses=True) as scope,
            random_state.replica_seeds(lambda: position.number),
            # A scalar that a layer passes to a metric is weighted by the micro-batch's fraction of the batch.
            keras_losses_in_call.scalars_weighted(lambda _: position.fraction),
            in_part(self.ways, position.sums, position.fraction) as in_call,
        ):
            if self.sharded_calls is None:
                model_graph.run(self.stage.calls, tensors, self.training)
            else:
                self.sharded_calls.run(tensors, self.training)
            after = [scope.get_current_value(variable) for variable, _ in whole]
            uses_global_generator = random_state.draws_from_no_layer(scope, variables.states)
        changed = [None if new is old else new for new, (_, old) in zip(after, whole, strict=True)]
        num_parameters = len(whole) - len(variables.states)
        refuse_assigned([variable for variable, _ in whole[:num_parameters]], changed[:num_parameters])
        ways, whole_losses = tuple(way for way, _ in in_call), [loss for way, loss in in_call if way == "whole"]
        return _Forward(tuple(changed[num_parameters:]), scope.losses, ways, whole_losses, uses_global_generator)

    def _sent(self, tensors: Mapping[Value, Any]) -> _Sent:
        """Return what the stage sends to later stages."""
        sent = [keras_probabilities.sent_as(tensors[value]) for value in self.stage.outputs]
        outputs = tuple(
            _shards(tensor) if value in self.sharded_outputs else tensor
            for value, (tensor, _) in zip(self.stage.outputs, sent, strict=True)
        )
        masks = tuple(keras_model.mask_of(tensors[value]) for value in self.stage.outputs)
        unmasked = tuple(keras_model.mask_of(tensors[value]) is None for value in self.stage.inputs)
        return _Sent(outputs, tuple(activation for _, activation in sent), masks, unmasked)

    def _backward(
        self, outputs: Sequence[Any], losses: Sequence[tf.Tensor], scale: tf.Tensor,
        inputs: Sequence[Any], variable_values: Sequence[tf.Tensor], sources: Sources,
    ) -> BackwardTrace:  # fmt: skip
        """Add the backward pass to the current graph."""
        variables, num_inputs = self.variables, len([tensor for tensor in inputs if tensor is not None])
        trained = list(variable_values[: variables.num_trained])
        differentiable = [*(tensor for tensor in inputs if tensor is not None), *trained]
        reached = reached_from(differentiable) if self.training else set()
        upstream = tuple(
            None if value in self.unused_outputs else _upstream(output, reached)
            for value, output in zip(self.stage.outputs, outputs, strict=True)
        )
        gradients = _gradients(outputs, upstream, losses, scale, differentiable, reached)
        # Sparse gradients of inputs are sent as tensors, because the stage before cannot use slices.
        dense = iter([g if g is None else tf.convert_to_tensor(g) for g in gradients[:num_inputs]])
        input_gradients = tuple(None if tensor is None else next(dense) for tensor in inputs)
        untrained = [None] * (len(variables.parameters) - len(trained))
        parameter_gradients = [*gradients[num_inputs:], *untrained]
        weight_gradients, kinds = rows_by_lookup(parameter_gradients, variables.parameters, sources)
        totals, sums = self._accumulated([*trained, *untrained], weight_gradients)
        return BackwardTrace(upstream, input_gradients, weight_gradients, totals, sums, kinds)

    def _accumulated(
        self, parameters: Sequence[tf.Tensor | None], gradients: Sequence[Any]
    ) -> tuple[tuple[tf.Tensor | None, ...], tuple[Any, ...]]:
        """Return placeholders for earlier sums of dense gradients, and all gradients with these added.

        Adding the sum right away finds the gradient in the processor's cache, and reuses its memory.
        """
        totals, sums = list[Any](), list[Any]()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            total, added = None, gradient
            if self.accumulates and parameter is not None and isinstance(gradient, tf.Tensor):
                with tf.device(parameter.device):
                    total = tf.compat.v1.placeholder(gradient.dtype, gradient.shape)
                    added = total + gradient
            totals.append(total)
            sums.append(added)
        return tuple(totals), tuple(sums)


class _Forward(NamedTuple):
    new_states: tuple[tf.Tensor | None, ...]
    losses: Sequence[tf.Tensor]
    ways: tuple[Way, ...]
    whole_losses: Sequence[tf.Tensor]
    uses_global_generator: bool


class _Sent(NamedTuple):
    outputs: tuple[Any, ...]
    activations: tuple[str, ...]
    masks: tuple[tf.Tensor | None, ...]
    unmasked: tuple[bool, ...]


def _concrete_function(body: Any, *specs: Any) -> Any:
    return tf.function(body, autograph=False).get_concrete_function(*specs)


def _follows_from_calls(graph: Any, forward: _Forward) -> bool:
    """Return whether a graph depends only on its layer calls, and not on captured tensors or states of operations."""
    is_stateful = any(op.op_def.is_stateful for op in graph.get_operations())
    return not (forward.ways or forward.uses_global_generator or graph.captures or is_stateful)


def _shards(tensor: Any) -> Any:
    """Return the shards of sharded class scores; any other tensor, and probabilities, unchanged."""
    shards = None if gathered_classes.are_probabilities(tensor) else gathered_classes.shards_of(tensor)
    return tensor if shards is None else tuple(shards.tensors)


def _upstream(output: Any, reached: Container[tf.Operation]) -> Any:
    """Return a placeholder for the gradient of an output, or of each of its shards; None if it has no gradient."""
    tensors = dense_parts(output)
    if not any(tensor.dtype.is_floating and tensor.op in reached for tensor in tensors):
        return None
    placeholders = []
    for tensor in tensors:
        with tf.device(tensor.device):
            placeholders.append(tf.compat.v1.placeholder(tensor.dtype, tensor.shape))
    return tuple(placeholders) if isinstance(output, tuple) else placeholders[0]


def _gradients(
    outputs: Sequence[Any], upstream: Sequence[Any], losses: Sequence[tf.Tensor], scale: tf.Tensor,
    sources: Sequence[tf.Tensor], reached: Container[tf.Operation],
) -> Sequence[Any]:  # fmt: skip
    """Return the gradient of each source, or None, from the gradients of outputs and added losses."""
    sent = [output for output, gradient in zip(outputs, upstream, strict=True) if gradient is not None]
    ends = list(zip(dense_parts(sent), tensors_of(upstream), strict=True))
    ends += [(loss, tf.cast(scale[i], loss.dtype)) for i, loss in enumerate(losses) if loss.op in reached]
    if not ends:
        return [None] * len(sources)
    gradients: Sequence[Any] = tf.gradients([end for end, _ in ends], sources, [gradient for _, gradient in ends])
    return gradients
