"""A stage as compiled functions: forward pass, backward pass and weight gradient of one micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import tf_function
from tfpar.pipeline.graph.ir import Value
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.bundles import Bundle, bundled, unbundle
from tfpar.pipeline.stages.padding import Rows
from tfpar.pipeline.stages.saved_tensors import SavedBytes, saved_bytes
from tfpar.pipeline.stages.shards import DividedCalls
from tfpar.pipeline.stages.sparse_rows import Kinds
from tfpar.pipeline.stages.stage_functions import (
    BackwardResults,
    ForwardResults,
    StageFunctions,
)
from tfpar.pipeline.stages.subgraphs import Subgraph
from tfpar.pipeline.stages.trace import StageTrace, StageVariables
from tfpar.pipeline.stages.values import MaskedTensor, Place, ValueSpec
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
        divided: The divided layer calls of each stage, by its index; empty for stages on one device each.
        groups: The devices of the shards of a stage, by the first of them.
        in_pieces: Outputs of the model that stages of several devices may send in pieces.
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
    divided: Mapping[int, DividedCalls] = MappingProxyType({})
    groups: Mapping[str, Sequence[str]] = MappingProxyType({})
    in_pieces: frozenset[Value] = frozenset()


@dataclasses.dataclass(frozen=True, eq=False)
class StageProgram:
    """The compiled functions of one stage, for micro-batches of any size.

    All are pure: weights, states and the number of the micro-batch are arguments, new states and gradients are results.
    So every micro-batch of a step sees the same weights, and Dropout draws the same mask in a recomputation.

    Args:
        stage: Its layer calls, inputs and outputs.
        input_specs: The specs of its inputs, in the order of `stage.inputs`.
        devices: The device of each shard; one for a stage that is not divided.
        groups: Those of every stage of every replica, by the first of them; empty for stages that are not divided.
        variables: The variables that it reads.
        metric_states: The `id` of each state of a metric that a layer holds.
        trace: The graph from which the subgraphs are extracted.
        subgraphs: The forward pass; for training the backward pass; where it is apart, the weight gradient.
        functions: The same as compiled functions.
        per_example: Whether each output is known to have one row for each example.
        pads: Whether they pad micro-batches.
        shards_weights: Whether the device holds copies of the weights during an action alone.
    """

    stage: Stage
    input_specs: Sequence[ValueSpec]
    devices: Sequence[str]
    groups: Mapping[str, Sequence[str]]
    variables: StageVariables
    metric_states: frozenset[int]
    trace: StageTrace
    subgraphs: Sequence[Subgraph]
    functions: StageFunctions
    per_example: Sequence[bool]
    pads: bool
    shards_weights: bool

    @property
    def device(self) -> str:
        """The device that runs it, of several the first: it receives the inputs and sends what is whole."""
        return self.devices[0]

    @property
    def parameters(self) -> Sequence[Any]:
        """Weights that are trained; then, of sharded weights, large ones that are not."""
        return self.variables.parameters

    @property
    def states(self) -> Sequence[Any]:
        """All other variables."""
        return self.variables.states

    @property
    def kinds(self) -> Kinds:
        """The kind of each lookup of each of `parameters`."""
        return self.trace.backward.kinds

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

    @property
    def num_ends(self) -> int | None:
        """The number of results of a pass after which it has run; None for all."""
        return 1 if len(self.devices) == 1 else None

    @property
    def parameter_places(self) -> list[str]:
        """The device of each of `parameters`: for a piece of a divided weight that of its shard."""
        return self.functions.places(self.trace.variables[: len(self.parameters)])

    @property
    def saved_places(self) -> tuple[list[str], list[str]]:
        """The device of each tensor of the bundles that F saves for B, and that B saves for W."""
        return self.functions.saved_places

    def bundle(self, values: Sequence[tf.Tensor]) -> Bundle:
        """Return the values of `states` as the passes take them."""
        return bundled(values, self.device)

    def bundle_parameters(self, values: Sequence[tf.Tensor]) -> Bundle:
        """Return the values of `parameters` as the passes take them, each on its device."""
        return bundled(values, self.parameter_places)

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
        return ForwardResults(*self._call("forward", *given))

    def backward(
        self,
        parameters: Bundle,
        saved: Bundle,
        output_gradients: Sequence[Any],
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
        return BackwardResults(*self._call("backward", *given))

    def weight_gradients(self, parameters: Bundle, saved: Bundle, totals: Bundle | None) -> BackwardResults:
        """Run the part of the backward pass for the weights, after `backward`.

        Args:
            parameters: The values of `parameters`.
            saved: The saved tensors of `backward`.
            totals: The summed dense gradients of earlier micro-batches; None for the first.
        """
        given = self._zeros() if totals is None else totals
        return BackwardResults(*self._call("weights", parameters, saved, given))

    def sums(self, totals: Bundle, rows: Sequence[Any]) -> list[Any]:
        """Return the summed gradient of each parameter: a tensor, the rows of each lookup, or None.

        Args:
            totals: The summed dense gradients.
            rows: For each parameter a tuple with the summed rows of each lookup, or None.
        """
        found, tensors = self.trace.backward.sums, self.trace.backward.dense_sums
        dense = iter(unbundle(totals, tensors, self.functions.places(tensors)))
        return [next(dense) if isinstance(one, tf.Tensor) else of_one for one, of_one in zip(found, rows, strict=True)]

    def on(self, device: str) -> StageProgram:
        """Return the same functions for another device, without another trace of the layers."""
        devices = self.groups.get(device, [device])
        functions = self.functions.on(devices)
        return dataclasses.replace(self, devices=devices, subgraphs=functions.subgraphs, functions=functions)

    @property
    def _totals(self) -> list[tf.Tensor]:
        return [total for total in self.trace.backward.totals if total is not None]

    def _zeros(self) -> Bundle:
        places, zeros = self.functions.places(self._totals), []
        for total, place in zip(self._totals, places, strict=True):
            with tf.device(place):
                zeros.append(tf_function.fresh_zeros(total.shape, total.dtype))
        return bundled(zeros, places)

    def _call(self, name: str, *arguments: Any) -> Any:
        with tf.device(self.device):
            if len(self.devices) > 1:
                return self.functions.run(name, *arguments)
            return tf_function.unordered_call(getattr(self.functions, name), *arguments)
