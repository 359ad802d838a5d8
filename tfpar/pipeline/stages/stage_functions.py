"""The passes of a stage as compiled functions with few arguments and results, whose tensors come in bundles.

F   parameters, states, values, place      ─►  outputs, losses, new states, saved tensors
B   parameters, saved, gradients, totals   ─►  gradients of the inputs, rows, new totals
    parameters, saved, gradients           ─►  gradients of the inputs, saved tensors for W (where W is apart)
W   parameters, saved, totals              ─►  rows, new totals
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfpar import data
from tfpar._compat import tf_function
from tfpar.pipeline.stages.bundles import Bundle, bundled, devices_of_parts, specs_of, unbundle
from tfpar.pipeline.stages.padding import Rows, add_zero_rows, repeat_last_row
from tfpar.pipeline.stages.shards import argument, shard_of
from tfpar.pipeline.stages.subgraphs import Subgraph
from tfpar.pipeline.stages.trace import StageTrace
from tfpar.pipeline.stages.values import Place, ValueSpec
from tfpar.reduction.gradient_addition import tensors_of, value_of

Known = dict[Any, tf.Tensor]  # values by `tensor.ref()` of the traced graph


class ForwardResults(NamedTuple):
    """The results of F for one micro-batch.

    Args:
        outputs: The outputs of the stage.
        masks: The Keras mask of each output; None for none.
        losses: The losses that its layers add, scalars.
        new_states: The new values of the states that it changes.
        saved: The tensors that B, or W, needs.
    """

    outputs: list[Any]
    masks: list[tf.Tensor | None]
    losses: list[tf.Tensor]
    new_states: Bundle
    saved: Bundle


class BackwardResults(NamedTuple):
    """The results of B or W for one micro-batch.

    Args:
        input_gradients: The gradient of each input; None for none.
        rows: For each parameter a tuple with the rows of each lookup, or None.
        totals: The summed dense gradients of parameters, this micro-batch included.
        saved: The tensors that W needs.
    """

    input_gradients: list[Any]
    rows: list[Any]
    totals: Bundle
    saved: Bundle


class StageFunctions:
    """The passes of a stage, each compiled on first use.

    Args:
        trace: The graph of the forward and backward pass.
        subgraphs: The forward pass; for training the backward pass; where it is apart, the weight gradient.
        inputs: The specs of the inputs of the stage.
        num_parameters: The number of variables that are trained.
        devices: The device of each shard; one for a stage that is not divided.
        pads: Whether F and B pad a micro-batch, and take the numbers of its rows.
    """

    def __init__(
        self,
        trace: StageTrace,
        subgraphs: Sequence[Subgraph],
        inputs: Sequence[ValueSpec],
        num_parameters: int,
        devices: Sequence[str],
        *,
        pads: bool,
    ) -> None:
        self._trace, self._inputs, self._devices, self._device = trace, inputs, devices, devices[0]
        self.subgraphs = subgraphs
        self._copies = {tuple(devices): self}
        self._rows = Rows(*[tf.TensorSpec([], tf.int64)] * 2) if pads else None
        self._forward, *self._later = subgraphs
        self._parameters, self._states = trace.variables[:num_parameters], trace.variables[num_parameters:]
        self._totals = [total for total in trace.backward.totals if total is not None]
        given = tensors_of([trace.values, trace.place, trace.scale, self._states])
        results = tensors_of([trace.backward.input_gradients, trace.backward.sums])
        self._saved = _among([*given, *self._forward.outputs], self._later, results if self._later else ())
        gradients = tensors_of(trace.backward.output_gradients)
        before = [*given, *self._forward.outputs, *gradients, *(self._later[0].outputs if self._later else [])]
        self._saved_for_weights = _among(
            before, self._later[1:], tensors_of(trace.backward.sums) * bool(self._later[1:])
        )

    def on(self, devices: Sequence[str]) -> StageFunctions:
        """Return the same passes on other devices, compiled once for all stages that have them.

        Args:
            devices: The device of each shard.
        """
        key = tuple(devices)
        if key not in self._copies:
            subgraphs, pads = [one.on(devices) for one in self.subgraphs], self._rows is not None
            copy = StageFunctions(self._trace, subgraphs, self._inputs, len(self._parameters), devices, pads=pads)
            copy._copies = self._copies
            self._copies[key] = copy
        return self._copies[key]

    def places(self, tensors: Sequence[tf.Tensor]) -> list[str]:
        """Return the device of the value of each tensor of the traced graph."""
        if len(self._devices) == 1:
            return [self._device] * len(tensors)
        return [self._devices[shard_of(tensor, self._trace.devices)] for tensor in tensors]

    @functools.cached_property
    def saved_places(self) -> tuple[list[str], list[str]]:
        """The device of each tensor of the bundles that F saves for B, and that B saves for W."""
        tensors = self._saved, self._saved_for_weights
        found = [devices_of_parts(of_one, self.places(of_one)) for of_one in tensors]
        return found[0], found[1]

    def run(self, name: str, *arguments: Any) -> Any:
        """Add the operations of a pass to the graph that is being traced.

        A call of a function would have all arguments and results on one device. The control dependencies in force apply
        to the arguments of the pass.

        Args:
            name: The name of the pass, such as "forward".
            *arguments: Its arguments.
        """
        passes: dict[str, Callable[..., Any]] = {
            "forward": self._run_forward,
            "backward": self._run_backward,
            "weights": self._run_weights,
        }
        given = tf.nest.map_structure(lambda one: argument(one, self._devices), arguments, expand_composites=True)
        return passes[name](*given)

    @functools.cached_property
    def forward(self) -> Any:
        """The concrete function of F."""
        parameters, states = self._specs(self._parameters), self._specs(self._states)
        values, masks = [one.spec for one in self._inputs], [one.mask for one in self._inputs]
        scale = tf.TensorSpec([None], self._trace.scale.dtype)
        return _compiled(self._run_forward, parameters, states, values, masks, Place.specs(), scale, self._rows)

    @functools.cached_property
    def backward(self) -> Any:
        """The concrete function of B."""
        gradients = [
            None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
            for tensor in self._trace.backward.output_gradients
        ]
        added = [] if self._later[1:] else self._totals  # W adds them up
        parameters, saved, totals = map(self._specs, (self._parameters, self._saved, added))
        return _compiled(self._run_backward, parameters, saved, gradients, totals, self._rows)

    @functools.cached_property
    def weights(self) -> Any:
        """The concrete function of W."""
        specs = map(self._specs, (self._parameters, self._saved_for_weights, self._totals))
        return _compiled(self._run_weights, *specs)

    def _specs(self, tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
        return specs_of(tensors, self.places(tensors))

    def _run_forward(
        self,
        parameters: Bundle,
        states: Bundle,
        values: Any,
        masks: Any,
        place: Place,
        scale: tf.Tensor,
        rows: Rows | None,
    ) -> ForwardResults:
        trace, known = self._trace, self._known((self._parameters, parameters), (self._states, states))
        own, (values, masks) = self._added((values, masks), rows, repeat_last_row)
        known |= _pairs(tensors_of([trace.values, trace.place, trace.scale]), tensors_of([values, masks, place, scale]))
        self._forward(known)
        changed = [known[state.ref()] for state in trace.new_states if state is not None]
        return ForwardResults(
            own([_composite(output, known) for output in trace.outputs]),
            own([None if mask is None else known[mask.ref()] for mask in trace.masks]),
            [known[loss.ref()] for loss in trace.losses],
            bundled(changed, self._device),
            self._bundled(self._saved, known),
        )

    def _run_backward(
        self, parameters: Bundle, saved: Bundle, gradients: Any, totals: Bundle, rows: Rows | None
    ) -> BackwardResults:
        backward = self._trace.backward
        own, gradients = self._added(gradients, rows, add_zero_rows)
        known = self._known((self._parameters, parameters), (self._saved, saved))
        if not self._later[1:]:
            known |= self._known((self._totals, totals))
        known |= _pairs(tensors_of(backward.output_gradients), tensors_of(gradients))
        self._later[0](known)
        of_inputs = own([value_of(gradient, known) for gradient in backward.input_gradients])
        if self._later[1:]:
            return BackwardResults(of_inputs, [], [], self._bundled(self._saved_for_weights, known))
        return BackwardResults(of_inputs, *self._sums(known), [])

    def _run_weights(self, parameters: Bundle, saved: Bundle, totals: Bundle) -> BackwardResults:
        late = self._saved_for_weights
        known = self._known((self._parameters, parameters), (late, saved), (self._totals, totals))
        self._later[1](known)
        return BackwardResults([], *self._sums(known), [])

    def _added(
        self, tensors: Any, rows: Rows | None, add: Callable[[tf.Tensor, Rows], tf.Tensor]
    ) -> tuple[Callable[[Any], Any], Any]:
        """Return a function that removes the added rows of results, and tensors with added rows."""
        if rows is None:
            return (lambda results: results), tensors

        def own(results: Any) -> Any:
            with tf.device(self._device):
                return data.take_rows(results, 0, rows.own)

        with tf.device(self._device):
            return own, tf.nest.map_structure(lambda one: None if one is None else add(one, rows), tensors)

    def _sums(self, known: Known) -> tuple[list[Any], Bundle]:
        sums = [value_of(one, known) for one in self._trace.backward.sums]
        dense = [one for one in sums if isinstance(one, tf.Tensor)]
        places = self.places(self._trace.backward.dense_sums)
        return [one if isinstance(one, tuple) else None for one in sums], bundled(dense, places)

    def _bundled(self, tensors: Sequence[tf.Tensor], known: Known) -> Bundle:
        return bundled([known[tensor.ref()] for tensor in tensors], self.places(tensors))

    def _known(self, *bundles: tuple[Sequence[tf.Tensor], Bundle]) -> Known:
        known: Known = {}
        for tensors, bundle in bundles:
            known |= _pairs(tensors, unbundle(bundle, tensors, self.places(tensors)))
        return known


def _compiled(body: Callable[..., Any], *specs: Any) -> Any:
    with tf_function.outside_of_functions():  # not inside of the loop that calls it first
        return tf_function.noinline_function(body, *specs)


def _among(
    tensors: Iterable[tf.Tensor], subgraphs: Sequence[Subgraph], results: Iterable[tf.Tensor]
) -> list[tf.Tensor]:
    """Return the tensors that subgraphs read, and those that are results of theirs although others computed them."""
    read = {tensor.ref() for subgraph in subgraphs for tensor in subgraph.inputs} | {one.ref() for one in results}
    return [ref.deref() for ref in dict.fromkeys(tensor.ref() for tensor in tensors) if ref in read]


def _pairs(tensors: Sequence[tf.Tensor], values: Sequence[tf.Tensor]) -> Known:
    return {tensor.ref(): value for tensor, value in zip(tensors, values, strict=True)}


def _composite(tensor: Any, known: Known) -> Any:
    """Return a tensor of the traced graph, perhaps a ragged or sparse one, with its value."""
    return tf.nest.map_structure(lambda part: known[part.ref()], tensor, expand_composites=True)
