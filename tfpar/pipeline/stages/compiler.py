"""Compilation of a model's stages.

    layer calls ─► trace ─► subgraphs of the passes ─► compiled stage
         └─ equal to those of an earlier stage ──────► its passes, with other variables

Stages with equal layer calls, such as the blocks of a transformer, are traced, differentiated and compiled once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_graph
from tfpar._compat.models import keras_metrics, keras_model
from tfpar._compat.random_numbers import random_state
from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.graph.tracing import Graph, Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.compiled_stage import CompiledStage
from tfpar.pipeline.stages.padding import can_pad, fixed_shape, outputs_per_example
from tfpar.pipeline.stages.refusals import refuse_python
from tfpar.pipeline.stages.shards import ShardedCalls
from tfpar.pipeline.stages.staged_model import StagedModel
from tfpar.pipeline.stages.subgraphs import Subgraph, extract_subgraphs
from tfpar.pipeline.stages.trace import StageTrace, StageVariables, with_untrained_weights
from tfpar.pipeline.stages.tracing import StageTracer
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.recomputation.choice import Recompute, chosen
from tfpar.reduction.gradients.gradient_addition import spec_of, tensors_of
from tfpar.reduction.losses_in_call import Way

# The trace and the passes of a stage, by everything that they depend on.
EqualStages = dict[Hashable, tuple[StageTrace, CompiledStage]]


class CompiledStages(NamedTuple):
    """The compiled stages of a model.

    Args:
        stages: The stages in order.
        outputs: The model's flat outputs.
        specs: The spec of each value that a stage receives or sends.
        groups: All devices of a sharded stage, by its first device.
    """

    stages: list[CompiledStage]
    outputs: tuple[Value, ...]
    specs: dict[Value, ValueSpec]
    groups: Mapping[str, Sequence[str]] = MappingProxyType({})

    def on(self, devices: Sequence[str]) -> CompiledStages:
        """Return the same stages on other devices, given the first device of each stage."""
        pairs = zip(self.stages, devices, strict=True)
        return self._replace(stages=[stage.on(self.groups.get(device, [device])) for stage, device in pairs])


class StageCompiler:
    """Compiles the stages of one model on first use.

    The stages depend on which weights are trained and on XLA, but not on losses, metrics or the optimizer, so they are
    kept when the model is compiled again.

    Args:
        model: A built model.
        graph: Its layer calls.
        stages: Its stages.
        devices: The device of each stage.
        recompute: Whether the backward pass recomputes the forward pass, or which layers of it.
        splits_backward: Whether weight gradients are a separate pass.
        accumulates: Whether a replica has several micro-batches.
        shards_weights: Whether a device gathers the weights of a stage for each action.
        pads: Whether stages compiled by XLA may pad micro-batches to a fixed size, because all layers are independent
            of the batch, and random layers differ from those of one device anyway.
        sharded_calls: The sharded layer calls of each stage, by its index.
        groups: All devices of a sharded stage, by its first device.
    """

    def __init__(
        self,
        model: keras.Model,
        graph: Graph,
        stages: Sequence[Stage],
        devices: Sequence[str],
        *,
        recompute: Recompute,
        splits_backward: bool,
        accumulates: bool,
        shards_weights: bool,
        pads: bool,
        sharded_calls: Mapping[int, ShardedCalls] | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.staged = StagedModel(model, graph, stages, devices)
        self._outputs = tuple(keras.tree.flatten(graph.outputs))
        self._recompute, self._splits_backward, self._pads = recompute, splits_backward, pads
        self._accumulates, self._shards_weights = accumulates, shards_weights
        self._sharded, self._groups = sharded_calls or {}, groups or {}
        self._compiled: dict[bool, tuple[Any, CompiledStages]] = {}  # evaluate and predict share theirs

    def compile(self, inputs: Any, trainable: Any, ways: Sequence[Way] = (), *, training: bool) -> CompiledStages:
        """Return the compiled stages.

        Args:
            inputs: Specs of a batch of any size, in the structure of the model's inputs.
            trainable: A key that identifies the trained weights.
            ways: For each loss that layers compute, in order, the totals over the batch that it needs.
            training: Whether the model is trained.

        Raises:
            ValueError: If a layer assigns a trained weight, hides one from its gradient, or uses a loss in a way that
                micro-batches do not support.
        """
        key = str(inputs), trainable, self._jit_compile, self._pads_lookups(training), tuple(ways)
        if training not in self._compiled or self._compiled[training][0] != key:
            self._compiled[training] = key, self._compile(inputs, ways, training)
        return self._compiled[training][1]

    def without_dead_ends(self, compiled: CompiledStages, live: Iterable[Value]) -> CompiledStages:
        """Compile stages again if the loss does not depend on some of their outputs.

        Their weights then have no gradients instead of zero gradients. Keras would apply weight decay to the latter.

        Args:
            compiled: The compiled stages, for training.
            live: The outputs of the model that the loss depends on.
        """
        alive, stages, equal = set(live), list(compiled.stages), EqualStages()
        for index, stage in reversed(list(enumerate(compiled.stages))):
            sent = zip(stage.stage.outputs, stage.output_specs, strict=True)
            unused_outputs = frozenset(value for value, spec in sent if spec.needs_gradient and value not in alive)
            if unused_outputs:
                stages[index] = self._compile_stage(
                    stage.stage, stage.input_specs, stage.device, stage.ways, equal, True, unused_outputs
                )
            inputs = zip(stage.stage.inputs, stages[index].has_input_gradients, strict=True)
            alive |= {value for value, has_gradient in inputs if has_gradient}
        return compiled._replace(stages=stages)

    @property
    def _jit_compile(self) -> bool:
        """Whether XLA compiles the stages. It cannot compile sharded ones, which run on several devices."""
        return bool(self.staged.model.jit_compile) and not self._sharded

    def _pads_lookups(self, training: bool) -> bool:
        """Return whether padding may add rows of zeros to sparse gradients.

        They are harmless for Keras' own optimizers, which square each row separately, but a custom one may count rows.
        """
        return not training or keras_model.is_of_keras(keras_variables.innermost(self.staged.model.optimizer))

    def _input_specs(self, inputs: Any) -> dict[Value, ValueSpec]:
        """Return the spec of each input of the model."""

        def flat(inputs: Any) -> list[tf.Tensor]:
            return model_graph.standardize(self.staged.model, inputs)

        tensors = tf.function(flat, autograph=False).get_concrete_function(inputs).structured_outputs
        specs = map(spec_of, tensors)
        return {
            value: ValueSpec(spec, per_example=fixed_shape(spec))
            for value, spec in zip(self.staged.graph.inputs, specs, strict=True)
        }

    def _compile(self, inputs: Any, ways: Sequence[Way], training: bool) -> CompiledStages:
        specs, equal, stages = self._input_specs(inputs), EqualStages(), list[CompiledStage]()
        for stage, device in zip(self.staged.stages, self.staged.devices, strict=True):
            received = [specs[value] for value in stage.inputs]
            compiled = self._compile_stage(stage, received, device, ways, equal, training)
            ways = ways[len(compiled.ways) :]
            for value, unmasked in zip(stage.inputs, compiled.trace.unmasked, strict=True):
                if unmasked:
                    specs[value] = dataclasses.replace(specs[value], mask=None)
            specs.update(zip(stage.outputs, compiled.output_specs, strict=True))
            stages.append(compiled)
        return CompiledStages(stages, self._outputs, specs, self._groups)

    def _compile_stage(
        self, stage: Stage, inputs: Sequence[ValueSpec], device: str, ways: Sequence[Way], equal: EqualStages,
        training: bool, unused_outputs: frozenset[Value] = frozenset(),
    ) -> CompiledStage:  # fmt: skip
        """Compile one stage.

        Args:
            stage: The layer calls, inputs and outputs.
            inputs: The spec of each input.
            device: The first device of the stage.
            ways: For each loss that layers of this or a later stage compute, the totals over the batch that it needs.
            equal: Cache of compiled stages, to which this one may be added.
            training: Whether the model is trained.
            unused_outputs: Outputs that no loss depends on, which receive no gradients.
        """
        calls = self._sharded.get(stage.index)
        devices = (device,) if calls is None else tuple(self._groups[device])
        metric_states = _metric_states(stage)
        variables = _by_role([*stage.variables, *metric_states, *random_state.states_of_no_layer()], training)
        tracer = StageTracer(
            stage, inputs, variables, devices, calls, self._scores, training, self._accumulates, unused_outputs, ways,
            self._recomputed if training else (),
        )  # fmt: skip
        key = tracer.key
        known = equal.get(key)
        if known is None:
            tracer, trace = self._trace(tracer)
        else:
            trace, compiled = known
        refuse_python(trace.graph, devices, _name(stage))
        variables, in_order = tracer.variables, trace
        if self._shards_weights:
            variables, in_order = with_untrained_weights(variables, trace)
        if known is None:
            compiled = self._split(tracer, variables, in_order)
            if trace.serves_equal_stages:
                equal[key] = trace, compiled
        own_states = frozenset(map(id, metric_states))
        return dataclasses.replace(compiled.on(devices), stage=stage, variables=variables, metric_states=own_states)

    @property
    def _recomputed(self) -> list[keras.Layer]:
        """The layers to recompute one by one; without any, a whole stage may be recomputed."""
        return [] if isinstance(self._recompute, bool) else chosen(self.staged.model, self._recompute)

    @property
    def _scores(self) -> frozenset[Value]:
        """The outputs of the model that only the loss reads. The last stage may send them in shards."""
        return frozenset(self.staged.stages[-1].outputs).intersection(self._outputs) if self._sharded else frozenset()

    def _trace(self, tracer: StageTracer) -> tuple[StageTracer, StageTrace]:
        """Trace a stage; return also the tracer, with all variables that the layers read."""
        with random_state.stand_in_generator():
            trace = tracer.trace()
        unseen = _captured(trace, self.staged.model.variables)
        if unseen:  # for example, a Lambda that reads a weight of another layer
            known = [*tracer.variables.parameters, *tracer.variables.states]
            tracer = dataclasses.replace(tracer, variables=_by_role([*known, *unseen], tracer.training))
            trace = dataclasses.replace(tracer.trace(), serves_equal_stages=False)
        return tracer, trace

    def _split(self, tracer: StageTracer, variables: StageVariables, trace: StageTrace) -> CompiledStage:
        """Split a traced stage into its passes."""
        stage, inputs = tracer.stage, tracer.inputs
        subgraphs = self._subgraphs(trace, len(variables.parameters), tracer)
        may_pad = self._pads and self._jit_compile and bool(stage.outputs) and all(spec.per_example for spec in inputs)
        per_example = outputs_per_example(trace, subgraphs[0]) if may_pad else [False] * len(stage.outputs)
        pads = may_pad and can_pad(trace, per_example, with_lookups=self._pads_lookups(tracer.training))
        return CompiledStage(
            stage, inputs, tuple(tracer.devices), variables, frozenset(), trace, subgraphs, per_example, pads,
            self._shards_weights,
        )  # fmt: skip

    def _subgraphs(self, trace: StageTrace, num_parameters: int, tracer: StageTracer) -> list[Subgraph]:
        """Extract the subgraphs of the forward pass, the backward pass and, if separate, the weight gradients."""
        backward, results = trace.backward, [trace.results]
        if tracer.training:
            inputs, weights = tensors_of(backward.input_gradients), tensors_of(backward.sums)
            results += [inputs, weights] if self._splits_backward else [[*inputs, *weights]]
        return extract_subgraphs(
            trace.graph,
            trace.inputs,
            results,
            tracer.devices,
            late=tensors_of(backward.output_gradients),
            sums=backward.dense_sums,
            repeated=None if tracer.training and self._recompute is True else trace.repeated,
            weights=trace.variables[:num_parameters] if self._shards_weights else (),
            # The backward pass has a tensor list argument for each loop, which XLA of TensorFlow 2.21 does not accept.
            jit_compile=self._jit_compile and not (tracer.training and tf_graph.has_loops(trace.graph)),
        )


def _metric_states(stage: Stage) -> list[keras.Variable]:
    """Return the states of metrics that layers of a stage hold."""
    layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
    return [state for layer in layers for state in keras_metrics.metric_states(layer)]


def _name(stage: Stage) -> str:
    """Describe the layers of a stage as the subject of an error message."""
    names = [call.operation.name for call in stage.calls]
    return names[0] if len(names) == 1 else f"A layer from {names[0]} to {names[-1]}"


def _by_role(variables: Iterable[Any], training: bool) -> StageVariables:
    """Sort variables, or their shards, into parameters and states."""
    shards = [shard for variable in variables for shard in sharded_memory.shards_of(variable)]
    distinct = {id(shard): shard for shard in shards}.values()
    trained = [variable for variable in distinct if variable.trainable and training]
    others = [variable for variable in distinct if not (variable.trainable and training)]
    untrained = [variable for variable in others if sharded_memory.shard_of(variable) is not None]
    states = [variable for variable in others if sharded_memory.shard_of(variable) is None]
    return StageVariables((*trained, *untrained), tuple(states), len(trained))


def _captured(trace: StageTrace, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return the variables that a traced graph captures instead of taking them as arguments."""
    handles = {id(outer) for outer, _ in trace.graph.captures if outer.dtype == tf.resource}
    unseen = [
        variable
        for variable in variables
        if any(id(handle) in handles for handle in sharded_memory.handles_of(variable))
    ]
    return [*unseen, random_state.state_of_no_layer()] if trace.uses_global_generator else unseen
