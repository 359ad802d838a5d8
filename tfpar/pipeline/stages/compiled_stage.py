"""The compiled passes of a stage for one micro-batch.

F   parameters, states, values, position   ─►  outputs, losses, new states, saved tensors
B   parameters, saved, gradients, totals   ─►  input gradients, sparse gradient rows, new totals
    parameters, saved, gradients           ─►  input gradients, saved tensors for W (in schedules with W)
W   parameters, saved, totals              ─►  sparse gradient rows, new totals
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar import data
from tfpar._compat.graphs import tf_function
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.bundles import Bundle, bundle_devices, bundle_specs, bundled, unbundle
from tfpar.pipeline.stages.padding import Rows, add_zero_rows, repeat_last_row
from tfpar.pipeline.stages.shards import copy_argument, shard_of
from tfpar.pipeline.stages.sparse_rows import Kinds
from tfpar.pipeline.stages.subgraphs import Subgraph
from tfpar.pipeline.stages.trace import StageTrace, StageVariables
from tfpar.pipeline.stages.values import BatchPosition, MaskedTensor, ValueSpec
from tfpar.reduction.gradients.gradient_addition import tensors_of, value_of
from tfpar.reduction.losses_in_call import Way

Known = dict[Any, tf.Tensor]  # values by `tensor.ref()` of the traced graph


class ForwardResults(NamedTuple):
    """The results of the forward pass of one micro-batch.

    Args:
        outputs: The outputs of the stage.
        masks: The Keras mask of each output, or None.
        losses: The losses that its layers add, scalars.
        new_states: The new values of `CompiledStage.changed_states`.
        saved: The tensors saved for later passes.
    """

    outputs: list[Any]
    masks: list[tf.Tensor | None]
    losses: list[tf.Tensor]
    new_states: Bundle
    saved: Bundle


class BackwardResults(NamedTuple):
    """The results of the backward pass, or of the weight gradients, for one micro-batch.

    Args:
        input_gradients: The gradient of each input, or None.
        rows: For each parameter, a tuple with the sparse gradient rows of each lookup, or None.
        totals: The dense gradients of parameters, summed up to this micro-batch.
        saved: The tensors saved for the weight gradients.
    """

    input_gradients: list[Any]
    rows: list[Any]
    totals: Bundle
    saved: Bundle


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStage:
    """The compiled passes of one stage, for micro-batches of any size.

    The passes are pure functions: weights, states and the index of the micro-batch are arguments, new states and
    gradients are results. So every micro-batch of a step uses the same weights, and recomputed Dropout uses the same
    mask. A pass is compiled when it first runs. Stages with equal layer calls on the same devices share the functions.

    Args:
        stage: The layer calls, inputs and outputs.
        input_specs: The spec of each input.
        devices: The device of each shard. The first receives the inputs, holds all states, and sends unsharded outputs.
        variables: The variables that the stage reads.
        metric_states: The `id` of each metric state that a layer holds.
        trace: The graph from which the subgraphs are extracted.
        subgraphs: The forward pass; for training also the backward pass and, if separate, the weight gradients.
        per_example: Whether each output is known to have one row for each example.
        pads: Whether the passes pad micro-batches to a fixed size.
        shards_weights: Whether the device gathers the weights for each action.
        functions: The compiled functions, by name and devices of the pass.
    """

    stage: Stage
    input_specs: Sequence[ValueSpec]
    devices: tuple[str, ...]
    variables: StageVariables
    metric_states: frozenset[int]
    trace: StageTrace
    subgraphs: Sequence[Subgraph]
    per_example: Sequence[bool]
    pads: bool
    shards_weights: bool
    functions: dict[tuple[str, tuple[str, ...]], Any] = dataclasses.field(default_factory=dict)

    @property
    def device(self) -> str:
        """The first device."""
        return self.devices[0]

    @property
    def parameters(self) -> Sequence[Any]:
        """The trained weights; see `StageVariables`."""
        return self.variables.parameters

    @property
    def states(self) -> Sequence[Any]:
        """All other variables."""
        return self.variables.states

    @property
    def kinds(self) -> Kinds:
        """The kind of each lookup in each of `parameters`."""
        return self.trace.backward.kinds

    @property
    def trains(self) -> bool:
        """Whether the stage has a backward pass."""
        return len(self.subgraphs) > 1

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are a separate pass."""
        return len(self.subgraphs) > 2

    @property
    def changed_states(self) -> list[Any]:
        """The states that the forward pass changes."""
        return [state for state, new in zip(self.states, self.trace.new_states, strict=True) if new is not None]

    @property
    def state_specs(self) -> Sequence[tf.Tensor]:
        """Tensors with the shapes and types of `states`."""
        return self.trace.variables[len(self.parameters) :]

    @property
    def ways(self) -> tuple[Way, ...]:
        """For each loss that the layers compute, the totals over the batch that it needs."""
        return self.trace.ways

    @property
    def output_specs(self) -> list[ValueSpec]:
        """The spec of each output."""
        pairs = zip(self.trace.output_specs, self.per_example, strict=True)
        return [dataclasses.replace(spec, per_example=known) for spec, known in pairs]

    @property
    def has_input_gradients(self) -> list[bool]:
        """Whether the backward pass computes a gradient of each input."""
        return [gradient is not None for gradient in self.trace.backward.input_gradients]

    @property
    def num_losses(self) -> int:
        """The number of losses that the layers add."""
        return len(self.trace.losses)

    @property
    def num_ends(self) -> int | None:
        """How many results to wait for until a pass has run; None for all of them."""
        return 1 if len(self.devices) == 1 else None

    @property
    def parameter_devices(self) -> list[str]:
        """The device of each parameter."""
        return self._devices_of(self._parameters)

    @functools.cached_property
    def saved_devices(self) -> tuple[list[str], list[str]]:
        """The device of each tensor in the bundles that F saves for B, and that B saves for W."""
        for_backward, for_weights = (
            bundle_devices(tensors, self._devices_of(tensors)) for tensors in (self._saved, self._saved_for_weights)
        )
        return for_backward, for_weights

    def on(self, devices: Sequence[str]) -> CompiledStage:
        """Return the same passes on other devices, one for each shard, without tracing again."""
        if tuple(devices) == self.devices:
            return self
        subgraphs = [subgraph.on(devices) for subgraph in self.subgraphs]
        return dataclasses.replace(self, devices=tuple(devices), subgraphs=subgraphs)

    def bundle(self, values: Sequence[tf.Tensor]) -> Bundle:
        """Bundle the values of `states`."""
        return bundled(values, self.device)

    def bundle_parameters(self, values: Sequence[tf.Tensor]) -> Bundle:
        """Bundle the values of `parameters`, each on its device."""
        return bundled(values, self.parameter_devices)

    def forward(
        self,
        parameters: Bundle,
        states: Bundle,
        values: Sequence[MaskedTensor],
        position: BatchPosition,
        scale: Any,
        rows: Rows,
    ) -> ForwardResults:
        """Run the forward pass of one micro-batch.

        Args:
            parameters: The values of `parameters`.
            states: The values of `states`.
            values: The inputs, `[examples, ...]` each.
            position: The position of the micro-batch in its global batch.
            scale: The gradient with respect to each added loss, `[losses]` in Keras' float type.
            rows: The size of the micro-batch with and without padding.
        """
        tensors = [value.tensor for value in values]
        pairs = zip(values, self.input_specs, strict=True)
        masks = [None if spec.mask is None else value.mask for value, spec in pairs]
        arguments = parameters, states, tensors, masks, position, scale, rows if self.pads else None
        return ForwardResults(*self._call("forward", self._run_forward, self._forward_specs, arguments))

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
            saved: The tensors saved by its forward pass.
            output_gradients: The gradient of each output, or None.
            totals: The summed dense gradients of earlier micro-batches; None for the first, or if W sums them.
            rows: The size of the micro-batch with and without padding.
        """
        gradients = []
        for placeholder, gradient in zip(self.trace.backward.output_gradients, output_gradients, strict=True):
            assert placeholder is None or gradient is not None, "an output without a gradient is an unused output"
            gradients.append(None if placeholder is None else gradient)
        before = self._zeros() if totals is None and not self.splits_backward else totals or []
        arguments = parameters, saved, gradients, before, rows if self.pads else None
        return BackwardResults(*self._call("backward", self._run_backward, self._backward_specs, arguments))

    def weight_gradients(self, parameters: Bundle, saved: Bundle, totals: Bundle | None) -> BackwardResults:
        """Compute the weight gradients of one micro-batch, after `backward`.

        Args:
            parameters: The values of `parameters`.
            saved: The tensors saved by `backward`.
            totals: The summed dense gradients of earlier micro-batches; None for the first.
        """
        arguments = parameters, saved, self._zeros() if totals is None else totals
        return BackwardResults(*self._call("weights", self._run_weights, self._weights_specs, arguments))

    def sums(self, totals: Bundle, rows: Sequence[Any]) -> list[Any]:
        """Return the summed gradient of each parameter: a tensor, the sparse rows of each lookup, or None.

        Args:
            totals: The summed dense gradients.
            rows: For each parameter, a tuple with the sparse rows of each lookup, or None.
        """
        traced = self.trace.backward
        dense = iter(unbundle(totals, traced.dense_sums, self._devices_of(traced.dense_sums)))
        pairs = zip(traced.sums, rows, strict=True)
        return [next(dense) if isinstance(traced_sum, tf.Tensor) else sparse for traced_sum, sparse in pairs]

    @property
    def _parameters(self) -> Sequence[tf.Tensor]:
        return self.trace.variables[: len(self.parameters)]

    @functools.cached_property
    def _saved(self) -> list[tf.Tensor]:
        """The tensors that F saves for B: inputs of later subgraphs, and results of theirs that F already computed."""
        trace, (forward, *later) = self.trace, self.subgraphs
        known = [*tensors_of([trace.values, trace.position, trace.scale, self.state_specs]), *forward.outputs]
        results = tensors_of([trace.backward.input_gradients, trace.backward.sums]) if later else ()
        return _read_by(later, known, results)

    @functools.cached_property
    def _saved_for_weights(self) -> list[tf.Tensor]:
        """The tensors that B saves for W."""
        trace, (forward, *later) = self.trace, self.subgraphs
        known = tensors_of([trace.values, trace.position, trace.scale, self.state_specs])
        known += [*forward.outputs, *tensors_of(trace.backward.output_gradients)]
        known += later[0].outputs if later else []
        return _read_by(later[1:], known, tensors_of(trace.backward.sums) if later[1:] else ())

    def _devices_of(self, tensors: Sequence[tf.Tensor]) -> list[str]:
        """Return the device of each tensor of the traced graph."""
        if len(self.devices) == 1:
            return [self.device] * len(tensors)
        return [self.devices[shard_of(tensor, self.trace.devices)] for tensor in tensors]

    def _zeros(self) -> Bundle:
        totals, zeros = self.trace.backward.dense_totals, []
        devices = self._devices_of(totals)
        for total, device in zip(totals, devices, strict=True):
            with tf.device(device):
                zeros.append(tf_function.fresh_zeros(total.shape, total.dtype))
        return bundled(zeros, devices)

    def _call(
        self, name: str, run: Callable[..., Any], specs: Callable[[], Sequence[Any]], arguments: Sequence[Any]
    ) -> Any:
        """Call the compiled function of a pass.

        A function call has all arguments and results on one device. So a sharded stage adds its operations to the
        calling graph instead, and the current control dependencies apply to its arguments.
        """
        with tf.device(self.device):
            if len(self.devices) > 1:
                on_shards = functools.partial(copy_argument, devices=self.devices)
                return run(*tf.nest.map_structure(on_shards, arguments, expand_composites=True))
            if (name, self.devices) not in self.functions:
                with tf_function.outside_of_functions():  # not inside the loop that calls it first
                    self.functions[name, self.devices] = tf_function.noinline_function(run, *specs())
            return tf_function.unordered_call(self.functions[name, self.devices], *arguments)

    def _specs(self, tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
        return bundle_specs(tensors, self._devices_of(tensors))

    @property
    def _rows_spec(self) -> Rows | None:
        return Rows(*[tf.TensorSpec([], tf.int64)] * 2) if self.pads else None

    def _forward_specs(self) -> Sequence[Any]:
        values, masks = [spec.spec for spec in self.input_specs], [spec.mask for spec in self.input_specs]
        variables = self._specs(self._parameters), self._specs(self.state_specs)
        scale = tf.TensorSpec([None], self.trace.scale.dtype)
        return *variables, values, masks, BatchPosition.specs(), scale, self._rows_spec

    def _backward_specs(self) -> Sequence[Any]:
        gradients = [
            None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
            for tensor in self.trace.backward.output_gradients
        ]
        totals = [] if self.splits_backward else self.trace.backward.dense_totals  # W sums them if it is separate
        return *map(self._specs, (self._parameters, self._saved)), gradients, self._specs(totals), self._rows_spec

    def _weights_specs(self) -> Sequence[Any]:
        return list(map(self._specs, (self._parameters, self._saved_for_weights, self.trace.backward.dense_totals)))

    def _run_forward(
        self,
        parameters: Bundle,
        states: Bundle,
        values: Any,
        masks: Any,
        position: BatchPosition,
        scale: tf.Tensor,
        rows: Rows | None,
    ) -> ForwardResults:
        trace, known = self.trace, self._known((self._parameters, parameters), (self.state_specs, states))
        own, (values, masks) = self._padded((values, masks), rows, repeat_last_row)
        known |= _pairs(
            tensors_of([trace.values, trace.position, trace.scale]), tensors_of([values, masks, position, scale])
        )
        self.subgraphs[0](known)
        changed = [known[state.ref()] for state in trace.new_states if state is not None]
        return ForwardResults(
            own(tf.nest.map_structure(lambda leaf: known[leaf.ref()], list(trace.outputs), expand_composites=True)),
            own([None if mask is None else known[mask.ref()] for mask in trace.masks]),
            [known[loss.ref()] for loss in trace.losses],
            bundled(changed, self.device),
            self._bundled(self._saved, known),
        )

    def _run_backward(
        self, parameters: Bundle, saved: Bundle, gradients: Any, totals: Bundle, rows: Rows | None
    ) -> BackwardResults:
        backward = self.trace.backward
        own, gradients = self._padded(gradients, rows, add_zero_rows)
        known = self._known((self._parameters, parameters), (self._saved, saved))
        if not self.splits_backward:
            known |= self._known((backward.dense_totals, totals))
        known |= _pairs(tensors_of(backward.output_gradients), tensors_of(gradients))
        self.subgraphs[1](known)
        input_gradients = own([value_of(gradient, known) for gradient in backward.input_gradients])
        if self.splits_backward:
            return BackwardResults(input_gradients, [], [], self._bundled(self._saved_for_weights, known))
        return BackwardResults(input_gradients, *self._sums(known), [])

    def _run_weights(self, parameters: Bundle, saved: Bundle, totals: Bundle) -> BackwardResults:
        bundles = (self._saved_for_weights, saved), (self.trace.backward.dense_totals, totals)
        known = self._known((self._parameters, parameters), *bundles)
        self.subgraphs[2](known)
        return BackwardResults([], *self._sums(known), [])

    def _padded(
        self, tensors: Any, rows: Rows | None, pad: Callable[[tf.Tensor, Rows], tf.Tensor]
    ) -> tuple[Callable[[Any], Any], Any]:
        """Return a function that removes padding from results, and the padded tensors."""
        if rows is None:
            return (lambda results: results), tensors

        def own(results: Any) -> Any:
            with tf.device(self.device):
                return data.take_rows(results, 0, rows.own)

        with tf.device(self.device):
            return own, tf.nest.map_structure(lambda leaf: None if leaf is None else pad(leaf, rows), tensors)

    def _sums(self, known: Known) -> tuple[list[Any], Bundle]:
        """Return the sparse rows of each parameter, and the bundle of the dense sums."""
        sums = [value_of(traced, known) for traced in self.trace.backward.sums]
        dense = [total for total in sums if isinstance(total, tf.Tensor)]
        rows = [total if isinstance(total, tuple) else None for total in sums]
        return rows, bundled(dense, self._devices_of(self.trace.backward.dense_sums))

    def _bundled(self, tensors: Sequence[tf.Tensor], known: Known) -> Bundle:
        return bundled([known[tensor.ref()] for tensor in tensors], self._devices_of(tensors))

    def _known(self, *bundles: tuple[Sequence[tf.Tensor], Bundle]) -> Known:
        known: Known = {}
        for tensors, bundle in bundles:
            known |= _pairs(tensors, unbundle(bundle, tensors, self._devices_of(tensors)))
        return known


def _read_by(
    subgraphs: Sequence[Subgraph], known: Iterable[tf.Tensor], results: Iterable[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the known tensors that are inputs or results of subgraphs."""
    read = {tensor.ref() for subgraph in subgraphs for tensor in subgraph.inputs} | {t.ref() for t in results}
    return [ref.deref() for ref in dict.fromkeys(tensor.ref() for tensor in known) if ref in read]


def _pairs(tensors: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Known:
    return {tensor.ref(): value for tensor, value in zip(tensors, values, strict=True)}
