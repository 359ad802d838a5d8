"""Batch-dependent layers on replicas: refused, or called with the whole batch.

replica 0   a b ─┐                          ┌─ layer(a b c d) ─► rows a b
                 ├─ all-gather ─ a b c d ───┤
replica 1   c d ─┘                          └─ layer(a b c d) ─► rows c d
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple
from unittest import mock

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, random_state, tf_function
from tfpar.messages.reasons import message_of
from tfpar.pipeline.graph.batch_dependence import ON_WHOLE_BATCH, check_sizes, check_stateless, find_batch_dependence
from tfpar.pipeline.graph.known_layers import in_dataset
from tfpar.pipeline.graph.tracing import Call, Graph, Value, run, standardize, trace
from tfpar.pipeline.graph.trial_batch import moving_statistics, trial_examples
from tfpar.reduction import whole_batch
from tfpar.strategies.model_trial import mixes

BatchDependentLayers = Literal["refuse", "gather"]

NUM_EXAMPLES = 4
_SEVERAL = -1  # in place of an axis
_NAMES = "Every layer must compute each example alone, or replicas change the result, received"


class Mixed(NamedTuple):
    """An operation to call on the whole batch.

    Args:
        operation: A layer, an operation of a Functional model, or a model.
        args: For each leaf of its positional arguments, whether it has one row per example; None if unknown.
        kwargs: The same for its keyword arguments.
        outputs: The same for its outputs.
    """

    operation: Any
    args: list[bool] | None = None
    kwargs: dict[str, list[bool]] | None = None
    outputs: list[bool] | None = None


def check_choice(batch_dependent_layers: str) -> None:
    """Refuse an unknown value of `batch_dependent_layers`.

    Raises:
        ValueError: If it is neither "refuse" nor "gather".
    """
    if batch_dependent_layers not in ("refuse", "gather"):
        raise ValueError(f"batch_dependent_layers must be 'refuse' or 'gather', received {batch_dependent_layers!r}.")


def refusal(model: keras.Model, names: Sequence[str], gathers: bool, training: bool) -> ValueError:
    """Return the error for batch-dependent calls.

    Args:
        model: The model.
        names: The names of the calls; empty if another worker found them.
        gathers: Whether the strategy tried to call them with the whole batch.
        training: Whether they are batch-dependent in training, or in inference.
    """
    layers = [layer for layer in keras_model.all_layers(model) if {layer.name, model.name} & {*names}]
    known = ", ".join(map(repr, names)) or "one"
    way_out = (
        "calling it with the whole batch does not give the result of one device; call tfpar.gather in the layer"
        if gathers
        else "set batch_dependent_layers='gather' to compute it on the whole batch"
    )
    return ValueError(
        f"{_NAMES} {known}{'' if training else ' in inference'}, where an example depends on the others of its batch; "
        f"{in_dataset(layers)}{way_out}, or use SingleDevice()."
    )


@random_state.preserved_random_state()
def find(model: keras.Model, batch: Any, training: bool = True) -> list[str]:
    """Return the names of batch-dependent calls on which the outputs of a model depend.

    BatchNormalization is allowed in training: without `synchronized=True` it has statistics of each replica.

    Args:
        model: A built model.
        batch: A batch, `(inputs, targets, sample_weight)` as far as given; its first four examples are used.
        training: Whether the model will train, or evaluate and predict.

    Raises:
        ValueError: If the model fails on parts of a batch, or keeps a state for each example.
    """
    found = keras_model.all_layers(model)
    check_stateless(found)
    check_sizes(found, training)
    inputs = few_examples(batch)
    graph = _graph(model, inputs)
    if graph is None:
        return [model.name] if _mixes(model, inputs, training) else []
    try:
        with contextlib.nullcontext() if training else moving_statistics(of_synchronized=True):
            names = find_batch_dependence(graph, standardize(model, inputs), training).calls
    except ValueError as error:
        raise ValueError(message_of(error).replace(ON_WHOLE_BATCH, "train on SingleDevice()")) from error
    names = tuple(call.name for call in graph.calls if call.name in names and _reaches_outputs(graph, call, training))
    # A call that gathers the batch computes the same on each replica as on one device.
    gathers = bool(names) and _gathers(model, inputs, training)
    return [] if gathers and not mixes(model, inputs, training) else list(names)


def _mixes(model: keras.Model, inputs: Any, training: bool) -> bool:
    """Return what `mixes` does, for ragged inputs of different lengths: those of a first batch may be equal."""
    flat = [leaf for leaf in tf.nest.flatten(inputs) if leaf is not None]
    lengths = [leaf.row_lengths() for leaf in flat if isinstance(leaf, tf.RaggedTensor)]
    if not lengths:
        return mixes(model, inputs, training)
    examples = iter(trial_examples(flat))
    of_other_lengths = tf.nest.map_structure(lambda leaf: None if leaf is None else next(examples), inputs)
    with contextlib.suppress(tf.errors.InvalidArgumentError, ValueError):  # a layer may assert a largest length
        return mixes(model, of_other_lengths, training)
    if all(int(tf.reduce_max(one)) == int(tf.reduce_min(one)) for one in lengths):
        raise ValueError(
            f"Replicas pad their examples to different lengths, and {model.name!r} fails on lengths other than those "
            "of the first batch. Convert ragged inputs in the dataset, with to_tensor(), or train on SingleDevice()."
        )
    return mixes(model, inputs, training)


def _gathers(model: keras.Model, inputs: Any, training: bool) -> bool:
    """Return whether a model's `call` gathers the batch or computes a loss over the whole batch."""
    trial = whole_batch.Trial()
    with (
        trial.recording(int(data.num_rows(inputs))),
        keras.StatelessScope(),
        tf_function.own_traces(),
        keras_losses.collect_added_losses(list),
    ):
        keras_model.call_model(model, inputs, training)
    return trial.num_values > 0


