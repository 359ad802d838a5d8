"""The loss of a micro-batch and its gradients, as one compiled function.

outputs of the last stage, targets, sample weights ─► contribution to the loss of the global batch ─► gradients
└─ metrics and layers of compute_loss ─► new states
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat.graphs import tf_function, tf_tapes
from tfpar._compat.models import keras_losses, keras_losses_in_call, keras_metrics, keras_model
from tfpar._compat.random_numbers import random_state
from tfpar._compat.variables import sharded_memory
from tfpar.pipeline.loss.output_functions import OutputFunction
from tfpar.pipeline.stages.refusals import refuse_python
from tfpar.pipeline.stages.sparse_rows import Kinds, rows_by_lookup
from tfpar.pipeline.stages.trace import trace_with_record
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.placement.weight_devices import follow_data
from tfpar.reduction.gradients.gradient_addition import dense_parts, tensors_of
from tfpar.reduction.gradients.row_numbers import Source, Sources
from tfpar.reduction.loss_reduction import LossReduction
from tfpar.reduction.vocabulary import gathered_classes


def last_stage_batch(model: keras.Model, batch: Any) -> Any:
    """Return a batch without the inputs, unless the model overrides `compute_loss` or `compute_metrics`.

    The result is sent to the device of the last stage.

    Args:
        model: A compiled model.
        batch: `(inputs, targets, sample_weight)`, the last two optional; tensors or specs.
    """
    if any(keras_model.overridden(model, method) for method in ("compute_loss", "compute_metrics")):
        return batch
    return (None, *batch[1:]) if isinstance(batch, tuple) else (None,)


class LossArguments(NamedTuple):
    """The arguments of the loss of a micro-batch: tensors, or their specs.

    Args:
        batch: The result of `last_stage_batch`.
        outputs: The flat outputs of the model; tuples for sharded outputs.
        masks: The Keras mask of each output, or None.
        metric_states: The values of metric variables.
        layer_states: The values of layer states.
        parameters: The values of the weights that the loss reads.
        number: The index of the micro-batch, an int64 scalar.
        num_counted: The number of its examples that count, an int64 scalar.
        size: The number of its examples, an int64 scalar.
        num_examples: The size of the global batch, an int64 scalar.
        divisors: The divisors of the losses over the global batch, float64 `[divisors]`.
        scale: The gradient with respect to the loss, a scalar in Keras' float type.
    """

    batch: Any
    outputs: Sequence[Any]
    masks: Sequence[Any]
    metric_states: Sequence[Any]
    layer_states: Sequence[Any]
    parameters: Sequence[Any]
    number: Any
    num_counted: Any
    size: Any
    num_examples: Any
    divisors: Any
    scale: Any


class LossResult(NamedTuple):
    """The contribution of one micro-batch to the loss of the global batch.

    Args:
        value: The contribution, a scalar.
        output_losses: The contribution to the loss of each output, if Keras logs them.
        gradients: The gradient of each output, `[examples, ...]`, sharded like the output; or None.
        metric_states: The new values of metric variables.
        layer_states: The new values of layer states.
        weight_gradients: The gradient of each parameter: a tensor, the rows of each lookup, or None.
    """

    value: tf.Tensor
    output_losses: list[tf.Tensor]
    gradients: list[Any]
    metric_states: list[tf.Tensor]
    layer_states: list[tf.Tensor]
    weight_gradients: list[Any]

    def not_counted(self, states: Sequence[tf.Tensor]) -> LossResult:
        """Keep only the gradients of the outputs, because another worker counts everything else.

        Args:
            states: The previous values of metric variables.
        """
        value, output_losses, weight_gradients = tf.nest.map_structure(
            lambda tensor: tf.zeros_like(tensor) if tensor is not None and tensor.dtype.is_floating else tensor,
            (self.value, self.output_losses, self.weight_gradients),
            expand_composites=True,
        )
        return self._replace(
            value=value, output_losses=output_losses, metric_states=list(states), weight_gradients=weight_gradients
        )


class _Trace(NamedTuple):
    """Properties of the traced loss.

    Args:
        num_divisors: Number of losses whose divisor depends on masks or weights of the whole batch.
        has_gradient: Whether the loss depends on each output.
        updates_metric: Whether the loss changes each of `metric_states`.
        unlisted_states: States that the loss changes and that are not arguments.
        uses_global_generator: Whether the loss uses Keras' global generator, whose state is not an argument.
        weight_gradients: The gradients of the parameters, as tensors of the graph.
        kinds: The kind of each lookup in each parameter.
    """

    num_divisors: int
    has_gradient: list[bool]
    updates_metric: list[bool]
    unlisted_states: list[keras.Variable]
    uses_global_generator: bool
    weight_gradients: Sequence[Any]
    kinds: Kinds


class MicrobatchLoss:
    """The compiled loss of a model, for micro-batches of any size.

    Weight regularizers and losses that layers add are computed elsewhere. An overridden `compute_loss` may read weights
    and call layers. The result then includes gradients of these weights, and new states of the layers.

    Args:
        model: A compiled model.
        reduction: The reduction of losses over micro-batches.
        training: Whether the model is trained.
        devices: The device of each shard of the outputs. The first computes the loss.
        outputs: The structure of the model's outputs, with a `ValueSpec` for each tensor.
        batch: The spec of the result of `last_stage_batch`, for any batch size.
        metric_states: Metric variables that `compute_loss` may update.

    Attributes:
        layer_states: The states that the loss changes.
        parameters: The trained weights that the loss reads.

    Raises:
        ValueError: If the loss calls a Python function on another worker.
    """

    def __init__(
        self,
        model: keras.Model,
        reduction: LossReduction,
        training: bool,
        devices: Sequence[str],
        outputs: Any,
        batch: Any,
        metric_states: Sequence[keras.Variable],
    ) -> None:
        self.model, self.devices, self.metric_states = model, devices, metric_states
        self.layer_states: Sequence[keras.Variable] = []
        self.parameters: Sequence[keras.Variable] = []
        self._reduction, self._training, self._outputs = reduction, training, outputs
        self._specs: list[ValueSpec] = keras.tree.flatten(outputs)
        with random_state.stand_in_generator():
            function, trace = self._traced(batch)
        self.layer_states = [*trace.unlisted_states]
        if trace.uses_global_generator:
            self.layer_states += [random_state.state_of_no_layer()]
        self.parameters = _captured_weights(model, function)
        if self.parameters or self.layer_states:
            function, trace = self._traced(batch)
        refuse_python(function.graph, devices, "The loss")
        self._function, self._trace = OutputFunction(function, outputs, devices), trace

    def __call__(self, arguments: LossArguments) -> LossResult:
        """Return the loss of a micro-batch."""
        return LossResult(*self._function(*arguments))

    @property
    def device(self) -> str:
        """The device that computes the loss."""
        return self.devices[0]

    @property
    def kinds(self) -> Kinds:
        """The kind of each lookup in each of `parameters`."""
        return self._trace.kinds

    @property
    def traced_weight_gradients(self) -> Sequence[Any]:
        """The gradient of each of `parameters`, as tensors of the traced graph."""
        return self._trace.weight_gradients

    @property
    def num_divisors(self) -> int:
        """The number of losses whose divisor depends on masks or weights of the whole batch."""
        return self._trace.num_divisors

    @property
    def has_output_gradients(self) -> Sequence[bool]:
        """Whether there is a gradient of each flat output of the model."""
        return self._trace.has_gradient

    def updated_metrics(self, states: Sequence[tf.Tensor]) -> list[tuple[Any, tf.Tensor]]:
        """Return those of `metric_states` that the loss updates, with their values. Layers may change others."""
        pairs = zip(self.metric_states, states, strict=True)
        return [pair for pair, updates in zip(pairs, self._trace.updates_metric, strict=True) if updates]

    def divisors(self, batch: Any, num_examples: tf.Tensor, call: Callable[[Any], Any]) -> tf.Tensor:
        """Return the divisors of the losses over a global batch that depend on masks or weights.

        This calls the model on the batch, but TensorFlow prunes the operations that the masks do not depend on.

        Args:
            batch: The global batch.
            num_examples: Its size, an int64 scalar.
            call: Returns the outputs of the model for its inputs, with their masks.

        Returns:
            float64 `[divisors]`.
        """
        divisors: list[tf.Tensor] = []

        def collect(divisor: tf.Tensor) -> tf.Tensor:
            divisors.append(tf.cast(divisor, tf.float64))
            return divisor

        weight = tf.ones((), keras.config.floatx())
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with keras.StatelessScope(), self._reduced(num_examples, weight, num_examples, collect), tf.device(self.device):
            self._value(batch, call(inputs))
        return tf.stack(divisors)

    def _value(self, batch: Any, outputs: Any) -> tf.Tensor:
        """Return the loss, a scalar; zero if the model has only losses that layers add."""
        if not keras_losses.flat_losses(self.model) and not keras_model.overridden(self.model, "compute_loss"):
            return tf.zeros((), keras.config.floatx())
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        value: tf.Tensor = keras_model.compute_loss(self.model, inputs, targets, outputs, weights, self._training)
        return value

    @contextlib.contextmanager
    def _reduced(
        self,
        size: tf.Tensor,
        example_weight: tf.Tensor,
        num_examples: tf.Tensor,
        sum_divisors: Callable[[tf.Tensor], tf.Tensor],
    ) -> Iterator[None]:
        """Reduce losses inside this context to their contribution to the loss of the global batch.

        Args:
            size: The size of the micro-batch, an int64 scalar.
            example_weight: The weight of its examples: 1, or 0 for a repeated example.
            num_examples: The size of the global batch, an int64 scalar.
            sum_divisors: Returns the divisor over the global batch, given that of the micro-batch.
        """
        with (
            self._reduction.reduce_globally(self._training, [size], example_weight, num_examples, sum_divisors),
            keras_losses.without_added_losses(),
        ):
            yield

    def _traced(self, batch: Any) -> tuple[Any, _Trace]:
        """Return the concrete function from `LossArguments` to `LossResult`, and the record of its trace."""
        count, scalar = tf.TensorSpec([], tf.int64), tf.TensorSpec([], keras.config.floatx())
        specs = LossArguments(
            batch,
            outputs=[spec.spec for spec in self._specs],
            masks=[spec.mask for spec in self._specs],
            metric_states=_specs_of(self.metric_states),
            layer_states=_specs_of(self.layer_states),
            parameters=_specs_of(self.parameters),
            number=count,
            num_counted=count,
            size=count,
            num_examples=count,
            divisors=tf.TensorSpec([None], tf.float64),
            scale=scalar,
        )
        return trace_with_record(tf_function.noinline_function, self._body, *specs)

    def _body(self, *tensors: Any) -> tuple[LossResult, _Trace]:
        with host_sizes.sizes_on_host():
            return self._computed(LossArguments(*tensors))

    def _computed(self, arguments: LossArguments) -> tuple[LossResult, _Trace]:
        example_weight = tf.cast(arguments.num_counted > 0, keras.config.floatx())
        sent = zip(self._specs, arguments.outputs, arguments.masks, strict=True)
        with tf.device(self.device):
            outputs = [spec.received(tensor, mask, self.devices) for spec, tensor, mask in sent]
        divisors: list[tf.Tensor] = []

        def next_divisor(local: tf.Tensor) -> tf.Tensor:
            divisors.append(tf.cast(arguments.divisors[len(divisors)], local.dtype))
            return divisors[-1]

        trackers = [state for tracker in keras_metrics.trackers_of_losses(self.model) for state in tracker.variables]
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in trackers]
        parameters = list(zip(self.parameters, arguments.parameters, strict=True))
        shards = [pair for pair in parameters if sharded_memory.shard_of(pair[0]) is not None]
        whole = [pair for pair in parameters if sharded_memory.shard_of(pair[0]) is None]
        variables = (*trackers, *self.metric_states, *self.layer_states)
        values = (*zeros, *arguments.metric_states, *arguments.layer_states)
        with (
            tf.device(self.device),
            sharded_memory.with_values(shards),
            tf_tapes.replaced([*zip(variables, values, strict=True), *whole]) as scope,
            random_state.replica_seeds(lambda: arguments.number),
            keras_losses_in_call.scalars_weighted(lambda _: _fraction(arguments)),
            tf_function.own_traces(),
            self._reduced(arguments.size, example_weight, arguments.num_examples, next_divisor),
            gathered_classes.reading_shards(),
        ):
            value = self._value(arguments.batch, keras.tree.pack_sequence_as(self._outputs, outputs))
            totals, metric_states, layer_states = (
                [scope.get_current_value(variable) for variable in states]
                for states in (trackers, self.metric_states, self.layer_states)
            )
            gradients, parameter_gradients = self._gradients(value, arguments)
        weight_gradients, kinds = rows_by_lookup(
            parameter_gradients, self.parameters[: len(parameter_gradients)], self._sources(arguments)
        )
        states = zip(metric_states, arguments.metric_states, strict=True)
        trace = _Trace(
            len(divisors),
            [gradient is not None for gradient in gradients],
            [new is not old for new, old in states],
            self._unlisted_states(scope),
            random_state.draws_from_no_layer(scope, self.layer_states),
            weight_gradients,
            kinds,
        )
        output_losses = self._logged(totals, arguments)
        return LossResult(value, output_losses, gradients, metric_states, layer_states, list(weight_gradients)), trace

    def _gradients(self, value: tf.Tensor, arguments: LossArguments) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the outputs and of the parameters; none in inference."""
        if not self._training:
            return [None] * len(self._specs), []
        pairs = list(zip(self._specs, arguments.outputs, strict=True))
        sources = [dense_parts(output) if spec.needs_gradient else [] for spec, output in pairs]
        flat = [tensor for shards in sources for tensor in shards]
        is_sharded = any(spec.is_sharded for spec in self._specs)
        with follow_data() if is_sharded else contextlib.nullcontext():
            scale = tf.cast(arguments.scale, value.dtype)
            gradients = tf.gradients(value, [*flat, *arguments.parameters], scale)
        in_order = iter(gradients[: len(flat)])
        return [_gradient(shards, in_order) for shards in sources], gradients[len(flat) :]

    def _logged(self, totals: Sequence[tf.Tensor], arguments: LossArguments) -> list[tf.Tensor]:
        """Return the loss of each output from the total and the count of its tracker."""
        logged = [tf.math.divide_no_nan(*pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
        if self._reduction.is_own(self._training):  # a mean over the micro-batch, not a contribution
            return [loss * tf.cast(_fraction(arguments), loss.dtype) for loss in logged]
        return logged

    def _sources(self, arguments: LossArguments) -> Sources:
        """Return what the arguments depend on. States may differ between micro-batches."""
        pairs = zip(self._specs, arguments.outputs, strict=True)
        known = {tensor.ref(): spec.source for spec, output in pairs for tensor in tensors_of(output)}
        states = (*arguments.metric_states, *arguments.layer_states)
        known |= {tensor.ref(): Source.POSITIONS for tensor in states}
        return Sources(known | {tensor.ref(): Source.CONSTANT for tensor in arguments.parameters})

    def _unlisted_states(self, scope: keras.StatelessScope) -> list[keras.Variable]:
        known = {id(state) for state in (*self.metric_states, *self.layer_states)}
        others = [state for state in self.model.non_trainable_variables if id(state) not in known]
        return [state for state in others if scope.get_current_value(state) is not None]


def _specs_of(variables: Sequence[Any]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]


def _fraction(arguments: LossArguments) -> tf.Tensor:
    """Return the fraction of the global batch in the micro-batch, a float64 scalar."""
    return arguments.num_counted / arguments.num_examples


def _gradient(shards: Sequence[tf.Tensor], gradients: Iterator[Any]) -> Any:
    """Return the gradient of the next output, or None; a tuple for several shards."""
    shard_gradients = [next(gradients) for _ in shards]
    if all(gradient is None for gradient in shard_gradients):
        return None
    dense = []
    for shard, gradient in zip(shards, shard_gradients, strict=True):
        with tf.device(shard.device):
            dense.append(tf.zeros_like(shard) if gradient is None else tf.convert_to_tensor(gradient))
    return tuple(dense) if len(dense) > 1 else dense[0]


def _captured_weights(model: keras.Model, function: Any) -> list[Any]:
    """Return the trained weights, or shards, that a function captures instead of taking them as arguments."""
    handles = {id(outer) for outer, _ in function.graph.captures if outer.dtype == tf.resource}
    return [
        shard
        for variable in model.trainable_variables
        for shard in sharded_memory.shards_of(variable)
        if any(id(handle) in handles for handle in sharded_memory.handles_of(variable))
    ]
