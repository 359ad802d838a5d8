"""A stage as compiled functions: forward pass, backward pass and weight gradient of one micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_metrics, random_state
from tfpar.pipeline.execution.row_gradients import Kinds, add_rows, joined, known_kinds, numbered
from tfpar.pipeline.execution.saved_tensors import SavedBytes, saved_bytes
from tfpar.pipeline.execution.stage_trace import StageTrace, StageVariables, trace_stage
from tfpar.pipeline.execution.stage_values import Forward, MaskedTensor, Place, ValueSpec
from tfpar.pipeline.execution.subgraphs import Subgraph, extract_subgraphs
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.partition.stages import Stage
from tfpar.reduction.gradient_addition import tensors_of, value_of
from tfpar.reduction.losses_in_call import Way


class StageOptions(NamedTuple):
    """How the stages of a model are compiled.

    Args:
        training: Whether the model is trained.
        recompute: Whether the backward pass recomputes the forward pass, so that only stage inputs are saved.
        splits_backward: Whether the weight gradient is a subgraph of its own.
        jit_compile: Whether XLA compiles the subgraphs.
        model_variables: All variables of the model. A layer may read a variable of another layer.
    """

    training: bool
    recompute: bool = False
    splits_backward: bool = False
    jit_compile: bool = False
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
        forward_graph: The forward pass.
        backward_graph: The backward pass, or its part for the inputs; None without training.
        weight_graph: The weight gradient; None where the backward pass computes it.
    """

    stage: Stage
    input_specs: Sequence[ValueSpec]
    device: str
    variables: StageVariables
    metric_states: frozenset[int]
    trace: StageTrace
    kinds: Kinds
    forward_graph: Subgraph
    backward_graph: Subgraph | None
    weight_graph: Subgraph | None

    @property
    def parameters(self) -> Sequence[Any]:
        """Weights that are trained."""
        return self.variables.parameters

    @property
    def states(self) -> Sequence[Any]:
        """All other variables."""
        return self.variables.states

    @property
    def ways(self) -> tuple[Way, ...]:
        """What the losses computed by its layers need of the whole batch."""
        return self.trace.ways

    @property
    def output_specs(self) -> list[ValueSpec]:
        """The spec of each output, in the order of `stage.outputs`."""
        return self.trace.output_specs

    @property
    def has_input_gradients(self) -> list[bool]:
        """Whether the backward pass gives a gradient for each input."""
        return [gradient is not None for gradient in self.trace.backward.input_gradients]

    @property
    def num_losses(self) -> int:
        """The number of losses that its layers add."""
        return len(self.trace.losses)

    def joined(self, gradients: Sequence[Any]) -> list[Any]:
        """Return summed gradients of `parameters` as tensors, slices or None, as one device has them."""
        return joined(gradients, self.kinds, self.parameters)

    def saved_bytes(self, microbatch_size: int) -> SavedBytes:
        """Return the memory of the saved tensors of a micro-batch, in bytes.

        Args:
            microbatch_size: The number of examples.
        """
        later = [graph for graph in (self.backward_graph, self.weight_graph) if graph is not None]
        saved = [*tensors_of(self.trace.values), *self.forward_graph.outputs]
        return saved_bytes(saved, later, tensors_of(self.trace.backward.output_gradients), microbatch_size)

    def forward(
        self, values: Sequence[MaskedTensor], variables: Sequence[tf.Tensor], place: Place, scale: Any
    ) -> Forward:
        """Run the forward pass of one micro-batch.

        Args:
            values: The inputs, `[examples, ...]` each.
            variables: The values of `parameters`, then of `states`.
            place: The micro-batch in its global batch.
            scale: The gradient of one unit of each added loss, `[losses]` in Keras' float type.
        """
        trace = self.trace
        masks = [value.mask for value, spec in zip(values, self.input_specs, strict=True) if spec.mask is not None]
        given = [*(value.tensor for value in values), *masks, *variables, place, scale]
        pairs = zip(trace.arguments, tensors_of(given), strict=True)
        known = {tensor.ref(): value for tensor, value in pairs}
        self.forward_graph(known)
        made = [
            MaskedTensor(_value_of(tensor, known), None if mask is None else known[mask.ref()])
            for tensor, mask in zip(trace.outputs, trace.masks, strict=True)
        ]
        states = [None if state is None else known[state.ref()] for state in trace.new_states]
        return Forward(made, states, [known[loss.ref()] for loss in trace.losses], known)

    def backward(
        self, done: Forward, output_gradients: Sequence[tf.Tensor | None], totals: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        """Run the backward pass of one micro-batch.

        Args:
            done: The forward pass of the micro-batch.
            output_gradients: The gradient of each output; None for an output without one.
            totals: The summed weight gradients of earlier micro-batches; None for the first.

        Returns:
            The gradient of each input, None for none; and the new totals, None as a whole where `weight_gradients`
            computes them.
        """
        assert self.backward_graph is not None, "compiled without training"
        for placeholder, gradient in zip(self.trace.backward.output_gradients, output_gradients, strict=True):
            if placeholder is not None:
                assert gradient is not None, "an output without a gradient is an unused output"
                done.known[placeholder.ref()] = gradient
        sums = None
        if self.weight_graph is None:
            sums = self._run_and_sum(self.backward_graph, done, totals)
        else:
            self.backward_graph(done.known)
        return [value_of(gradient, done.known) for gradient in self.trace.backward.input_gradients], sums

    def weight_gradients(self, done: Forward, totals: Sequence[Any] | None) -> list[Any]:
        """Return the new totals of the gradients of `parameters`, after `backward`; None for a weight without one.

        Args:
            done: The forward pass of the micro-batch.
            totals: The summed weight gradients of earlier micro-batches; None for the first.
        """
        assert self.weight_graph is not None, "the backward pass computes the weight gradient"
        return self._run_and_sum(self.weight_graph, done, totals)

    def _run_and_sum(self, subgraph: Subgraph, done: Forward, totals: Sequence[Any] | None) -> list[Any]:
        backward = self.trace.backward
        for index, total in enumerate(backward.totals):
            if total is not None:
                done.known[total.ref()] = tf.zeros(total.shape, total.dtype) if totals is None else totals[index]
        subgraph(done.known)
        pairs = zip(backward.sums, self.kinds, strict=True)
        sums = [numbered(value_of(one, done.known), kinds) for one, kinds in pairs]
        if totals is None:
            return sums
        return [
            now if not kinds else add_rows(before, now, kinds)
            for before, now, kinds in zip(totals, sums, self.kinds, strict=True)
        ]


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
            stage, input_specs, variables, device, training=options.training, unused_outputs=unused_outputs, ways=ways
        )

    known = [*stage.variables, *metric_states, *random_state.states_of_no_layer()]
    variables = _by_role(known, training=options.training)
    with random_state.stand_in_generator():
        traced = trace(variables)
    unseen = _captured(traced, options.model_variables)
    if unseen:  # a Lambda may read the weight of a layer that is not its own
        variables = _by_role([*variables.parameters, *variables.states, *unseen], training=options.training)
        traced = trace(variables)
    forward, *backward = _extract(traced, device, options)
    kinds = known_kinds(traced.graph, traced.backward.weight_gradients, tensors_of([traced.values, traced.place]))
    return StageProgram(
        stage,
        input_specs,
        device,
        variables,
        frozenset(map(id, metric_states)),
        traced,
        kinds,
        forward_graph=forward,
        backward_graph=backward[0] if backward else None,
        weight_graph=backward[1] if len(backward) > 1 else None,
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


def _extract(trace: StageTrace, device: str, options: StageOptions) -> list[Subgraph]:
    """Extract the subgraphs of the forward and backward pass, and of the weight gradient if it is apart."""
    backward, results = trace.backward, [trace.results]
    if options.training:
        of_inputs, of_weights = tensors_of(backward.input_gradients), tensors_of(backward.sums)
        results += [of_inputs, of_weights] if options.splits_backward else [[*of_inputs, *of_weights]]
    sums = [one for one, total in zip(backward.sums, backward.totals, strict=True) if total is not None]
    return extract_subgraphs(
        trace.graph,
        trace.inputs,
        results,
        device,
        sums=sums,
        recompute=options.recompute,
        jit_compile=options.jit_compile,
    )


def _value_of(tensor: Any, known: dict[Any, tf.Tensor]) -> Any:
    """Return a tensor of the traced graph, perhaps a ragged or sparse one, with its value."""
    return tf.nest.map_structure(lambda part: known[part.ref()], tensor, expand_composites=True)