@random_state.preserved_random_state()
def resolve(model: keras.Model, batch: Any, names: Sequence[str], training: bool = True) -> list[Mixed]:
    """Return the operations to call with the whole batch, such that replicas compute the outputs of one device.

    Args:
        model: A built model.
        batch: A batch, as for `find`.
        names: The names that `find` returned.
        training: As for `find`.

    Raises:
        ValueError: If the outputs would still differ.
    """
    inputs = few_examples(batch)
    graph = _graph(model, inputs)
    calls = [] if graph is None else [call for call in graph.calls if call.name in names]
    own = {id(operation) for operation in _operations(model)}
    mixed = [Mixed(model)]
    complete = len({call.name for call in calls}) == len(names)  # else operations have another name in each trace
    if graph is not None and calls and complete and all(id(call.operation) in own for call in calls):
        axes = _axes(graph, standardize(model, inputs), training)
        if {axes[value] for call in calls for value in (*call.inputs, *call.outputs)} <= {0, None}:
            mixed = [_mixed(call, axes) for call in calls]
    with on_whole_batch(mixed):
        if mixes(model, inputs, training):
            raise refusal(model, names, gathers=True, training=training)
    return mixed


def _axes(graph: Graph, inputs: Sequence[Any], training: bool) -> dict[Value, int | None]:
    """Return the axis of the examples in each value of a graph, `_SEVERAL` where an example has several rows.

    It is None for a value that does not depend on the batch.
    """
    sizes: list[dict[Value, Any]] = []
    batches = len(inputs[0]), len(inputs[0]) // 2
    for size in batches:
        known = dict(zip(graph.inputs, (tensor[:size] for tensor in inputs), strict=True))
        with keras.StatelessScope(), keras_losses.collect_added_losses(list):
            run(graph.calls, known, training)
        sizes.append({value: tuple(tensor.shape) for value, tensor in known.items()})
    return {
        value: next(
            (
                axis if pair == batches else _SEVERAL
                for axis, pair in enumerate(zip(shape, sizes[1][value], strict=True))
                if len(set(pair)) > 1
            ),
            None,
        )
        for value, shape in sizes[0].items()
    }


