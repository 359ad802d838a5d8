"""The compilation of a stage: its variables by role, its traced graph, the subgraphs of its passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_metrics, random_state, tf_divided_memory, tf_graph
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.compiled_stage import StageOptions, StageProgram
from tfpar.pipeline.stages.padding import can_pad, outputs_per_example
from tfpar.pipeline.stages.python_functions import refuse_python
from tfpar.pipeline.stages.shards import refuse_divided
from tfpar.pipeline.stages.stage_functions import StageFunctions
from tfpar.pipeline.stages.subgraphs import Subgraph, extract_subgraphs
from tfpar.pipeline.stages.trace import StageTrace, StageVariables, with_untrained_weights
from tfpar.pipeline.stages.tracing import Traces, trace_stage
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.reduction.gradient_addition import tensors_of
from tfpar.reduction.losses_in_call import Way


class EqualStages(NamedTuple):
    """The compiled stages of a model by their traces: those with equal layer calls have one.

    Args:
        options: How all of them are compiled.
        traces: Their traces, by what these depend on.
        programs: The first stage with each trace.
    """

    options: StageOptions
    traces: Traces
    programs: dict[StageTrace, StageProgram]


def compile_stage(
    stage: Stage,
    input_specs: Sequence[ValueSpec],
    device: str,
    equal: EqualStages,
    *,
    unused_outputs: frozenset[model_graph.Value] = frozenset(),
    ways: Sequence[Way] = (),
) -> StageProgram:
    """Compile the functions of one stage.

    Args:
        stage: Its layer calls, inputs and outputs.
        input_specs: The specs of its inputs, in the order of `stage.inputs`.
        device: The device that runs it.
        equal: The stages that are compiled already, and how all are.
        unused_outputs: Outputs that no loss depends on, and for which no gradient is received.
        ways: What the losses computed by layers need of the whole batch, for this stage and all later ones.

    Raises:
        ValueError: If a layer assigns a trained weight, or computes from a loss what micro-batches would change.
    """
    options = equal.options
    divided = options.divided.get(stage.index)
    devices = [device] if divided is None else list(options.groups[device])
    layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
    metric_states = [variable for layer in layers for variable in keras_metrics.metric_states(layer)]

    def trace(variables: StageVariables) -> StageTrace:
        return trace_stage(
            stage, input_specs, variables, devices, divided, in_pieces=options.in_pieces, training=options.training,
            accumulates=options.accumulates, unused_outputs=unused_outputs, ways=ways, traces=equal.traces,
        )  # fmt: skip

    known = [*stage.variables, *metric_states, *random_state.states_of_no_layer()]
    variables = _by_role(known, training=options.training)
    with random_state.stand_in_generator():
        traced = trace(variables)
    unseen = _captured(traced, options.model_variables)
    if unseen:  # a Lambda may read the weight of a layer that is not its own
        variables = _by_role([*variables.parameters, *variables.states, *unseen], training=options.training)
        traced = trace(variables)
    names = [call.operation.name for call in stage.calls]
    refuse_python(traced.graph, devices, names[0] if len(names) == 1 else f"A layer from {names[0]} to {names[-1]}")
    if options.shards_weights:
        variables, reordered = with_untrained_weights(variables, traced)
    else:
        reordered = traced
    of_metrics = frozenset(map(id, metric_states))
    if traced not in equal.programs:
        equal.programs[traced] = _program(stage, input_specs, devices, options, variables, of_metrics, reordered)
    return dataclasses.replace(
        equal.programs[traced].on(device),
        stage=stage,
        input_specs=input_specs,
        variables=variables,
        metric_states=of_metrics,
    )


def _program(
    stage: Stage,
    input_specs: Sequence[ValueSpec],
    devices: Sequence[str],
    options: StageOptions,
    variables: StageVariables,
    metric_states: frozenset[int],
    trace: StageTrace,
) -> StageProgram:
    """Split a traced stage into its passes."""
    num_parameters = len(variables.parameters)
    subgraphs = _extract(trace, num_parameters, devices, options)
    per_example = [options.pads and all(spec.per_example for spec in input_specs)] * len(stage.outputs)
    if any(per_example):
        per_example = outputs_per_example(trace, subgraphs[0])
    pads = bool(per_example) and can_pad(trace, per_example, with_lookups=options.pads_lookups)
    functions = StageFunctions(trace, subgraphs, input_specs, num_parameters, devices, pads=pads)
    return StageProgram(
        stage, input_specs, devices, options.groups, variables, metric_states, trace, subgraphs, functions,
        per_example, pads, options.shards_weights,
    )  # fmt: skip


def _by_role(variables: Iterable[Any], *, training: bool) -> StageVariables:
    pieces = [piece for variable in variables for piece in tf_divided_memory.lasting_pieces(variable)]
    found = list({id(piece): piece for piece in pieces}.values())
    trained = [one for one in found if one.trainable and training]
    others = [one for one in found if not (one.trainable and training)]
    untrained = [one for one in others if tf_divided_memory.piece_of(one) is not None]
    states = [one for one in others if tf_divided_memory.piece_of(one) is None]
    return StageVariables((*trained, *untrained), tuple(states), len(trained))


def _captured(trace: StageTrace, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return the variables that a traced graph captures, instead of taking them as arguments."""
    handles = {id(outer) for outer, _ in trace.graph.captures if outer.dtype == tf.resource}
    unseen = [one for one in variables if any(id(handle) in handles for handle in tf_divided_memory.handles_of(one))]
    refuse_divided(unseen, "another layer reads")
    return [*unseen, random_state.state_of_no_layer()] if trace.draws_from_no_layer else unseen


def _extract(trace: StageTrace, num_parameters: int, devices: Sequence[str], options: StageOptions) -> list[Subgraph]:
    """Extract the subgraphs of the forward and backward pass, and of the weight gradient if it is apart."""
    backward, results = trace.backward, [trace.results]
    if options.training:
        of_inputs, of_weights = tensors_of(backward.input_gradients), tensors_of(backward.sums)
        results += [of_inputs, of_weights] if options.splits_backward else [[*of_inputs, *of_weights]]
    sums = [one for one in backward.sums if isinstance(one, tf.Tensor)]
    return extract_subgraphs(
        trace.graph,
        trace.inputs,
        results,
        devices,
        late=tensors_of(backward.output_gradients),
        sums=sums,
        recompute=options.recompute,
        weights=trace.variables[:num_parameters] if options.shards_weights else (),
        # The backward pass takes a list of tensors for each loop, which XLA of TensorFlow 2.21 accepts as no argument.
        jit_compile=options.jit_compile and not (options.training and tf_graph.has_loops(trace.graph)),
    )
