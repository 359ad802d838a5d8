"""The loss behind the last stage: its part over one micro-batch, and the gradient that goes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_losses, keras_model, keras_pipeline, random_state, tf_function
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.execution.row_gradients import add_rows, by_lookup, joined, known_kinds, numbered
from tfpar.pipeline.execution.stage_values import MaskedTensor, ValueSpec
from tfpar.reduction.gradient_addition import dense_part, plus, tensors_of
from tfpar.reduction.loss_decomposition import LossDecomposition


class LossPart(NamedTuple):
    """The loss of one micro-batch, as its part of the loss over the global batch.

    Args:
        value: Scalar.
        of_outputs: The same for single outputs, where Keras logs them.
        gradients: Of the outputs, `[examples, ...]` each; None for none.
        states: New values of the metrics that `compute_loss` itself counts.
        layer_states: New values of the states that it moves.
        weights: The gradients of the weights that it reads: a tensor, the rows of each lookup, or None for none.
    """

    value: tf.Tensor
    of_outputs: list[tf.Tensor]
    gradients: list[tf.Tensor | None]
    states: list[tf.Tensor]
    layer_states: list[tf.Tensor]
    weights: list[Any]


class LossProgram:
    """The compiled loss of a model, traced once for micro-batches of any size.

    A `compute_loss` of the user's own may read weights, and call layers: `parameters` are the weights that train, for
    which a gradient goes back too, `layer_states` what those layers, or Keras' global generator, keep and it moves.

    Args:
        model: A compiled model.
        division: How its losses divide over parts of a batch.
        outputs: Its outputs' structure, a `ValueSpec` in the place of each tensor.
        batch: The spec of a batch of any size, `(inputs, targets, sample_weight)` as far as given.
        device: Where it runs.
        training: Whether the model trains.
        states: Variables of metrics that `compute_loss` itself may count.
    """

    def __init__(
        self,
        model: keras.Model,
        division: LossDecomposition,
        outputs: Any,
        batch: Any,
        device: str,
        *,
        training: bool,
        states: Sequence[Any],
    ) -> None:
        self._model, self._division, self.device, self._training = model, division, device, training
        self._outputs = outputs
        self._flows: list[ValueSpec] = keras.tree.flatten(outputs)
        self._trackers = [variable for one in keras_pipeline.trackers_of_losses(model) for variable in one.variables]
        self.states = states
        self.layer_states: list[Any] = []
        self.parameters: list[Any] = []
        self.num_divisors = 0
        self._found: list[bool] = []
        self._counts: list[bool] = []
        with random_state.stand_in_generator():
            self._trace(batch)
        self.parameters = self._read()
        self.layer_states = [*self._moved, *([random_state.state_of_no_layer()] if self._draws_from_no_layer else [])]
        if self.parameters or self.layer_states:
            self._trace(batch)
        self.kinds = known_kinds(self._function.graph, self._of_weights, self._varying)

    def _trace(self, batch: Any) -> None:
        count, scalar = tf.TensorSpec([], tf.int64), tf.TensorSpec([], keras.config.floatx())
        specs = [batch, [flow.spec for flow in self._flows], [flow.mask for flow in self._flows]]
        for variables in (self.states, self.layer_states, self.parameters):
            specs.append([tf.TensorSpec(variable.shape, variable.dtype) for variable in variables])
        specs += [[count] * 4, tf.TensorSpec([None], tf.float64), scalar]
        self._function = keras_pipeline.noinline_function(self._body, *specs)

    @property
    def sends_back(self) -> list[bool]:
        """Whether it gives a gradient for each of the model's flat outputs."""
        found = iter(self._found)
        return [self._training and flow.needs_gradient and next(found) for flow in self._flows]

    def counted(self, states: Sequence[tf.Tensor]) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables that `compute_loss` counts, with what they hold then; others may change elsewhere."""
        pairs = zip(self.states, states, strict=True)
        return [pair for pair, counts in zip(pairs, self._counts, strict=True) if counts]

    @property
    def needs_divisors(self) -> bool:
        """Whether a divisor depends on masks or weights of the whole batch, so that `divisors` must be called."""
        return self.num_divisors > 0

    def part(
        self,
        number: int,
        microbatch: Microbatch,
        outputs: Sequence[MaskedTensor],
        states: Sequence[tf.Tensor],
        layer_states: Sequence[tf.Tensor],
        parameters: Sequence[tf.Tensor],
        divisors: tf.Tensor,
        scale: tf.Tensor,
    ) -> LossPart:
        """Return a micro-batch's part of the loss.

        Args:
            number: Of the micro-batch.
            microbatch: Its examples.
            outputs: The model's outputs for them.
            states: Values of `states`.
            layer_states: Values of `layer_states`.
            parameters: Values of `parameters`.
            divisors: What `divisors` returned for the global batch, or an empty tensor.
            scale: What one unit of loss counts in gradients, a scalar in Keras' float type.
        """
        given = [microbatch.batch, [one.tensor for one in outputs], [one.mask for one in outputs], list(states)]
        given += [list(layer_states), list(parameters)]
        counts = [tf.constant(number, tf.int64), microbatch.counted, microbatch.size, microbatch.num_examples]
        results = self._function(*given, counts, divisors, scale)
        value, of_outputs, gradients, new_states, new_layer_states, of_weights = results
        found = iter(gradients)
        every = [next(found) if sends else None for sends in self.sends_back]
        rows = list(map(numbered, of_weights, self.kinds))
        return LossPart(value, of_outputs, every, new_states, new_layer_states, rows)

    def sum_rows(self, before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
        """Add a micro-batch's gradients of `parameters` to those of the ones before; None for the first one."""
        return [
            add_rows(one, other, kinds) if one is not None and kinds else plus(one, other)
            for one, other, kinds in zip(before, now, self.kinds, strict=True)
        ]

    def joined(self, gradients: Sequence[Any]) -> list[Any]:
        """Return summed gradients of `parameters` as tensors, slices or None: each as one device has it."""
        return joined(gradients, self.kinds, self.parameters)

    def divisors(self, batch: Any, num_examples: tf.Tensor, call: Callable[[Any], Any]) -> tf.Tensor:
        """Return what the losses over a global batch are divided by, where masks or weights decide.

        Of the model only what masks need is run: TensorFlow leaves out the rest.

        Args:
            batch: The global batch.
            num_examples: Its size, an int64 scalar.
            call: Returns the model's outputs for its inputs, each with its mask.

        Returns:
            float64 `[divisors]`.
        """
        found: list[tf.Tensor] = []

        def note(weight: tf.Tensor) -> tf.Tensor:
            found.append(tf.cast(weight, tf.float64))
            return weight

        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        one = tf.ones((), keras.config.floatx())
        with keras.StatelessScope(), self._reduced(num_examples, one, num_examples, note), tf.device(self.device):
            self._value(inputs, targets, call(inputs), weights)
        return tf.stack(found)

    def _body(
        self, batch: Any, tensors: list[tf.Tensor], masks: list[Any], states: list[tf.Tensor],
        layer_states: list[tf.Tensor], parameters: list[tf.Tensor], counts: list[tf.Tensor], divisors: tf.Tensor,
        scale: tf.Tensor,
    ) -> Any:  # fmt: skip
        number, counted, size, num_examples = counts
        share = tf.cast(counted > 0, keras.config.floatx())
        outputs = [keras_pipeline.with_mask(one, mask) for one, mask in zip(tensors, masks, strict=True)]
        taken = 0

        def known(weight: tf.Tensor) -> tf.Tensor:
            nonlocal taken
            taken += 1
            return tf.cast(divisors[taken - 1], weight.dtype)

        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        mapping = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in self._trackers]
        variables = (*self.states, *self.layer_states, *self.parameters)
        mapping += zip(variables, (*states, *layer_states, *parameters), strict=True)
        with (
            tf.device(self.device),
            keras.StatelessScope(mapping) as scope,
            keras_model.replica_seeds(lambda: number),
            keras_losses.scalars_weighted(lambda _: counted / num_examples),
            tf_function.own_traces(),
            self._reduced(size, share, num_examples, known),
        ):
            packed = keras.tree.pack_sequence_as(self._outputs, outputs)
            value = self._value(inputs, targets, packed, weights)
            totals = [scope.get_current_value(variable) for variable in self._trackers]
            self._note_moved(scope)
            new_states = [scope.get_current_value(variable) for variable in self.states]
            self._counts = [new is not old for new, old in zip(new_states, states, strict=True)]
            new_layer_states = [scope.get_current_value(variable) for variable in self.layer_states]
            sources = [dense_part(one) for one, flow in zip(outputs, self._flows, strict=True) if flow.needs_gradient]
            gradients, of_weights = [], []
            if self._training:
                found = tf.gradients(value, [*sources, *parameters], tf.cast(scale, value.dtype))
                gradients, of_weights = found[: len(sources)], list(map(by_lookup, found[len(sources) :]))
        # A tracker's total is the loss times the number of examples, its count that number.
        of_outputs = [tf.math.divide_no_nan(*pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
        self.num_divisors = taken
        self._of_weights = of_weights
        self._varying = tensors_of([batch, tensors, masks, states, layer_states, number, counted, size])
        self._found = [gradient is not None for gradient in gradients]
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
        return value, of_outputs, dense, new_states, new_layer_states, of_weights

    def _value(self, inputs: Any, targets: Any, outputs: Any, weights: Any) -> tf.Tensor:
        """Return what Keras computes; zero where all losses are those that layers add."""
        if not keras_model.flat_losses(self._model) and not keras_model.overridden(self._model, "compute_loss"):
            return tf.zeros((), keras.config.floatx())
        value: tf.Tensor = keras_model.compute_loss(self._model, inputs, targets, outputs, weights, self._training)
        return value

    @contextlib.contextmanager
    def _reduced(
        self, size: tf.Tensor, share: tf.Tensor, num_examples: tf.Tensor, sum_divisors: Callable[[tf.Tensor], tf.Tensor]
    ) -> Iterator[None]:
        """Divide losses by what the global batch says; leave out what layers add and penalties, counted elsewhere."""
        with (
            self._division.reduce_globally(self._training, [size], share, num_examples, sum_divisors),
            keras_pipeline.without_added_losses(),
        ):
            yield

    def _note_moved(self, scope: keras.StatelessScope) -> None:
        """Note the states that the loss moves and that are no arguments yet."""
        known = {id(state) for state in (*self.states, *self.layer_states)}
        others = [state for state in self._model.non_trainable_variables if id(state) not in known]
        self._moved = [state for state in others if scope.get_current_value(state) is not None]
        self._draws_from_no_layer = random_state.draws_from_no_layer(scope, self.layer_states)

    def _read(self) -> list[keras.Variable]:
        """Return the weights that train and that the loss reads by itself."""
        handles = {id(outer) for outer, _ in self._function.graph.captures if outer.dtype == tf.resource}
        return [variable for variable in self._model.trainable_variables if id(variable.value.handle) in handles]
