"""The trace of a stage: its forward pass and, for training, its backward pass.

    layer calls ─► forward pass ─► key ─┬─ of an earlier stage ─► its trace, for this stage too
                                        └─ new ─► backward pass ─► a trace of its own

A stage with the layer calls of an earlier one, such as the next of many equal blocks, has its trace, and nothing of it
is differentiated, split or compiled again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat import (
    keras_losses_in_call,
    keras_model,
    keras_probabilities,
    random_state,
    tf_divided_memory,
    tf_tapes,
)
from tfpar.pipeline.graph import tracing as model_graph
from tfpar.pipeline.partition.layer_settings import settings_of_calls
from tfpar.pipeline.partition.placement import follow_data
from tfpar.pipeline.partition.stages import Stage
from tfpar.pipeline.stages.hidden_reads import hidden_reads
from tfpar.pipeline.stages.shards import DividedCalls, on_shards
from tfpar.pipeline.stages.sparse_rows import by_lookups
from tfpar.pipeline.stages.trace import BackwardTrace, StageTrace, StageVariables
from tfpar.pipeline.stages.trace_record import trace_with_record
from tfpar.pipeline.stages.values import Place, ValueSpec, spec_of_output
from tfpar.reduction import gathered_classes
from tfpar.reduction.gradient_addition import dense_part, dense_parts, reached_from, tensors_of
from tfpar.reduction.losses_in_call import Way, in_part
from tfpar.reduction.row_numbers import Source, Sources

Traces = MutableMapping[Hashable, StageTrace]


def trace_stage(
    stage: Stage,
    inputs: Sequence[ValueSpec],
    variables: StageVariables,
    devices: Sequence[str],
    divided: DividedCalls | None = None,
    *,
    in_pieces: Container[model_graph.Value] = (),
    training: bool,
    accumulates: bool = True,
    unused_outputs: frozenset[model_graph.Value] = frozenset(),
    ways: Sequence[Way] = (),
    traces: Traces,
) -> StageTrace:
    """Trace the forward pass of a stage and, for training, its backward pass.

    Args:
        stage: Its layer calls, inputs and outputs.
        inputs: The specs of its inputs.
        variables: The variables whose values are arguments of the graph.
        devices: The device of each shard of the stage; one for a stage that is not divided.
        divided: Its divided layer calls; None for a stage on one device.
        in_pieces: Outputs that it may send in pieces: those that the loss alone takes.
        training: Whether the model is trained.
        accumulates: Whether gradients are added to those of earlier micro-batches.
        unused_outputs: Outputs that no loss depends on.
        ways: What the losses computed by layers need of the whole batch, for this stage and all later ones.
        traces: The traces of earlier stages, all with the same options; a new one is added.

    Returns:
        The trace of the stage, or that of an earlier one with the same forward pass.

    Raises:
        ValueError: If a layer assigns a trained weight, hides one from its gradient, or computes from a loss what
            micro-batches would change.
    """
    device, needs_gradient = devices[0], [value not in unused_outputs for value in stage.outputs]

    def body(
        values: list[Any], variable_values: list[tf.Tensor], place: Place, scale: tf.Tensor
    ) -> tuple[Any, tuple[Hashable, StageTrace]]:
        with host_sizes.sizes_on_host():
            return traced(values, variable_values, place, scale)

    def traced(
        values: list[Any], variable_values: list[tf.Tensor], place: Place, scale: tf.Tensor
    ) -> tuple[Any, tuple[Hashable, StageTrace]]:
        graph, given = tf.compat.v1.get_default_graph(), variable_values[: variables.num_trained]
        row_sources = _sources(inputs, values, given, variable_values[variables.num_trained :])
        variable_values = on_shards([*variables.parameters, *variables.states], variable_values, devices)
        tensors = _received(stage, inputs, values, device)
        forward = _forward_pass(stage, tensors, variables, variable_values, place, divided, device, training, ways)
        with tf.device(device):
            sent = _sent(stage, tensors, forward, in_pieces)
            pairs = zip(inputs, values, strict=False)  # masks come after the values
            sources = [dense_part(tensor) if spec.needs_gradient else None for spec, tensor in pairs]
            if training:
                _check_losses_in_call(stage, forward.whole_losses, sent.outputs, sent.losses, values)
                _check_reads(graph, variables, given, sources)
            key = _key(graph, stage, inputs, variables, forward, sent, needs_gradient) if divided is None else None
            if key in traces:
                return tensors_of(sent.outputs), (key, traces[key])
            trained = variable_values[: variables.num_trained]
            parameters = [*trained, *[None] * (len(variables.parameters) - len(trained))]
            with contextlib.nullcontext() if divided is None else follow_data():
                backward = _differentiate(
                    sent.outputs, needs_gradient, sent.losses, scale, sources, parameters, variables.parameters,
                    row_sources, training=training, accumulates=accumulates,
                )  # fmt: skip
        trace = StageTrace(
            graph, tuple(values), tuple(variable_values), place, scale, sent.outputs, sent.activations, sent.masks,
            forward.new_states, sent.losses, forward.ways, forward.draws_from_no_layer, sent.unmasked, backward,
            devices, row_sources,
        )  # fmt: skip
        return tensors_of([sent.outputs, backward.input_gradients, backward.sums]), (key, trace)

    specs = [spec.spec for spec in inputs] + [spec.mask for spec in inputs if spec.mask is not None]
    variable_specs = [tf.TensorSpec(v.shape, v.dtype) for v in (*variables.parameters, *variables.states)]
    scale = tf.TensorSpec([None], keras.config.floatx())
    _, (key, trace) = trace_with_record(_concrete_function, body, specs, variable_specs, Place.specs(), scale)
    return trace if key is None else traces.setdefault(key, trace)


def _sources(
    inputs: Sequence[ValueSpec], values: Sequence[Any], trained: Sequence[tf.Tensor], states: Sequence[tf.Tensor]
) -> Sources:
    """Return what the arguments of a stage depend on; a state may differ between micro-batches."""
    known = {one.ref(): spec.source for spec, value in zip(inputs, values, strict=False) for one in tensors_of(value)}
    known |= {one.ref(): Source.CONSTANT for one in trained}
    return Sources(known | {one.ref(): Source.POSITIONS for one in states})


def _received(
    stage: Stage, inputs: Sequence[ValueSpec], values: Sequence[Any], device: str
) -> dict[model_graph.Value, Any]:
    """Return the inputs of a stage from their tensors and masks as they are sent."""
    masks = iter(values[len(inputs) :])
    with tf.device(device):
        return {
            value: spec.received(tensor, next(masks) if spec.mask is not None else None)
            for value, spec, tensor in zip(stage.inputs, inputs, values, strict=False)
        }


class _Sent(NamedTuple):
    outputs: tuple[Any, ...]
    activations: tuple[str, ...]
    masks: tuple[tf.Tensor | None, ...]
    unmasked: tuple[bool, ...]
    losses: tuple[tf.Tensor, ...]


def _sent(
    stage: Stage, tensors: Mapping[model_graph.Value, Any], forward: _Forward, in_pieces: Container[model_graph.Value]
) -> _Sent:
    """Return what a stage sends after its layer calls."""
    sent = [keras_probabilities.sent_as(tensors[value]) for value in stage.outputs]
    whole, activations = (tuple(one[place] for one in sent) for place in range(2))
    outputs = tuple(
        _pieces(one) if value in in_pieces else one for value, one in zip(stage.outputs, whole, strict=True)
    )
    masks = tuple(keras_model.mask_of(tensors[value]) for value in stage.outputs)
    unmasked = tuple(keras_model.mask_of(tensors[value]) is None for value in stage.inputs)
    # A layer may add one value for each example; Keras sums them.
    return _Sent(outputs, activations, masks, unmasked, tuple(tf.reduce_sum(loss) for loss in forward.losses))


def _pieces(tensor: Any) -> Any:
    """Return the pieces of scores that have them, each on its device; any other tensor, and probabilities, as it is."""
    pieces = None if gathered_classes.are_probabilities(tensor) else gathered_classes.pieces_of(tensor)
    return tensor if pieces is None else tuple(pieces.tensors)


def _key(
    graph: Any,
    stage: Stage,
    inputs: Sequence[ValueSpec],
    variables: StageVariables,
    forward: _Forward,
    sent: _Sent,
    needs_gradient: Sequence[bool],
) -> Hashable:
    """Return all that the trace of a stage depends on; None for one that depends on more than its layer calls."""
    # A captured tensor, or a state that TensorFlow holds for an operation, is that of one stage.
    if forward.depends_on_more or graph.captures or any(op.op_def.is_stateful for op in graph.get_operations()):
        return None
    calls, types = settings_of_calls(stage.calls, stage.inputs), tuple(op.type for op in graph.get_operations())
    results = _positions(graph, [*sent.outputs, *sent.masks, *forward.new_states, *sent.losses])
    sizes = len(variables.parameters), variables.num_trained, len(variables.states), len(sent.outputs)
    specs = *inputs, *map(spec_of_output, [*sent.outputs, *sent.masks])
    return calls, types, results, sizes, specs, sent.activations, sent.unmasked, tuple(needs_gradient)


def _positions(graph: Any, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the positions of tensors in a graph, None for None; a ragged or sparse tensor has several."""
    numbers = {op: number for number, op in enumerate(graph.get_operations())}

    def positions(tensor: Any) -> Any:
        if tensor is None:
            return None
        return type(tensor).__name__, tuple((numbers[part.op], part.value_index) for part in tensors_of(tensor))

    return tuple(map(positions, tensors))


