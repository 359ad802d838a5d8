"""The traced graph of a stage, its forward and its backward pass together, with its tensors by role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfpar.pipeline.stages.sparse_rows import Kinds
from tfpar.pipeline.stages.values import Place, ValueSpec, spec_of_output
from tfpar.reduction.gradients.gradient_addition import dense_parts, tensors_of
from tfpar.reduction.gradients.row_numbers import Sources
from tfpar.reduction.losses_in_call import Way

Record = TypeVar("Record")


class StageVariables(NamedTuple):
    """The variables of a stage.

    Args:
        parameters: Trained weights; with sharded weights, then large untrained ones. A divided weight is listed by its
            shards.
        states: All other variables, such as moving averages and random seeds.
        num_trained: The number of trained parameters, which come first.
    """

    parameters: tuple[Any, ...]
    states: tuple[Any, ...]
    num_trained: int


class BackwardTrace(NamedTuple):
    """The tensors of a traced backward pass.

    Args:
        output_gradients: A placeholder for the gradient of each output of the stage, or of each of its shards; None for
            an output without a gradient.
        input_gradients: The gradient of each input of the stage; None for none.
        weight_gradients: The gradient of each parameter: a tensor, the rows of each lookup, or None for none.
        totals: A placeholder for the sum of earlier gradients of each parameter; None where it has no dense gradient,
            and where no micro-batch is earlier.
        sums: Each weight gradient, added to its total if it has one.
        kinds: The kind of each lookup of each weight gradient.
    """

    output_gradients: tuple[Any, ...]
    input_gradients: tuple[Any, ...]
    weight_gradients: tuple[Any, ...]
    totals: tuple[tf.Tensor | None, ...]
    sums: tuple[Any, ...]
    kinds: Kinds

    @property
    def dense_sums(self) -> list[tf.Tensor]:
        """The sums that are tensors."""
        return [total for total in self.sums if isinstance(total, tf.Tensor)]

    @property
    def dense_totals(self) -> list[tf.Tensor]:
        """The totals that exist."""
        return [total for total in self.totals if total is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class StageTrace:
    """The traced graph of a stage, with its tensors by role.

    Args:
        graph: The graph of the forward and the backward pass.
        values: The inputs of the stage, then their masks.
        variables: The values of its parameters, then of its states.
        place: The micro-batch in its global batch.
        scale: The gradient of one unit of each added loss, `[losses]`.
        outputs: The outputs of the stage as they are sent; a sharded one is a tuple of tensors, one on each device.
        activations: The activation of each output that is sent as logits; an empty text for others.
        masks: The Keras mask of each output; None for none.
        new_states: The new value of each state; None for an unchanged one.
        losses: The losses that the layers add, scalars.
        ways: What the losses computed by its layers need of the whole batch.
        uses_global_generator: Whether a layer draws from Keras' global generator, whose state is not an argument.
        serves_equal_stages: Whether it follows from the layer calls alone, so that it serves stages with equal calls.
        unmasked: Whether each input has no mask afterwards: Keras' MultiHeadAttention removes those of its inputs.
        backward: The backward pass.
        devices: The device of each shard in the graph; one for a stage on one device.
        sources: What the tensors of the graph depend on.
    """

    graph: Any
    values: tuple[Any, ...]
    variables: tuple[tf.Tensor, ...]
    place: Place
    scale: tf.Tensor
    outputs: tuple[Any, ...]
    activations: tuple[str, ...]
    masks: tuple[tf.Tensor | None, ...]
    new_states: tuple[tf.Tensor | None, ...]
    losses: tuple[tf.Tensor, ...]
    ways: tuple[Way, ...]
    uses_global_generator: bool
    serves_equal_stages: bool
    unmasked: tuple[bool, ...]
    backward: BackwardTrace
    devices: Sequence[str]
    sources: Sources

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The arguments of the forward and the backward pass."""
        of_forward = [*self.values, *self.variables, self.place, self.scale]
        return tensors_of([*of_forward, self.backward.output_gradients, self.backward.totals])

    @property
    def results(self) -> list[tf.Tensor]:
        """The results of the forward pass."""
        return tensors_of([self.outputs, self.masks, self.new_states, self.losses])

    @property
    def output_specs(self) -> list[ValueSpec]:
        """The spec of each output, in the order of the outputs of the stage."""
        gradients = self.backward.output_gradients
        outputs = zip(self.outputs, self.masks, gradients, self.activations, strict=True)
        return [
            ValueSpec(
                spec_of_output(output),
                spec_of_output(mask),
                needs_gradient=gradient is not None,
                activation=activation,
                source=self.sources.of(dense_parts(output)[0]),  # of sharded scores that of the first shard
            )
            for output, mask, gradient, activation in outputs
        ]


def with_untrained_weights(variables: StageVariables, trace: StageTrace) -> tuple[StageVariables, StageTrace]:
    """Return the same trace with its large untrained weights among the parameters.

    Args:
        variables: The variables of the stage.
        trace: Its graph.
    """
    num_parameters = len(variables.parameters)
    parameters, states = trace.variables[:num_parameters], trace.variables[num_parameters:]
    rows = list(zip(variables.states, states, trace.new_states, strict=True))
    is_weight = [new is None and old.dtype.is_floating and len(old.shape) > 1 for _, old, new in rows]
    weights = [row for row, chosen in zip(rows, is_weight, strict=True) if chosen]
    others = [row for row, chosen in zip(rows, is_weight, strict=True) if not chosen]
    backward, none = trace.backward, (None,) * len(weights)
    without_gradients = backward._replace(
        weight_gradients=(*backward.weight_gradients, *none),
        totals=(*backward.totals, *none),
        sums=(*backward.sums, *none),
        kinds=(*backward.kinds, *((),) * len(weights)),
    )
    in_order = (*parameters, *(value for _, value, _ in weights), *(value for _, value, _ in others))
    new_states = tuple(new for *_, new in others)
    reordered = StageVariables(
        (*variables.parameters, *(row[0] for row in weights)), tuple(row[0] for row in others), variables.num_trained
    )
    return reordered, dataclasses.replace(trace, variables=in_order, new_states=new_states, backward=without_gradients)


def trace_with_record(
    trace: Callable[..., Any], body: Callable[..., tuple[Any, Record]], *specs: Any
) -> tuple[Any, Record]:
    """Trace a function that returns tensors and a record of its tensors by role.

    A concrete function returns copies of its results, and only tensors. The record contains the tensors of the traced
    graph themselves, and values that are not tensors.

    Args:
        trace: Returns the concrete function of a Python function and the specs of its arguments.
        body: Returns the results of the function, a structure of tensors, and the record.
        *specs: The specs of the arguments.

    Returns:
        The concrete function and the record.
    """
    records: list[Record] = []

    def traced(*arguments: Any) -> Any:
        results, record = body(*arguments)
        records.append(record)
        return results

    function = trace(traced, *specs)
    return function, records[-1]  # TensorFlow traces again after a first trace that creates variables
