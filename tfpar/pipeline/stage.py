"""A stage as compiled functions: its forward pass, its backward pass, and what travels in and out of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import _compat, _compat_pipeline, _compat_random, slices
from tfpar.pipeline import graph as model_graph
from tfpar.pipeline.gradients import add_rows, by_lookup, dense_part, join_rows, kinds_of, tensors_of, value_of
from tfpar.pipeline.kept import Kept, kept_between
from tfpar.pipeline.pieces import cut
from tfpar.pipeline.split import Stage


@dataclasses.dataclass(frozen=True)
class Flow:
    """What is known of a value that travels between stages.

    Args:
        spec: Its shape `[None, ...]` and type.
        mask: Those of the Keras mask that travels with it; None for none.
        needs_gradient: Whether a gradient travels back.
    """

    spec: tf.TensorSpec
    mask: tf.TensorSpec | None = None
    needs_gradient: bool = False


@dataclasses.dataclass
class Travelling:
    """A value of one micro-batch: a tensor and its Keras mask."""

    tensor: tf.Tensor
    mask: tf.Tensor | None = None

    def on(self, device: str) -> Travelling:
        """Return it on a device; it leaves for there as soon as it is made."""
        with tf.device(device):
            return Travelling(tf.identity(self.tensor), None if self.mask is None else tf.identity(self.mask))


class Forward(NamedTuple):
    """The forward pass of one micro-batch through a stage.

    Args:
        made: What the stage makes.
        states: The new value of each of its states; None where it stays.
        losses: What its layers add to the loss.
        known: What the backward pass takes.
    """

    made: list[Travelling]
    states: list[tf.Tensor | None]
    losses: list[tf.Tensor]
    known: dict[Any, tf.Tensor]


class StageProgram:
    """The functions of one stage, traced once for micro-batches of any size.

    All are pure: weights, states and the micro-batch's number come as arguments, new states and gradients go back. So
    every micro-batch of a step sees the same weights, and Dropout draws the same mask when the forward pass runs again.

    Args:
        stage: Its calls and what it takes and makes.
        taken: What is known of the values that it takes, in the order of `stage.inputs`.
        device: Where it runs.
        training: Whether it trains.
        recompute: Whether the backward pass runs the forward pass again, so that only what it takes is kept.
        splits_backward: Whether the weight gradient is a function of its own.
        jit_compile: Compile the functions with XLA.
        model_variables: All variables of the model, among which a layer may read those of another.
        dead: Values that it makes and that no loss depends on, so that no gradient comes back for them.

    Raises:
        ValueError: If a layer changes a weight while it is called.
    """

    def __init__(
        self,
        stage: Stage,
        taken: Sequence[Flow],
        device: str,
        *,
        training: bool,
        recompute: bool = False,
        splits_backward: bool = False,
        jit_compile: bool = False,
        model_variables: Sequence[keras.Variable] = (),
        dead: frozenset[model_graph.Value] = frozenset(),
    ) -> None:
        self.stage, self.device, self.training = stage, device, training
        self._taken, self._dead = taken, dead
        layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
        counters = [variable for layer in layers for variable in _compat_pipeline.metric_states(layer)]
        self.counters = set(map(id, counters))
        self._find_variables([*stage.variables, *counters, *_compat_random.states_of_no_layer()])
        with _compat_random.stand_in_generator():
            self._trace()
        unseen = self._read_unseen(model_variables)
        if unseen:  # a Lambda may read the weight of a layer that is not its own
            self._find_variables([*self.parameters, *self.states, *unseen])
            self._trace()
        results = [tensors_of([self._made, self._masks, self._new_states, self._losses])]
        if training:
            both = [tensors_of(self._input_gradients), tensors_of(self._sums)]
            results += both if splits_backward else [[*both[0], *both[1]]]
        self._kinds = self._find_kinds()
        inputs = tensors_of([self._arguments, self._upstream, self._totals])
        sums = [one for one, total in zip(self._sums, self._totals, strict=True) if total is not None]
        pieces: list[Any] = cut(
            self._graph, inputs, results, device, sums=sums, again=recompute, jit_compile=jit_compile
        )
        self._forward, self._backward, self._weights = (*pieces, None, None)[:3]

    def _find_variables(self, variables: Iterable[keras.Variable]) -> None:
        found = _unique(variables)
        self.parameters = [variable for variable in found if variable.trainable and self.training]
        self.states = [variable for variable in found if not (variable.trainable and self.training)]

    def _read_unseen(self, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        """Return those of some variables that the traced graph reads by itself, not as its arguments."""
        handles = {id(outer) for outer, _ in self._graph.captures if outer.dtype == tf.resource}
        unseen = [variable for variable in variables if id(variable.value.handle) in handles]
        return [*unseen, _compat_random.state_of_no_layer()] if self._draws_from_stand_in else unseen

    def _find_kinds(self) -> list[tuple[slices.Kind, ...]]:
        """Say of the lookups behind each gradient of rows what becomes of rows of the same number."""
        # A position is looked up whatever the examples are; what is drawn at random is another for each micro-batch.
        drawn = [tensor for op in self._graph.get_operations() if op.op_def.is_stateful for tensor in op.outputs]
        varying = _reached_from([*tensors_of(self._flows), self._microbatch, *drawn])
        return [kinds_of(gradient, varying) for gradient in self._weight_gradients]

    def joined(self, gradients: Sequence[Any]) -> list[Any]:
        """Return summed gradients of `parameters` as tensors, slices or None: each as one device has it."""
        found = zip(gradients, self._kinds, self.parameters, strict=True)
        return [
            join_rows(gradient, kinds, variable.shape) if kinds else gradient for gradient, kinds, variable in found
        ]

    @property
    def sends(self) -> list[Flow]:
        """What is known of the values that it makes, in the order of `stage.outputs`."""
        return [
            Flow(_spec(made), _spec(mask), upstream is not None)
            for made, mask, upstream in zip(self._made, self._masks, self._upstream, strict=True)
        ]

    @property
    def sends_back(self) -> list[bool]:
        """Whether a gradient goes back for each value that it takes."""
        found = iter(self._input_gradients)
        return [flow.needs_gradient and next(found) is not None for flow in self._taken]

    @property
    def num_losses(self) -> int:
        """How many losses its layers add."""
        return len(self._losses)

    def kept(self, microbatch_size: int) -> Kept:
        """Return what a micro-batch keeps on this stage, in bytes.

        Args:
            microbatch_size: Its examples.
        """
        forward, later = self._forward, [self._backward, *([self._weights] if self._weights else [])]
        return kept_between(
            [*tensors_of(self._flows), *forward.gives], later, tensors_of(self._upstream), microbatch_size
        )

    def forward(
        self, values: Sequence[Travelling], variables: Sequence[tf.Tensor], microbatch: Any, scale: Any
    ) -> Forward:
        """Run the forward pass on one micro-batch.

        Args:
            values: What it takes, `[examples, ...]` each.
            variables: Those of `parameters` and then those of `states`.
            microbatch: The number of the micro-batch, an int64 scalar.
            scale: What one unit of each loss that its layers add counts in gradients, `[losses]` in Keras' float type.
        """
        masks = [value.mask for value, flow in zip(values, self._taken, strict=True) if flow.mask is not None]
        given = [*(value.tensor for value in values), *masks, *variables, microbatch, scale]
        pairs = zip(tensors_of(self._arguments), tensors_of(given), strict=True)
        known = {tensor.ref(): value for tensor, value in pairs}
        self._forward(known)
        made = [
            Travelling(_value_of(tensor, known), None if mask is None else known[mask.ref()])
            for tensor, mask in zip(self._made, self._masks, strict=True)
        ]
        states = [None if state is None else known[state.ref()] for state in self._new_states]
        return Forward(made, states, [known[loss.ref()] for loss in self._losses], known)

    def backward(
        self, done: Forward, upstream: Sequence[tf.Tensor | None], totals: Sequence[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        """Run the backward pass on one micro-batch.

        Args:
            done: Its forward pass.
            upstream: The gradient of each value that the stage made; None for those without.
            totals: What the micro-batches before gave as gradients of `parameters`; None for the first.

        Returns:
            The gradient of each value taken, None for none; and the new totals, None as a whole where
            `weight_gradients` gives them.
        """
        for wanted, given in zip(self._upstream, upstream, strict=True):
            if wanted is not None:
                assert given is not None, "values without a gradient are dead"
                done.known[wanted.ref()] = given
        sums = None
        if self._weights is None:
            sums = self._run_and_sum(self._backward, done, totals)
        else:
            self._backward(done.known)
        found = iter(self._input_gradients)
        return [value_of(next(found), done.known) if flow.needs_gradient else None for flow in self._taken], sums

    def weight_gradients(self, done: Forward, totals: Sequence[Any] | None) -> list[Any]:
        """Return the new totals of the gradients of `parameters`, after `backward`; None for a weight without one.

        Args:
            done: The forward pass of the micro-batch.
            totals: What the micro-batches before gave; None for the first.
        """
        return self._run_and_sum(self._weights, done, totals)

    def _run_and_sum(self, piece: Any, done: Forward, totals: Sequence[Any] | None) -> list[Any]:
        for index, total in enumerate(self._totals):
            if total is not None:
                done.known[total.ref()] = tf.zeros(total.shape, total.dtype) if totals is None else totals[index]
        piece(done.known)
        sums = [value_of(one, done.known) for one in self._sums]
        if totals is None:
            return sums
        return [
            now if not kinds else add_rows(before, now, kinds)
            for before, now, kinds in zip(totals, sums, self._kinds, strict=True)
        ]

    def _trace(self) -> None:
        """Trace forward and backward pass together, and keep the tensors of the traced graph by what they are."""
        flows = [flow.spec for flow in self._taken] + [flow.mask for flow in self._taken if flow.mask is not None]
        variables = [tf.TensorSpec(v.shape, v.dtype) for v in (*self.parameters, *self.states)]
        traced = tf.function(self._body, autograph=False).get_concrete_function(
            flows, variables, tf.TensorSpec([], tf.int64), tf.TensorSpec([None], keras.config.floatx())
        )
        self._graph = traced.graph

    def _body(self, flows: list[tf.Tensor], variables: list[tf.Tensor], microbatch: tf.Tensor, scale: tf.Tensor) -> Any:
        self._arguments = [*flows, *variables, microbatch, scale]
        self._flows, self._variables, self._microbatch, self._scale = flows, variables, microbatch, scale
        masks = iter(flows[len(self._taken) :])
        tensors: dict[model_graph.Value, Any] = {}
        for value, flow, tensor in zip(self.stage.inputs, self._taken, flows, strict=False):
            tensors[value] = _compat_pipeline.with_mask(tensor, next(masks) if flow.mask is not None else None)
        mapping = list(zip((*self.parameters, *self.states), variables, strict=True))
        with (
            tf.device(self.device),
            keras.StatelessScope(mapping, collect_losses=True) as scope,
            _compat.replica_seeds(lambda: microbatch),
        ):
            model_graph.run(self.stage.calls, tensors, self.training)
            new_states = [scope.get_current_value(variable) for variable in self.states]
            self._draws_from_stand_in = _compat_random.draws_from_no_layer(scope, self.states)
            self._check_parameters([scope.get_current_value(variable) for variable in self.parameters], variables)
        with tf.device(self.device):
            self._made = [tensors[value] for value in self.stage.outputs]
            self._masks = [_compat_pipeline.mask_of(tensor) for tensor in self._made]
            before = variables[len(self.parameters) :]
            self._new_states = [None if new is old else new for new, old in zip(new_states, before, strict=True)]
            # A layer may add one value for each example, which Keras sums.
            self._losses = [tf.reduce_sum(loss) for loss in scope.losses]
            self._differentiate()
        return [*tensors_of(self._made), *tensors_of(self._input_gradients), *tensors_of(self._sums)]

    def _check_parameters(self, after: Sequence[tf.Tensor], before: Sequence[tf.Tensor]) -> None:
        for variable, new, old in zip(self.parameters, after, before, strict=False):
            if new is not old:
                raise ValueError(
                    f"In a pipeline only the optimizer may change a trained weight, and a layer assigns "
                    f"{variable.path!r} while it is called (as SpectralNormalization does). Leave that layer out, or "
                    "train on SingleDevice()."
                )

    def _differentiate(self) -> None:
        """Add the backward pass to the graph that is being traced."""
        sources = [dense_part(t) for flow, t in zip(self._taken, self._flows, strict=False) if flow.needs_gradient]
        parameters = self._variables[: len(self.parameters)]
        self._upstream: list[tf.Tensor | None] = [None] * len(self._made)
        self._input_gradients: list[Any] = [None] * len(sources)
        self._weight_gradients: list[Any] = [None] * len(parameters)
        reached = _reached_from([*sources, *parameters]) if self.training else set()
        parts = list(map(dense_part, self._made))
        for index, (value, tensor) in enumerate(zip(self.stage.outputs, parts, strict=True)):
            if tensor.dtype.is_floating and tensor.op in reached and value not in self._dead:
                self._upstream[index] = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
        ends = [(t, up) for t, up in zip(parts, self._upstream, strict=True) if up is not None]
        ends += [
            (loss, tf.cast(self._scale[index], loss.dtype))
            for index, loss in enumerate(self._losses)
            if loss.op in reached
        ]
        if ends:
            found = tf.gradients([end for end, _ in ends], [*sources, *parameters], [up for _, up in ends])
            self._input_gradients = found[: len(sources)]
            self._weight_gradients = list(map(by_lookup, found[len(sources) :]))
        # A sum is added where its gradient still is in the processor's cache, and into its memory.
        self._totals = [
            tf.compat.v1.placeholder(one.dtype, one.shape) if isinstance(one, tf.Tensor) else None
            for one in self._weight_gradients
        ]
        self._sums = [
            one if total is None else total + one
            for one, total in zip(self._weight_gradients, self._totals, strict=True)
        ]


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def _reached_from(tensors: Sequence[tf.Tensor]) -> set[tf.Operation]:
    """Return the operations that some tensors have an influence on, their own included."""
    reached = {tensor.op for tensor in tensors}
    waiting = list(tensors)
    while waiting:
        for op in waiting.pop().consumers():
            if op not in reached:
                reached.add(op)
                waiting += op.outputs
    return reached


def _spec(tensor: Any) -> Any:
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        return tf.type_spec_from_value(tensor)
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)


def _value_of(tensor: Any, known: dict[Any, tf.Tensor]) -> Any:
    """Return a tensor of the traced graph, perhaps a ragged or sparse one, with its value."""
    return tf.nest.map_structure(lambda part: known[part.ref()], tensor, expand_composites=True)
