"""The compiled loss of a model: the part of one micro-batch, and its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import random_state, tf_divided_memory
from tfpar.pipeline.loss.model_loss import ModelLoss
from tfpar.pipeline.loss.output_functions import OutputFunction
from tfpar.pipeline.loss.tracing import LossArguments, LossResults, LossTrace, LossVariables, trace_loss
from tfpar.pipeline.stages.refusals import refuse_divided, refuse_python
from tfpar.pipeline.stages.sparse_rows import Kinds


class LossPart(NamedTuple):
    """The loss of one micro-batch, as its part of the loss over the global batch.

    Args:
        value: Scalar.
        of_outputs: The same for single outputs, where Keras logs them.
        gradients: Those of the outputs, `[examples, ...]` each, in pieces as the outputs are; None for none.
        states: The new values of the metrics that `compute_loss` itself updates.
        layer_states: The new values of the states that it changes.
        weights: The gradients of the weights that it reads: a tensor, the rows of each lookup, or None for none.
    """

    value: tf.Tensor
    of_outputs: list[tf.Tensor]
    gradients: list[Any]
    states: list[tf.Tensor]
    layer_states: list[tf.Tensor]
    weights: list[Any]

    def not_counted(self, states: Sequence[tf.Tensor]) -> LossPart:
        """Return the gradients of the outputs alone, where another worker counts all else.

        Args:
            states: The values before of the metrics.
        """
        value, of_outputs, weights = tf.nest.map_structure(
            lambda tensor: tf.zeros_like(tensor) if tensor is not None and tensor.dtype.is_floating else tensor,
            (self.value, self.of_outputs, self.weights),
            expand_composites=True,
        )
        return self._replace(value=value, of_outputs=of_outputs, states=list(states), weights=weights)


@dataclasses.dataclass(frozen=True, eq=False)
class LossProgram:
    """The compiled loss of a model, for micro-batches of any size.

    A user's own `compute_loss` may read weights and call layers: the program has gradients of these weights, and
    returns the new states of these layers and of Keras' global generator.

    Args:
        loss: The loss of the model.
        variables: The variables whose values are arguments.
        trace: The record of the trace.
        function: The compiled function of `LossArguments` to `LossResults`.
    """

    loss: ModelLoss
    variables: LossVariables
    trace: LossTrace
    function: OutputFunction

    @property
    def devices(self) -> Sequence[str]:
        """The device that runs it; then those of the pieces of outputs that are not on it."""
        return self.loss.devices

    @property
    def device(self) -> str:
        """The device that runs it, of several the first."""
        return self.loss.device

    @property
    def states(self) -> Sequence[Any]:
        """Variables of metrics that `compute_loss` itself may update."""
        return self.variables.metric_states

    @property
    def layer_states(self) -> Sequence[Any]:
        """States that it changes."""
        return self.variables.layer_states

    @property
    def parameters(self) -> Sequence[Any]:
        """Trained weights that it reads."""
        return self.variables.parameters

    @property
    def kinds(self) -> Kinds:
        """The kind of each lookup of each of `parameters`."""
        return self.trace.kinds

    @property
    def num_divisors(self) -> int:
        """The number of divisors that depend on masks or weights of the whole batch."""
        return self.trace.num_divisors

    @property
    def has_output_gradients(self) -> Sequence[bool]:
        """Whether it gives a gradient for each of the flat outputs of the model."""
        return self.trace.has_gradient

    def updated_metrics(self, states: Sequence[tf.Tensor]) -> list[tuple[Any, tf.Tensor]]:
        """Return the variables of `states` that the loss updates, with their values; a layer may change others."""
        pairs = zip(self.states, states, strict=True)
        return [pair for pair, updates in zip(pairs, self.trace.updates_metric, strict=True) if updates]

    def part(self, arguments: LossArguments) -> LossPart:
        """Return the part of a micro-batch of the loss."""
        results = LossResults(*self.function(*arguments))
        found = iter(results.gradients)
        gradients = [next(found) if has_gradient else None for has_gradient in self.has_output_gradients]
        return LossPart(
            results.value,
            results.of_outputs,
            gradients,
            results.metric_states,
            results.layer_states,
            results.weight_gradients,
        )


def compile_loss(loss: ModelLoss, outputs: Any, batch: Any, metric_states: Sequence[Any]) -> LossProgram:
    """Compile the loss of a model.

    Args:
        loss: The loss of the model.
        outputs: The structure of the model's outputs, with a `ValueSpec` for each tensor.
        batch: The spec of what `taken_after_stages` returns of a batch of any size.
        metric_states: Variables of metrics that `compute_loss` itself may update.
    """
    variables = LossVariables(tuple(metric_states))
    with random_state.stand_in_generator():
        function, trace = trace_loss(loss, outputs, batch, variables)
    layer_states = [
        *trace.unlisted_states,
        *([random_state.state_of_no_layer()] if trace.uses_global_generator else []),
    ]
    parameters = _captured_weights(loss.model, function)
    if parameters or layer_states:
        variables = LossVariables(tuple(metric_states), tuple(layer_states), tuple(parameters))
        function, trace = trace_loss(loss, outputs, batch, variables)
    refuse_python(function.graph, loss.devices, "The loss")
    return LossProgram(loss, variables, trace, OutputFunction(function, outputs, loss.devices))


def _captured_weights(model: keras.Model, function: Any) -> list[keras.Variable]:
    """Return the trained weights that a function captures, instead of taking them as arguments."""
    handles = {id(outer) for outer, _ in function.graph.captures if outer.dtype == tf.resource}
    found = [
        variable
        for variable in model.trainable_variables
        if any(id(handle) in handles for handle in tf_divided_memory.handles_of(variable))
    ]
    refuse_divided(found, "the loss reads")
    return found