def _mixed(call: Call, axes: dict[Value, int | None]) -> Mixed:
    def rows(structure: Any) -> list[bool]:
        return [isinstance(leaf, Value) and axes[leaf] == 0 for leaf in keras.tree.flatten(structure)]

    kwargs = {name: rows(value) for name, value in call.kwargs.items()}
    return Mixed(call.operation, rows(call.args), kwargs, rows(call.outputs))


@contextlib.contextmanager
def on_whole_batch(mixed: Sequence[Mixed]) -> Iterator[None]:
    """Call operations with the whole batch inside this context, and return the rows of the calling replica.

    Args:
        mixed: The operations; duplicates are ignored.
    """
    with contextlib.ExitStack() as stack:
        for one in {id(one.operation): one for one in mixed}.values():
            stack.enter_context(mock.patch.object(one.operation, "call", _on_whole_batch(one, one.operation.call)))
        yield


def _on_whole_batch(mixed: Mixed, call: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(structure: Any, rows: list[bool] | None) -> Any:
        return _map(lambda leaf: whole_batch.gather(leaf), structure, rows)

    def on_all(*args: Any, **kwargs: Any) -> Any:
        examples = [leaf for leaf in keras.tree.flatten((args, kwargs)) if _has_rows(leaf)]
        args = gathered(args, mixed.args)
        kwargs = {name: gathered(value, (mixed.kwargs or {}).get(name)) for name, value in kwargs.items()}
        with whole_batch.having_all_rows():
            outputs = call(*args, **kwargs)
        num_rows = tf.shape(examples[0])[0] if examples else None
        return _map(lambda leaf: whole_batch.own_rows(leaf, num_rows), outputs, mixed.outputs)

    return on_all


def _map(function: Callable[[Any], Any], structure: Any, rows: list[bool] | None) -> Any:
    """Apply a function to the leaves with one row per example; to all tensors if these leaves are unknown."""
    leaves = keras.tree.flatten(structure)
    known = rows if rows is not None and len(rows) == len(leaves) else [True] * len(leaves)
    new = [function(leaf) if has and _has_rows(leaf) else leaf for leaf, has in zip(leaves, known, strict=True)]
    return keras.tree.pack_sequence_as(structure, new)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0


def few_examples(batch: Any) -> Any:
    """Return the inputs of four or two examples; a single example is repeated."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    size = min(NUM_EXAMPLES, int(data.num_rows(inputs)))
    few = data.take_rows(inputs, 0, size)
    return data.join_batches([few, few]) if size == 1 else data.take_rows(few, 0, 2 * (size // 2))


def _graph(model: keras.Model, inputs: Any) -> Graph | None:
    """Return the graph of the model; None if its `call` cannot be traced, or if an input is not dense."""
    if not all(isinstance(leaf, tf.Tensor) or leaf is None for leaf in tf.nest.flatten(inputs)):
        return None
    with contextlib.suppress(Exception), keras_losses.collect_added_losses(list):
        return trace(model, inputs)
    return None


def _operations(model: keras.Model) -> list[Any]:
    """Return all layers of a model and the operations of its Functional models."""
    layers = [model, *keras_model.all_layers(model)]
    return [*layers, *(operation for one in layers for operation in getattr(one, "operations", ()))]


def _reaches_outputs(graph: Graph, call: Call, training: bool) -> bool:
    """Return whether the model's outputs, and not only losses that layers add, depend on a layer call."""
    found: list[bool] = []

    def traced(tensors: Sequence[Any]) -> None:
        known = dict(zip(graph.inputs, tensors, strict=True))
        with keras.StatelessScope(), keras_losses.collect_added_losses(list):
            run(graph.calls, known, training)
        outputs = {known[leaf].op for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)}
        waiting, reached = [known[value] for value in call.outputs], {known[value].op for value in call.outputs}
        while waiting:
            new = {op for op in waiting.pop().consumers() if op not in reached}
            reached |= new
            waiting += [tensor for op in new for tensor in op.outputs]
        found.append(not outputs.isdisjoint(reached))

    specs = [tf.TensorSpec([None, *value.shape[1:]], value.dtype) for value in graph.inputs]
    tf.function(traced, autograph=False).get_concrete_function(specs)
    return found[0]