def _concrete_function(body: Callable[..., Any], *specs: Any) -> Any:
    return tf.function(body, autograph=False).get_concrete_function(*specs)


class _Forward(NamedTuple):
    new_states: tuple[tf.Tensor | None, ...]
    losses: Sequence[tf.Tensor]
    ways: tuple[Way, ...]
    whole_losses: Sequence[tf.Tensor]
    draws_from_no_layer: bool

    @property
    def depends_on_more(self) -> bool:
        """Whether the stage depends on more than its operations: on losses of the whole batch or on other variables."""
        return bool(self.ways or self.whole_losses or self.draws_from_no_layer)


def _forward_pass(
    stage: Stage, tensors: dict[model_graph.Value, Any], variables: StageVariables, values: Sequence[tf.Tensor],
    place: Place, divided: DividedCalls | None, device: str, training: bool, ways: Sequence[Way],
) -> _Forward:  # fmt: skip
    """Add the layer calls of a stage to the graph, and their outputs to `tensors`."""
    pairs = list(zip((*variables.parameters, *variables.states), values, strict=True))
    mapping = [pair for pair in pairs if tf_divided_memory.piece_of(pair[0]) is None]
    with (
        tf_divided_memory.with_values([pair for pair in pairs if tf_divided_memory.piece_of(pair[0]) is not None]),
        tf.device(device),
        tf_tapes.replaced(mapping, collect_losses=True) as scope,
        random_state.replica_seeds(lambda: place.number),
        # A scalar that a layer gives to a metric is weighted by the micro-batch's part of the batch.
        keras_losses_in_call.scalars_weighted(lambda _: place.part),
        in_part(ways, place.sums, place.part) as in_call,
    ):
        if divided is None:
            model_graph.run(stage.calls, tensors, training)
        else:
            divided.run(tensors, training)
        after = [scope.get_current_value(variable) for variable, _ in mapping]
        draws_from_no_layer = random_state.draws_from_no_layer(scope, variables.states)
    changed = [None if new is old else new for new, (_, old) in zip(after, mapping, strict=True)]
    num_parameters = len(mapping) - len(variables.states)
    _check_parameters([variable for variable, _ in mapping[:num_parameters]], changed[:num_parameters])
    whole = [loss for way, loss in in_call if way == "whole"]
    in_order = tuple(way for way, _ in in_call)
    return _Forward(tuple(changed[num_parameters:]), scope.losses, in_order, whole, draws_from_no_layer)


