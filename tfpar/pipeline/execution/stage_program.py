"""A stage as compiled functions: forward pass, backward pass and weight gradient of one micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_metrics, random_state, tf_function
from tfpar.pipeline.execution.bundles import Bundle, bundled, unbundle
from tfpar.pipeline.execution.row_gradients import Kinds, known_kinds
from tfpar.pipeline.execution.row_padding import Rows, can_pad, outputs_per_example
from tfpar.pipeline.execution.saved_tensors import SavedBytes, saved_bytes
from tfpar.pipeline.execution.stage_functions import (
    BackwardResults,
    ForwardResults,
    StageFunctions,
)
from tfpar.pipeline.execution.stage_trace import StageTrace, StageVariables, trace_stage, with_untrained_weights
from tfpar.pipeline.execution.stage_values import MaskedTensor, Place, ValueSpec
from tfpar.pipeline.execution.subgraphs import Subgraph, extract_subgraphs
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.partition.stages import Stage
from tfpar.reduction.gradient_addition import tensors_of
from tfpar.reduction.losses_in_call import Way


class StageOptions(NamedTuple):
    """How the stages of a model are compiled.

    Args:
        training: Whether the model is trained.
        accumulates: Whether gradients are added to those of earlier micro-batches.
        shards_weights: Whether the device of a stage holds copies of its weights during an action alone.
        recompute: Whether the backward pass recomputes the forward pass, so that only stage inputs are saved.
        splits_backward: Whether the weight gradient is a subgraph of its own.
        jit_compile: Whether XLA compiles the subgraphs.
        pads: Whether the stages that allow it pad micro-batches to one size.
        pads_lookups: Whether those with lookups do so.
        model_variables: All variables of the model. A layer may read a variable of another layer.
    """

    training: bool
    accumulates: bool = True
    shards_weights: bool = False
    recompute: bool = False
    splits_backward: bool = False
    jit_compile: bool = False
    pads: bool = False
    pads_lookups: bool = False
    model_variables: Sequence[keras.Variable] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """The compiled functions of one stage, for micro-batches of any size.

    All are pure: weights, states and the number of the micro-batch are arguments, new states and gradients are results.
    So every micro-batch of a step sees the same weights, and Dropout draws the same mask in a recomputation.

    Args:
        stage: Its layer calls, inputs and outputs.
        input_specs: The specs of its inputs, in the order of `stage.inputs`.
        device: The device that runs it.
        variables: The variables that it reads.
        metric_states: The `id` of each state of a metric that a layer holds.
        trace: The graph from which the subgraphs are extracted.
        kinds: The kind of each lookup of each parameter; None for one that the graph does not determine.
        subgraphs: The forward pass; for training the backward pass; where it is apart, the weight gradient.
        functions: The same as compiled functions.
        per_example: Whether each output is known to have one row for each example.
        pads: Whether they pad micro-batches.
        shards_weights: Whether the device holds copies of the weights during an action alone.
    """

    stage: Stage
    input_specs: Sequence[ValueSpec]
    device: str
    variables: StageVariables
    metric_states: frozenset[int]
    trace: StageTrace
    kinds: Kinds
    subgraphs: Sequence[Subgraph]
    functions: StageFunctions
    per_example: Sequence[bool]
    pads: bool
    shards_weights: bool

    @property
    def parameters(self) -> Sequence[Any]:
        """Weights that are trained; then, of sharded weights, large ones that are not."""
        return self.variables.parameters

    @property
    def states(self) -> Sequence[Any]:
        """All other variables."""
        return self.variables.states

    @property
    def trains(self) -> bool:
        """Whether it has a backward pass."""
        return len(self.subgraphs) > 1

    @property
    def splits_backward(self) -> bool:
        """Whether the weight gradient is a pass of its own."""
        return len(self.subgraphs) > 2

    @property
    def changed_states(self) -> list[Any]:
        """Those of `states` that the forward pass changes, in the order of its results."""
        return [state for state, new in zip(self.states, self.trace.new_states, strict=True) if new is not None]

    @property
    def state_specs(self) -> Sequence[tf.Tensor]:
        """Tensors with the shapes and types of `states`."""
        return self.trace.variables[len(self.parameters) :]

    @property
    def ways(self) -> tuple[Way, ...]:
        """What the losses computed by its layers need of the whole batch."""
        return self.trace.ways

    @property
    def output_specs(self) -> list[ValueSpec]:
        """The spec of each output, in the order of `stage.outputs`."""
        pairs = zip(self.trace.output_specs, self.per_example, strict=True)
        return [dataclasses.replace(spec, per_example=known) for spec, known in pairs]

    @property
    def has_input_gradients(self) -> list[bool]:
        """Whether the backward pass gives a gradient for each input."""
        return [gradient is not None for gradient in self.trace.backward.input_gradients]

    @property
    def num_losses(self) -> int:
        """The number of losses that its layers add."""
        return len(self.trace.losses)

    def saved_bytes(self, microbatch_size: int) -> SavedBytes:
        """Return the memory of the saved tensors of a micro-batch, in bytes.

        Args:
            microbatch_size: The number of examples.
        """
        forward, *later = self.subgraphs
        saved = [*tensors_of(self.trace.values), *forward.outputs]
        return saved_bytes(saved, later, tensors_of(self.trace.backward.output_gradients), microbatch_size)

    def bundle(self, values: Sequence[tf.Tensor]) -> Bundle:
        """Return the values of `parameters` or of `states` as the passes take them."""
        return bundled(values, self.device)

    def forward(
        self,
        parameters: Bundle,
        states: Bundle,
        values: Sequence[MaskedTensor],
        place: Place,
        scale: Any,
        rows: Rows,
    ) -> ForwardResults:
        """Run the forward pass of one micro-batch.

        Args:
            parameters: The values of `parameters`.
            states: The values of `states`.
            values: The inputs, `[examples, ...]` each.
            place: The micro-batch in its global batch.
            scale: The gradient of one unit of each added loss, `[losses]` in Keras' float type.
            rows: The numbers of examples of the micro-batch.
        """
        tensors, masks = [value.tensor for value in values], []
        for value, spec in zip(values, self.input_specs, strict=True):
            masks.append(None if spec.mask is None else value.mask)
        given = parameters, states, tensors, masks, place, scale, rows if self.pads else None
        return ForwardResults(*self._call(self.functions.forward, *given))

    def backward(
        self,
        parameters: Bundle,
        saved: Bundle,
        output_gradients: Sequence[tf.Tensor | None],
        totals: Bundle | None,
        rows: Rows,
    ) -> BackwardResults:
        """Run the backward pass of one micro-batch.

        Args:
            parameters: The values of `parameters`.
            saved: The saved tensors of its forward pass.
            output_gradients: The gradient of each output; None for an output without one.
            totals: The summed dense gradients of earlier micro-batches; None for the first, or if W adds them up.
            rows: The numbers of examples of the micro-batch.
        """
        gradients = []
        for placeholder, gradient in zip(self.trace.backward.output_gradients, output_gradients, strict=True):
            assert placeholder is None or gradient is not None, "an output without a gradient is an unused output"
            gradients.append(None if placeholder is None else gradient)
        before = self._zeros() if totals is None and not self.splits_backward else totals or []
        given = parameters, saved, gradients, before, rows if self.pads else None
        return BackwardResults(*self._call(self.functions.backward, *given))

    def weight_gradients(self, parameters: Bundle, saved: Bundle, totals: Bundle | None) -> BackwardResults:
        """Run the part of the backward pass for the weights, after `backward`.

        Args:
            parameters: The values of `parameters`.
            saved: The saved tensors of `backward`.
            totals: The summed dense gradients of earlier micro-batches; None for the first.
        """
        given = self._zeros() if totals is None else totals
        return BackwardResults(*self._call(self.functions.weights, parameters, saved, given))

    def sums(self, totals: Bundle, rows: Sequence[Any]) -> list[Any]:
        """Return the summed gradient of each parameter: a tensor, the rows of each lookup, or None.

        Args:
            totals: The summed dense gradients.
            rows: For each parameter a tuple with the summed rows of each lookup, or None.
        """
        found = self.trace.backward.sums
        dense = iter(unbundle(totals, [one for one in found if isinstance(one, tf.Tensor)], self.device))
        return [next(dense) if isinstance(one, tf.Tensor) else of_one for one, of_one in zip(found, rows, strict=True)]

    def on(self, device: str) -> StageProgram:
        """Return the same functions for another device, without another trace of the layers."""
        subgraphs = [dataclasses.replace(one, device=device) for one in self.subgraphs]
        return self._of(subgraphs, device, pads=self.pads)

    def without_xla(self) -> StageProgram:
        """Return the same functions, not compiled by XLA, for trials with other numbers of examples than in steps."""
        subgraphs = [dataclasses.replace(one, jit_compile=False) for one in self.subgraphs]
        return self._of(subgraphs, self.device, pads=False)

    def _of(self, subgraphs: Sequence[Subgraph], device: str, *, pads: bool) -> StageProgram:
        num_parameters = len(self.parameters)
        functions = StageFunctions(self.trace, subgraphs, self.input_specs, num_parameters, device, pads=pads)
        return dataclasses.replace(self, device=device, subgraphs=subgraphs, functions=functions, pads=pads)

    @property
    def _totals(self) -> list[tf.Tensor]:
        return [total for total in self.trace.backward.totals if total is not None]

    def _zeros(self) -> Bundle:
        with tf.device(self.device):
            return bundled([tf_function.fresh_zeros(total.shape, total.dtype) for total in self._totals], self.device)

    def _call(self, function: Any, *arguments: Any) -> Any:
        with tf.device(self.device):
            return tf_function.unordered_call(function, *arguments)


def compile_stage(
    stage: Stage,
    input_specs: Sequence[ValueSpec],
    device: str,
    options: StageOptions,
    *,
    unused_outputs: frozenset[model_graph.Value] = frozenset(),
    ways: Sequence[Way] = (),
) -> StageProgram:
    """Compile the functions of one stage.

    Args:
        stage: Its layer calls, inputs and outputs.
        input_specs: The specs of its inputs, in the order of `stage.inputs`.
        device: The device that runs it.
        options: How it is compiled.
        unused_outputs: Outputs that no loss depends on, and for which no gradient is received.
        ways: What the losses computed by layers need of the whole batch, for this stage and all later ones.

    Raises:
        ValueError: If a layer assigns a trained weight, or computes from a loss what micro-batches would change.
    """
    layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
    metric_states = [variable for layer in layers for variable in keras_metrics.metric_states(layer)]

    def trace(variables: StageVariables) -> StageTrace:
        return trace_stage(
            stage, input_specs, variables, device, training=options.training, accumulates=options.accumulates,
            unused_outputs=unused_outputs, ways=ways,
        )  # fmt: skip

    known = [*stage.variables, *metric_states, *random_state.states_of_no_layer()]
    variables = _by_role(known, training=options.training)
    with random_state.stand_in_generator():
        traced = trace(variables)
    unseen = _captured(traced, options.model_variables)
    if unseen:  # a Lambda may read the weight of a layer that is not its own
        variables = _by_role([*variables.parameters, *variables.states, *unseen], training=options.training)
        traced = trace(variables)
    if options.shards_weights:
        variables, traced = with_untrained_weights(variables, traced)
    subgraphs = _extract(traced, len(variables.parameters), device, options)
    per_example = [options.pads and all(spec.per_example for spec in input_specs)] * len(stage.outputs)
    if any(per_example):
        per_example = outputs_per_example(traced, subgraphs[0])
    pads = bool(per_example) and can_pad(traced, per_example, with_lookups=options.pads_lookups)
    kinds = known_kinds(traced.graph, traced.backward.weight_gradients, tensors_of([traced.values, traced.place]))
    return StageProgram(
        stage,
        input_specs,
        device,
        variables,
        frozenset(map(id, metric_states)),
        traced,
        kinds,
        subgraphs,
        StageFunctions(traced, subgraphs, input_specs, len(variables.parameters), device, pads=pads),
        per_example,
        pads,
        options.shards_weights,
    )


def _by_role(variables: Iterable[Any], *, training: bool) -> StageVariables:
    found = list({id(variable): variable for variable in variables}.values())
    parameters = [variable for variable in found if variable.trainable and training]
    return StageVariables(tuple(parameters), tuple(v for v in found if not (v.trainable and training)))


def _captured(trace: StageTrace, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Return the variables that a traced graph captures, instead of taking them as arguments."""
    handles = {id(outer) for outer, _ in trace.graph.captures if outer.dtype == tf.resource}
    unseen = [variable for variable in variables if id(variable.value.handle) in handles]
    return [*unseen, random_state.state_of_no_layer()] if trace.draws_from_no_layer else unseen


def _extract(trace: StageTrace, num_parameters: int, device: str, options: StageOptions) -> list[Subgraph]:
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
        device,
        late=tensors_of(backward.output_gradients),
        sums=sums,
        recompute=options.recompute,
        weights=trace.variables[:num_parameters] if options.shards_weights else (),
        jit_compile=options.jit_compile,
    )
