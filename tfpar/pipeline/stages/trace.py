"""The traced graph of a stage, with its tensors by role. It contains the forward and the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from tfpar.pipeline.stages.sparse_rows import Kinds
from tfpar.pipeline.stages.values import BatchPosition, ValueSpec, output_spec
from tfpar.reduction.gradients.gradient_addition import dense_parts, tensors_of
from tfpar.reduction.gradients.row_numbers import Sources
from tfpar.reduction.losses_in_call import Way

Record = TypeVar("Record")


class StageVariables(NamedTuple):
    """The variables of a stage.

    Args:
        parameters: Trained weights; then large untrained weights, if weights are sharded. A sharded weight is listed
            shard by shard.
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
            outputs without gradients.
        input_gradients: The gradient of each input of the stage, or None.
        weight_gradients: The gradient of each parameter: a tensor, the sparse rows of each lookup, or None.
        totals: A placeholder for the sum of earlier gradients of each parameter; None if the gradient is not dense, or
            there are no earlier micro-batches.
        sums: Each weight gradient, with its total added.
        kinds: The kind of each lookup in each parameter.
    """

    output_gradients: tuple[Any, ...]
    input_gradients: tuple[Any, ...]
    weight_gradients: tuple[Any, ...]
    totals: tuple[tf.Tensor | None, ...]
    sums: tuple[Any, ...]
    kinds: Kinds

    @property
    def dense_sums(self) -> list[tf.Tensor]:
        """The sums of dense gradients."""
        return [total for total in self.sums if isinstance(total, tf.Tensor)]

    @property
    def dense_totals(self) -> list[tf.Tensor]:
        """The placeholders for totals, without None."""
        return [total for total in self.totals if total is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class StageTrace:
    """The traced graph of a stage, with its tensors by role.

    Args:
        graph: The graph of the forward and the backward pass.
        values: The inputs of the stage, then their masks.
        variables: The values of the parameters, then of the states.
        position: The position of the micro-batch in its global batch.
        scale: The gradient with respect to each added loss, `[losses]`.
        outputs: The outputs of the stage. A sharded output is a tuple of tensors, one on each device.
        activations: The activation of each output that is sent as logits; an empty string for others.
        masks: The Keras mask of each output, or None.
        new_states: The new value of each state; None if unchanged.
        losses: The losses that the layers add, scalars.
        ways: For each loss that the layers compute, the totals over the batch that it needs.
        uses_global_generator: Whether a layer uses Keras' global generator, whose state is not an argument.
        serves_equal_stages: Whether the trace depends only on the layer calls, so that equal stages can share it.
        unmasked: Whether each input has lost its mask: Keras' MultiHeadAttention removes those of its inputs.
        backward: The backward pass.
        devices: The device of each shard in the graph.
        sources: What the tensors of the graph depend on.
        repeated: The operations of the forward pass that the backward pass repeats if it needs them.
    """

    graph: Any
    values: tuple[Any, ...]
    variables: tuple[tf.Tensor, ...]
    position: BatchPosition
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
    repeated: frozenset[tf.Operation] = frozenset()

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The arguments of the forward and the backward pass."""
        forward = [*self.values, *self.variables, self.position, self.scale]
        return tensors_of([*forward, self.backward.output_gradients, self.backward.totals])

    @property
    def results(self) -> list[tf.Tensor]:
        """The results of the forward pass."""
        return tensors_of([self.outputs, self.masks, self.new_states, self.losses])

    @property
    def output_specs(self) -> list[ValueSpec]:
        """The spec of each output."""
        gradients = self.backward.output_gradients
        outputs = zip(self.outputs, self.masks, gradients, self.activations, strict=True)
        return [
            ValueSpec(
                output_spec(output),
                output_spec(mask),
                needs_gradient=gradient is not None,
                activation=activation,
                source=self.sources.of(dense_parts(output)[0]),  # the first shard stands for all
            )
            for output, mask, gradient, activation in outputs
        ]


def with_untrained_weights(variables: StageVariables, trace: StageTrace) -> tuple[StageVariables, StageTrace]:
    """Move large untrained weights of a stage from its states to its parameters, so that they are sharded."""
    num_parameters = len(variables.parameters)
    parameters, states = trace.variables[:num_parameters], trace.variables[num_parameters:]
    rows = list(zip(variables.states, states, trace.new_states, strict=True))
    is_weight = [new is None and old.dtype.is_floating and len(old.shape) > 1 for _, old, new in rows]
    weights = [row for row, chosen in zip(rows, is_weight, strict=True) if chosen]
    others = [row for row, chosen in zip(rows, is_weight, strict=True) if not chosen]
    backward, no_gradients = trace.backward, (None,) * len(weights)
    extended = backward._replace(
        weight_gradients=(*backward.weight_gradients, *no_gradients),
        totals=(*backward.totals, *no_gradients),
        sums=(*backward.sums, *no_gradients),
        kinds=(*backward.kinds, *((),) * len(weights)),
    )
    in_order = (*parameters, *(value for _, value, _ in weights), *(value for _, value, _ in others))
    new_states = tuple(new for *_, new in others)
    reordered = StageVariables(
        (*variables.parameters, *(row[0] for row in weights)), tuple(row[0] for row in others), variables.num_trained
    )
    return reordered, dataclasses.replace(trace, variables=in_order, new_states=new_states, backward=extended)


def trace_with_record(
    trace: Callable[..., Any], body: Callable[..., tuple[Any, Record]], *specs: Any
) -> tuple[Any, Record]:
    """Trace a function, and return its concrete function with a record of the trace.

    A concrete function returns only tensors, and these are copies. The record contains tensors of the traced graph
    itself, and other values.

    Args:
        trace: Traces a Python function with the specs of its arguments.
        body: Returns the results, a structure of tensors, and the record.
        *specs: The specs of the arguments.
    """
    records: list[Record] = []

    def traced(*arguments: Any) -> Any:
        results, record = body(*arguments)
        records.append(record)
        return results

    function = trace(traced, *specs)
    return function, records[-1]  # TensorFlow traces a function twice if it creates variables