def _check_parameters(parameters: Sequence[Any], changed: Sequence[tf.Tensor | None]) -> None:
    for variable, new in zip(parameters, changed, strict=True):
        if new is not None:
            raise ValueError(
                f"In a pipeline, only the optimizer can change a trained weight, received a layer that assigns "
                f"{variable.path!r} in its call (as SpectralNormalization does). Leave that layer out, or train on "
                "SingleDevice()."
            )


def _check_reads(
    graph: Any, variables: StageVariables, trained: Sequence[tf.Tensor], sources: Sequence[tf.Tensor | None]
) -> None:
    """Refuse a function with a gradient of its own that reads what is trained without taking it as an argument."""
    inputs = [source for source in sources if source is not None]
    for place in hidden_reads(graph, [*trained, *inputs]):
        name = repr(variables.parameters[place].path) if place < len(trained) else "the output of an earlier layer"
        raise ValueError(
            "A stage gives layers the values of their weights, and a function with a gradient of its own must take "
            f"all that is trained as arguments, received one that reads {name}. Make it an argument; in place of "
            "tf.recompute_grad and keras.remat, a pipeline has recompute=True. Or train on SingleDevice() or "
            "Mirrored()."
        )


def _check_losses_in_call(
    stage: Stage,
    whole: Sequence[tf.Tensor],
    outputs: Sequence[Any],
    losses: Sequence[tf.Tensor],
    values: Sequence[Any],
) -> None:
    """Refuse a result that depends on a loss of the whole batch and on the examples of a micro-batch."""
    if not whole:
        return
    later = reached_from(whole)
    if any(part.op in later for part in dense_parts(outputs)):
        raise ValueError(
            "In a pipeline, a loss computed in call() must be used in the same stage if it has trained weights or is "
            f"transformed by more than a constant factor, but stage {stage.index} sends it to a later stage. Change "
            "the cuts with balance, or train on SingleDevice() or Mirrored()."
        )
    gradients = tf.gradients(list(losses), list(whole)) if losses else []
    varying = reached_from(values, stop=[loss.op for loss in whole])
    for gradient in gradients:
        if gradient is not None and gradient.op in varying:
            raise ValueError(
                "In a pipeline, a layer can add the value of a loss object, or a function of it, but not its product "
                f"with another value of the examples, as in stage {stage.index}. Add each as a separate loss, or train "
                "on SingleDevice() or Mirrored()."
            )


