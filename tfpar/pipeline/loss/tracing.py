"""The loss of one micro-batch and its gradients, traced as one TensorFlow graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat import (
    keras_losses_in_call,
    keras_metrics,
    random_state,
    tf_function,
    tf_tapes,
)
from tfpar.pipeline.loss.model_loss import ModelLoss
from tfpar.pipeline.partition.placement import follow_data
from tfpar.pipeline.stages.sparse_rows import Kinds, by_lookups
from tfpar.pipeline.stages.trace import trace_with_record
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.reduction import gathered_classes
from tfpar.reduction.gradient_addition import dense_parts, tensors_of
from tfpar.reduction.row_numbers import Source, Sources


@dataclasses.dataclass(frozen=True)
class LossVariables:
    """The variables whose values are arguments of the loss.

    Args:
        metric_states: Variables of metrics that `compute_loss` may update.
        layer_states: States that it changes: those of layers that it calls, and of Keras' global generator.
        parameters: Trained weights that it reads.
    """

    metric_states: tuple[Any, ...]
    layer_states: tuple[Any, ...] = ()
    parameters: tuple[Any, ...] = ()


class LossArguments(NamedTuple):
    """The arguments of the compiled loss: tensors, or their specs.

    Args:
        batch: The examples, `(inputs, targets, sample_weight)` as `taken_after_stages` returns them.
        outputs: The flat outputs of the model, some as a tuple of pieces.
        masks: The Keras mask of each output; None for none.
        metric_states: The values of the metrics' variables.
        layer_states: The values of the layers' states.
        parameters: The values of the parameters.
        number: The index of the micro-batch, an int64 scalar.
        num_counted: Its number of examples without padding, an int64 scalar.
        size: Its number of examples, an int64 scalar.
        num_examples: That of the global batch, an int64 scalar.
        divisors: The divisors of the global batch, float64 `[divisors]`.
        scale: The gradient of one unit of loss, a scalar in Keras' float type.
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


