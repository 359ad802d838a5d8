"""A stage as compiled functions: its forward pass, its backward pass, and what travels in and out of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_losses, keras_model, keras_pipeline, random_state
from tfpar.pipeline.execution.row_gradients import add_rows, by_lookup, joined, known_kinds, numbered
from tfpar.pipeline.execution.saved_tensors import SavedBytes, kept_between
from tfpar.pipeline.execution.stage_values import Forward, MaskedTensor, Place, ValueSpec, spec_of_made
from tfpar.pipeline.execution.subgraphs import extract_subgraphs
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.partition.stages import Stage
from tfpar.reduction.gradient_addition import dense_part, reached_from, tensors_of, value_of
from tfpar.reduction.losses_in_call import Way, in_part


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
        unused_outputs: Values that it makes and that no loss depends on, so that no gradient comes back for them.
        ways: What the losses that its layers compute need of the whole batch, in their order; may go on with others'.

    Raises:
        ValueError: If a layer changes a weight while it is called, or makes of a loss what depends on examples.
    """

    def __init__(
        self,
        stage: Stage,
        taken: Sequence[ValueSpec],
        device: str,
        *,
        training: bool,
        recompute: bool = False,
        splits_backward: bool = False,
        jit_compile: bool = False,
        model_variables: Sequence[keras.Variable] = (),
        unused_outputs: frozenset[model_graph.Value] = frozenset(),
        ways: Sequence[Way] = (),
    ) -> None:
        self.stage, self.device, self.training = stage, device, training
        self._taken, self._unused_outputs, self.ways = taken, unused_outputs, ways
        layers = [call.operation for call in stage.calls if isinstance(call.operation, keras.Layer)]
        counters = [variable for layer in layers for variable in keras_pipeline.metric_states(layer)]
        self.counters = set(map(id, counters))
        self._find_variables([*stage.variables, *counters, *random_state.states_of_no_layer()])
        with random_state.stand_in_generator():
            self._trace()
        unseen = self._read_unseen(model_variables)
        if unseen:  # a Lambda may read the weight of a layer that is not its own
            self._find_variables([*self.parameters, *self.states, *unseen])
            self._trace()
        results = [tensors_of([self._made, self._masks, self._new_states, self._losses])]
        if training:
            both = [tensors_of(self._input_gradients), tensors_of(self._sums)]
            results += both if splits_backward else [[*both[0], *both[1]]]
        self.kinds = known_kinds(self._graph, self._weight_gradients, tensors_of([self._flows, self._place]))
        inputs = tensors_of([self._arguments, self._upstream, self._totals])
        sums = [one for one, total in zip(self._sums, self._totals, strict=True) if total is not None]
        pieces: list[Any] = extract_subgraphs(
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
        return [*unseen, random_state.state_of_no_layer()] if self._draws_from_stand_in else unseen

    def joined(self, gradients: Sequence[Any]) -> list[Any]:
        """Return summed gradients of `parameters` as tensors, slices or None: each as one device has it."""
        return joined(gradients, self.kinds, self.parameters)

    @property
    def sends(self) -> list[ValueSpec]:
        """What is known of the values that it makes, in the order of `stage.outputs`."""
        return [
            ValueSpec(spec_of_made(made), spec_of_made(mask), upstream is not None)
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

    def kept(self, microbatch_size: int) -> SavedBytes:
        """Return what a micro-batch keeps on this stage, in bytes.

        Args:
            microbatch_size: Its examples.
        """
        forward, later = self._forward, [self._backward, *([self._weights] if self._weights else [])]
        return kept_between(
            [*tensors_of(self._flows), *forward.gives], later, tensors_of(self._upstream), microbatch_size
        )

    def forward(
        self, values: Sequence[MaskedTensor], variables: Sequence[tf.Tensor], place: Place, scale: Any
    ) -> Forward:
        """Run the forward pass on one micro-batch.

        Args:
            values: What it takes, `[examples, ...]` each.
            variables: Those of `parameters` and then those of `states`.
            place: What the micro-batch is in its batch.
            scale: What one unit of each loss that its layers add counts in gradients, `[losses]` in Keras' float type.
        """
        masks = [value.mask for value, flow in zip(values, self._taken, strict=True) if flow.mask is not None]
        given = [*(value.tensor for value in values), *masks, *variables, place, scale]
        pairs = zip(tensors_of(self._arguments), tensors_of(given), strict=True)
        known = {tensor.ref(): value for tensor, value in pairs}
        self._forward(known)
        made = [
            MaskedTensor(_value_of(tensor, known), None if mask is None else known[mask.ref()])
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
        sums = [numbered(value_of(one, done.known), kinds) for one, kinds in zip(self._sums, self.kinds, strict=True)]
        if totals is None:
            return sums
        return [
            now if not kinds else add_rows(before, now, kinds)
            for before, now, kinds in zip(totals, sums, self.kinds, strict=True)
        ]

    def _trace(self) -> None:
        """Trace forward and backward pass together, and keep the tensors of the traced graph by what they are."""
        flows = [flow.spec for flow in self._taken] + [flow.mask for flow in self._taken if flow.mask is not None]
        variables = [tf.TensorSpec(v.shape, v.dtype) for v in (*self.parameters, *self.states)]
        place = Place(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64), tf.TensorSpec([None, 2], tf.float64))
        traced = tf.function(self._body, autograph=False).get_concrete_function(
            flows, variables, place, tf.TensorSpec([None], keras.config.floatx())
        )
        self._graph = traced.graph

    def _body(self, flows: list[tf.Tensor], variables: list[tf.Tensor], place: Place, scale: tf.Tensor) -> Any:
        self._arguments = [*flows, *variables, place, scale]
        self._flows, self._variables, self._place, self._scale = flows, variables, place, scale
        masks = iter(flows[len(self._taken) :])
        tensors: dict[model_graph.Value, Any] = {}
        for value, flow, tensor in zip(self.stage.inputs, self._taken, flows, strict=False):
            tensors[value] = keras_pipeline.with_mask(tensor, next(masks) if flow.mask is not None else None)
        mapping = list(zip((*self.parameters, *self.states), variables, strict=True))
        with (
            tf.device(self.device),
            keras.StatelessScope(mapping, collect_losses=True) as scope,
            keras_model.replica_seeds(lambda: place.number),
            # A scalar that a layer counts stands for the whole batch, and each micro-batch counts one.
            keras_losses.scalars_weighted(lambda _: place.part),
            in_part(self.ways, place.sums, place.part) as in_call,
        ):
            model_graph.run(self.stage.calls, tensors, self.training)
            new_states = [scope.get_current_value(variable) for variable in self.states]
            self._draws_from_stand_in = random_state.draws_from_no_layer(scope, self.states)
            self._check_parameters([scope.get_current_value(variable) for variable in self.parameters], variables)
        with tf.device(self.device):
            self._made = [tensors[value] for value in self.stage.outputs]
            self._masks = [keras_pipeline.mask_of(tensor) for tensor in self._made]
            before = variables[len(self.parameters) :]
            self._new_states = [None if new is old else new for new, old in zip(new_states, before, strict=True)]
            # A layer may add one value for each example, which Keras sums.
            self._losses = [tf.reduce_sum(loss) for loss in scope.losses]
            self.ways = tuple(way for way, _ in in_call)
            self._check_losses_in_call([loss for way, loss in in_call if way == "whole"])
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

    def _check_losses_in_call(self, whole: Sequence[tf.Tensor]) -> None:
        """Refuse what is made of a loss of the whole batch with examples, which each micro-batch has others of."""
        if not whole or not self.training:
            return
        later = reached_from(whole)
        if any(dense_part(made).op in later for made in self._made):
            raise ValueError(
                "In a pipeline a loss object's value of which more is made than a multiple, or whose weights are "
                f"trained, must be used in the stage that computes it, and stage {self.stage.index} sends it on. "
                "Choose other cuts with balance, or train on SingleDevice() or Mirrored()."
            )
        gradients = tf.gradients(self._losses, list(whole)) if self._losses else []
        varying = reached_from(self._flows, stop=[loss.op for loss in whole])
        for gradient in gradients:
            if gradient is not None and gradient.op in varying:
                raise ValueError(
                    "In a pipeline a layer may add a loss object's value, or a function of it, but not its product "
                    f"with something else of the examples, as a layer of stage {self.stage.index} does. Add both as "
                    "losses of their own, or train on SingleDevice() or Mirrored()."
                )

    def _differentiate(self) -> None:
        """Add the backward pass to the graph that is being traced."""
        sources = [dense_part(t) for flow, t in zip(self._taken, self._flows, strict=False) if flow.needs_gradient]
        parameters = self._variables[: len(self.parameters)]
        self._upstream: list[tf.Tensor | None] = [None] * len(self._made)
        self._input_gradients: list[Any] = [None] * len(sources)
        self._weight_gradients: list[Any] = [None] * len(parameters)
        reached = reached_from([*sources, *parameters]) if self.training else set()
        parts = list(map(dense_part, self._made))
        for index, (value, tensor) in enumerate(zip(self.stage.outputs, parts, strict=True)):
            if tensor.dtype.is_floating and tensor.op in reached and value not in self._unused_outputs:
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


def _value_of(tensor: Any, known: dict[Any, tf.Tensor]) -> Any:
    """Return a tensor of the traced graph, perhaps a ragged or sparse one, with its value."""
    return tf.nest.map_structure(lambda part: known[part.ref()], tensor, expand_composites=True)