def _differentiate(
    outputs: Sequence[Any], needs_gradient: Sequence[bool], losses: Sequence[tf.Tensor], scale: tf.Tensor,
    sources: Sequence[Any], parameters: Sequence[tf.Tensor | None], weights: Sequence[Any], row_sources: Sources, *,
    training: bool, accumulates: bool,
) -> BackwardTrace:  # fmt: skip
    """Add the backward pass to the graph that is being traced."""
    given = [source for source in sources if source is not None]
    trained = [parameter for parameter in parameters if parameter is not None]
    reached = reached_from([*given, *trained]) if training else set()
    upstream = tuple(
        _upstream(output, reached) if needed else None for output, needed in zip(outputs, needs_gradient, strict=True)
    )
    sent = [output for output, gradient in zip(outputs, upstream, strict=True) if gradient is not None]
    ends = list(zip(dense_parts(sent), tensors_of(upstream), strict=True))
    ends += [(loss, tf.cast(scale[i], loss.dtype)) for i, loss in enumerate(losses) if loss.op in reached]
    found: Sequence[Any] = [None] * (len(given) + len(trained))
    if ends:
        found = tf.gradients([end for end, _ in ends], [*given, *trained], [gradient for _, gradient in ends])
    # The gradient of rows that were looked up in an input is sent whole: the stage before has no use for slices.
    dense = [gradient if gradient is None else tf.convert_to_tensor(gradient) for gradient in found[: len(given)]]
    in_order = iter([*dense, *found[len(given) :]])
    input_gradients = tuple(None if source is None else next(in_order) for source in sources)
    of_weights = [None if one is None else next(in_order) for one in parameters]
    weight_gradients, kinds = by_lookups(of_weights, weights, row_sources)
    # A sum is added while its gradient is in the processor's cache, and overwrites its memory.
    totals, sums = list[Any](), list[Any]()
    for parameter, gradient in zip(parameters, weight_gradients, strict=True):
        total, added = None, gradient
        if accumulates and parameter is not None and isinstance(gradient, tf.Tensor):
            with tf.device(parameter.device):
                total = tf.compat.v1.placeholder(gradient.dtype, gradient.shape)
                added = total + gradient
        totals.append(total)
        sums.append(added)
    return BackwardTrace(upstream, input_gradients, weight_gradients, tuple(totals), tuple(sums), kinds)


def _upstream(output: Any, reached: Container[tf.Operation]) -> Any:
    """Return a placeholder for the gradient of an output, of each of its pieces, or None for no gradient."""
    parts = dense_parts(output)
    if not any(part.dtype.is_floating and part.op in reached for part in parts):
        return None
    found = []
    for part in parts:
        with tf.device(part.device):
            found.append(tf.compat.v1.placeholder(part.dtype, part.shape))
    return tuple(found) if isinstance(output, tuple) else found[0]