class LossResults(NamedTuple):
    """The results of the compiled loss: tensors.

    Args:
        value: The part of the micro-batch of the global loss, a scalar.
        of_outputs: The same for single outputs, where Keras logs them.
        gradients: Those of the outputs that have one, `[examples, ...]` each, in pieces as the outputs are.
        metric_states: The new values of the metrics' variables.
        layer_states: The new values of the layers' states.
        weight_gradients: Those of the parameters: a tensor, the rows of each lookup, or None for none.
    """

    value: tf.Tensor
    of_outputs: list[tf.Tensor]
    gradients: list[Any]
    metric_states: list[tf.Tensor]
    layer_states: list[tf.Tensor]
    weight_gradients: list[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class LossTrace:
    """The record of a traced loss.

    Args:
        num_divisors: The number of losses whose divisor depends on masks or weights of the whole batch.
        has_gradient: Whether the loss depends on each output.
        updates_metric: Whether the loss changes each variable of `metric_states`.
        unlisted_states: States that the loss changes and that are not arguments.
        uses_global_generator: Whether it draws from Keras' global generator, whose state is not an argument.
        weight_gradients: Those of the parameters, as tensors of the graph.
        kinds: The kind of each lookup of each of them.
    """

    num_divisors: int
    has_gradient: tuple[bool, ...]
    updates_metric: tuple[bool, ...]
    unlisted_states: tuple[Any, ...]
    uses_global_generator: bool
    weight_gradients: tuple[Any, ...]
    kinds: Kinds


def trace_loss(loss: ModelLoss, outputs: Any, batch: Any, variables: LossVariables) -> tuple[Any, LossTrace]:
    """Trace the loss of a micro-batch and, for training, its gradients.

    Args:
        loss: The loss of the model.
        outputs: The structure of the model's outputs, with a `ValueSpec` for each tensor.
        batch: The spec of what `taken_after_stages` returns of a batch of any size.
        variables: The variables whose values are arguments.

    Returns:
        The concrete function of `LossArguments` to `LossResults`, and the record of the trace.
    """
    flows: list[ValueSpec] = keras.tree.flatten(outputs)

    def body(*given: Any) -> Any:
        with host_sizes.sizes_on_host():
            return _body(loss, outputs, flows, variables, LossArguments(*given))

    count, scalar = tf.TensorSpec([], tf.int64), tf.TensorSpec([], keras.config.floatx())
    specs = LossArguments(
        batch,
        outputs=[one.spec for one in flows],
        masks=[one.mask for one in flows],
        metric_states=_specs(variables.metric_states),
        layer_states=_specs(variables.layer_states),
        parameters=_specs(variables.parameters),
        number=count,
        num_counted=count,
        size=count,
        num_examples=count,
        divisors=tf.TensorSpec([None], tf.float64),
        scale=scalar,
    )
    return trace_with_record(tf_function.noinline_function, body, *specs)


def _specs(variables: Sequence[Any]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]


def _body(
    loss: ModelLoss, outputs: Any, flows: Sequence[ValueSpec], variables: LossVariables, given: LossArguments
) -> tuple[LossResults, LossTrace]:
    example_weight = tf.cast(given.num_counted > 0, keras.config.floatx())
    received = zip(flows, given.outputs, given.masks, strict=True)
    with tf.device(loss.device):
        tensors = [flow.received(one, mask, loss.devices) for flow, one, mask in received]
    divisors: list[tf.Tensor] = []

    def known(weight: tf.Tensor) -> tf.Tensor:
        divisors.append(tf.cast(given.divisors[len(divisors)], weight.dtype))
        return divisors[-1]

    trackers = [variable for one in keras_metrics.trackers_of_losses(loss.model) for variable in one.variables]
    mapping = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in trackers]
    arguments = (*variables.metric_states, *variables.layer_states, *variables.parameters)
    mapping += zip(arguments, (*given.metric_states, *given.layer_states, *given.parameters), strict=True)
    with (
        tf.device(loss.device),
        tf_tapes.replaced(mapping) as scope,
        random_state.replica_seeds(lambda: given.number),
        keras_losses_in_call.scalars_weighted(lambda _: given.num_counted / given.num_examples),
        tf_function.own_traces(),
        loss.reduced(given.size, example_weight, given.num_examples, known),
        gathered_classes.read_in_pieces(),
    ):
        value = loss.value(given.batch, keras.tree.pack_sequence_as(outputs, tensors))
        totals, metric_states, layer_states = (
            [scope.get_current_value(variable) for variable in some]
            for some in (trackers, variables.metric_states, variables.layer_states)
        )
        sources = [
            dense_parts(one) if flow.needs_gradient else [] for one, flow in zip(given.outputs, flows, strict=True)
        ]
        flat = [part for parts in sources for part in parts]
        found: list[Any] = []
        if loss.training:
            with follow_data() if any(flow.is_sharded for flow in flows) else contextlib.nullcontext():
                found = tf.gradients(value, [*flat, *given.parameters], tf.cast(given.scale, value.dtype))
    in_order, of_parameters = iter(found[: len(flat)]), found[len(flat) :]  # none in inference
    of_weights, kinds = by_lookups(of_parameters, variables.parameters[: len(of_parameters)], _sources(flows, given))
    of_outputs = [
        _gradient(parts, flow, in_order) if loss.training else None for parts, flow in zip(sources, flows, strict=True)
    ]
    has_gradient = tuple(gradient is not None for gradient in of_outputs)
    trace = LossTrace(
        len(divisors),
        has_gradient,
        tuple(new is not old for new, old in zip(metric_states, given.metric_states, strict=True)),
        _unlisted_states(loss.model, variables, scope),
        random_state.draws_from_no_layer(scope, variables.layer_states),
        of_weights,
        kinds,
    )
    # The total of a tracker is the loss times the number of examples, its count that number.
    logged = [tf.math.divide_no_nan(*pair) for pair in zip(totals[::2], totals[1::2], strict=True)]
    if loss.reduction.is_own(loss.training):  # then it is the mean of the micro-batch
        logged = [one * tf.cast(given.num_counted / given.num_examples, one.dtype) for one in logged]
    dense = [gradient for gradient in of_outputs if gradient is not None]
    return LossResults(value, logged, dense, metric_states, layer_states, list(of_weights)), trace


def _sources(flows: Sequence[ValueSpec], given: LossArguments) -> Sources:
    """Return what the arguments of the loss depend on; a state may differ between micro-batches."""
    pairs = zip(flows, given.outputs, strict=True)
    known = {one.ref(): flow.source for flow, output in pairs for one in tensors_of(output)}
    known |= {one.ref(): Source.POSITIONS for one in (*given.metric_states, *given.layer_states)}
    return Sources(known | {one.ref(): Source.CONSTANT for one in given.parameters})


def _gradient(parts: Sequence[tf.Tensor], flow: ValueSpec, found: Iterator[Any]) -> Any:
    """Return the next gradient, that of all pieces as a tuple; None for none."""
    gradients = [next(found) for _ in parts]
    if all(gradient is None for gradient in gradients):
        return None
    dense = []
    for part, gradient in zip(parts, gradients, strict=True):
        with tf.device(part.device):
            dense.append(tf.zeros_like(part) if gradient is None else tf.convert_to_tensor(gradient))
    return tuple(dense) if flow.is_sharded else dense[0]


def _unlisted_states(
    model: keras.Model, variables: LossVariables, scope: keras.StatelessScope
) -> tuple[keras.Variable, ...]:
    known = {id(state) for state in (*variables.metric_states, *variables.layer_states)}
    others = [state for state in model.non_trainable_variables if id(state) not in known]
    return tuple(state for state in others if scope.get_current_value(state) is not None)
