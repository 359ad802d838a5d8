"""Tracing of a Keras model into a graph of layer calls.

    model                            graph
    ┌ encoder ────────┐              embed ── encoder/dense ── encoder/norm ─┐
  ──│ embed dense norm│── head ──      └──────────────────────────────── add ┴─ head
    └─────────────────┘

The model runs once on symbolic tensors, which records the layer calls of nested models and custom `call` methods too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar._compat.models import keras_blocks, keras_losses, keras_model, keras_tracing
from tfpar._compat.models.keras_recorded import Recorded
from tfpar._compat.random_numbers import random_state
from tfpar.messages.reasons import message_of
from tfpar.messages.users_code import users_place
from tfpar.pipeline.graph.ir import Call, Graph, Value, run
from tfpar.pipeline.graph.topological_order import build_graph

__all__ = ["Call", "Graph", "Value", "build", "check_unchanged", "run", "standardize", "trace"]


def trace(
    model: keras.Model, input_specs: Any = None, *, opens_blocks: bool = False, symbolic_sizes: bool = False
) -> Graph:
    """Trace a model, including its nested models.

    Args:
        model: A Functional or Sequential model, or a subclass whose `call` uses layers and `keras.ops`.
        input_specs: Objects with `shape` (batch dimension included) and `dtype`, in the structure of the model's
            inputs. Required for models without declared inputs. For other models they fill in unknown dimensions, and
            None marks an absent optional input.
        opens_blocks: Whether to replace the call of a custom or KerasHub layer, such as a transformer block, by the
            layer calls inside it, if they can be traced and are the same in training and in inference. Unknown
            dimensions then stay unknown, because a block may read them. Models without declared inputs keep their
            blocks.
        symbolic_sizes: Whether an opened block may read the batch size, or another unknown dimension, as a value of the
            graph. Otherwise such a block is not opened.

    Returns:
        The graph. It shares the layers of the model.

    Raises:
        ValueError: If the inputs of the model are unknown, or its `call` cannot be traced or depends on `training`.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="hidden")])
        >>> [call.name for call in trace(model).calls]
        ['hidden']
    """
    if keras_tracing.has_own_ending(model):
        raise ValueError(
            f"A model that is divided over devices must end with its outputs, received {type(model).__name__} with its "
            "own compute_mask or activity_regularizer; move it into a last layer of the model."
        )
    build(model, input_specs)
    inputs = _symbolic_inputs(model, input_specs, keeps_unknown=opens_blocks)
    blocks = _Blocks(opens_blocks and keras_tracing.declared_inputs(model) is not None, symbolic_sizes)
    recorded, outputs = _record(model, inputs, training=True, blocks=blocks)
    if not any(call.blocks for call in recorded) and not any(
        isinstance(layer, keras.Model) and keras_tracing.has_own_call(layer) for layer in keras_model.all_layers(model)
    ):
        return build_graph(inputs, recorded, [(True, False)] * len(recorded), outputs)
    inference = _record(model, inputs, training=False, blocks=blocks)
    while blocks.close(_differing(inputs, (recorded, outputs), inference)):
        recorded, outputs = _record(model, inputs, training=True, blocks=blocks)
        inference = _record(model, inputs, training=False, blocks=blocks)
    _check_same_calls(model, inputs, (recorded, outputs), inference)
    pairs = zip(recorded, inference[0], strict=True)
    training_arguments = [(in_training.training, in_inference.training) for in_training, in_inference in pairs]
    graph = build_graph(inputs, recorded, training_arguments, outputs)
    return dataclasses.replace(graph, trace_record=(inputs, _descriptions(inputs, recorded, outputs), blocks))


@dataclasses.dataclass
class _Blocks:
    """Which blocks (layers with inner layers) are opened.

    Args:
        are_opened: Whether any block is opened.
        symbolic_sizes: As for `trace`.
    """

    are_opened: bool
    symbolic_sizes: bool
    _whole: set[type] = dataclasses.field(default_factory=set)

    def opens(self, layer: keras.Layer) -> bool:
        return self.are_opened and type(layer) not in self._whole and keras_blocks.is_block(layer)

    def close(self, blocks: Iterable[keras.Layer]) -> bool:
        """Stop opening blocks of the classes of `blocks`. Return whether there are any."""
        classes = set(map(type, blocks))
        self._whole |= classes
        return bool(classes)


def _differing(
    inputs: Any, training: tuple[Sequence[Recorded], Any], inference: tuple[Sequence[Recorded], Any]
) -> list[keras.Layer]:
    """Return the blocks at the first difference between training and inference, or all blocks if it is in none."""
    in_training, in_inference = _descriptions(inputs, *training), _descriptions(inputs, *inference)
    if in_training == in_inference:
        return []
    pairs = enumerate(itertools.zip_longest(in_training[:-1], in_inference[:-1]))
    first = next((index for index, (left, right) in pairs if left != right), len(in_training))
    calls = [*training[0][first : first + 1], *inference[0][first : first + 1]]
    differing = [block for call in calls for block in call.blocks[-1:]]
    return differing or [block for call in (*training[0], *inference[0]) for block in call.blocks]


def check_unchanged(model: keras.Model, graph: Graph) -> None:
    """Refuse a model whose `call` has changed since it was traced.

    Keras traces a model in its first step, after the first callbacks have run. A callback may have changed a number
    that `call` reads, such as the weight of a loss.

    Args:
        model: The model.
        graph: The result of `trace`.

    Raises:
        ValueError: If an operation has changed, or a constant among its arguments.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> check_unchanged(model, trace(model))
    """
    if graph.trace_record is None:
        return
    inputs, before, blocks = graph.trace_record
    with tf_function.outside_of_functions(), random_state.stand_in_generator(), keras_losses.collect_added_losses(list):
        recorded, outputs = _record(model, inputs, training=True, blocks=blocks)
    now = _descriptions(inputs, recorded, outputs)
    if now == before:
        return
    place = _first_difference(now, before, recorded)
    raise ValueError(
        f"A model that is divided over devices must keep the operations of its call, and those of "
        f"{type(model).__name__} differ {place} since the model was traced. A number that a callback changes, such as "
        "the weight of a loss, must be a variable: create it with self.add_weight(shape=(), trainable=False), and "
        "assign its values."
    )


def build(model: keras.Model, input_specs: Any = None) -> None:
    """Create the weights of a model that is not built yet.

    Args:
        model: Any model.
        input_specs: As for `trace`.

    Raises:
        ValueError: If the inputs of the model are unknown.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(8)])
        >>> build(model, keras.Input((4,)))
        >>> model.count_params()
        40
    """
    if not keras_tracing.is_built(model):
        inputs = _symbolic_inputs(model, input_specs)
        with _explained(model):
            model(inputs)


def standardize(model: keras.Model, inputs: Any) -> list[Any]:
    """Convert the inputs of a model into tensors for `Graph.inputs`.

    Args:
        model: The traced model.
        inputs: Tensors or arrays in the structure of the model's inputs.

    Returns:
        Tensors with the types and ranks of the declared inputs, without absent optional inputs.

    Raises:
        ValueError: From Keras, if the inputs do not match the declared ones.

    Example:
        >>> entries = {"left": keras.Input((4,), name="left"), "right": keras.Input((1,), name="right")}
        >>> model = keras.Model(entries, keras.layers.Concatenate()(list(entries.values())))
        >>> [tuple(tensor.shape) for tensor in standardize(model, {"right": np.ones(5), "left": np.ones((5, 4))})]
        [(5, 4), (5, 1)]
    """
    if keras_tracing.declared_inputs(model) is not None:
        tensors = keras_tracing.standardize_inputs(model, inputs)
    else:
        tensors = [leaf if leaf is None else keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(inputs)]
    return [tensor for tensor in tensors if tensor is not None]


# --- symbolic inputs --------------------------------------------------------------------------------------------------


def _symbolic_inputs(model: keras.Model, specs: Any, *, keeps_unknown: bool = False) -> Any:
    declared = keras_tracing.declared_inputs(model)
    if declared is None and specs is None:
        raise ValueError(
            f"The inputs of a model must be known before it is divided over devices, received {type(model).__name__} "
            f"{model.name!r} without any; begin it with keras.Input, or pass input_specs."
        )
    if declared is None:
        return keras.tree.map_structure(_symbolic, specs)
    passed = {
        key: entry for key, entry in _match_specs(declared, specs).items() if entry[0] is None or not keeps_unknown
    }
    return keras.tree.map_structure(lambda spec: _symbolic(spec, *passed.get(id(spec), ())), declared)


def _match_specs(declared: Any, specs: Any) -> dict[int, tuple[Any]]:
    """Return the spec for the `id` of each declared input, matched by name or by position."""
    flat = keras.tree.flatten(declared)
    if isinstance(specs, dict) and not isinstance(declared, dict):
        return {id(spec): (specs[spec.name],) for spec in flat if spec.name in specs}
    return {} if specs is None else {id(s): (spec,) for s, spec in zip(flat, keras.tree.flatten(specs), strict=False)}


def _symbolic(spec: Any, passed: Any = ...) -> Any:
    """Return a symbolic tensor with the declared type and rank. The passed spec fills in unknown dimensions."""
    if spec is None or passed is None:
        return None
    # The batch dimension stays unknown even if the model declares a batch size: micro-batches are smaller.
    sizes, passed_sizes = tuple(spec.shape)[1:], tuple(getattr(passed, "shape", ()))[1:]
    if len(sizes) == len(passed_sizes):
        sizes = tuple(known if size is None else size for size, known in zip(sizes, passed_sizes, strict=True))
    tensors = {"sparse": tf.SparseTensor, "ragged": tf.RaggedTensor}
    layout = {name: getattr(spec, name, False) or isinstance(spec, tensor) for name, tensor in tensors.items()}
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return keras.KerasTensor((None, *sizes), dtype, name=getattr(spec, "name", None) or "input", **layout)


# --- recording --------------------------------------------------------------------------------------------------------


def _record(model: keras.Model, inputs: Any, training: bool, blocks: _Blocks) -> tuple[list[Recorded], Any]:
    with _explained(model):
        return keras_tracing.record(model, inputs, training, blocks.opens, symbolic_sizes=blocks.symbolic_sizes)


@contextlib.contextmanager
def _explained(model: keras.Model) -> Iterator[None]:
    """Explain the error if the call of a model fails on symbolic tensors."""
    try:
        yield
    except Exception as error:
        if not keras_tracing.has_own_call(model):
            raise
        place = f"{place} raises " if (place := users_place(error)) else ""
        reason = textwrap.shorten(message_of(error).rstrip(".;"), width=400, placeholder=" ...")
        raise ValueError(
            "The call of a model that is divided over devices must run on symbolic tensors of any batch size, "
            f"received {type(model).__name__}, where: {place}{reason}; use keras.ops in place of tf, move code that "
            "needs real tensors into a keras.Layer, or build the model with keras.Model(inputs, outputs)."
        ) from error


def _check_same_calls(
    model: keras.Model,
    inputs: Any,
    training: tuple[Sequence[Recorded], Any],
    inference: tuple[Sequence[Recorded], Any],
) -> None:
    """Raise an error if the operations of a model differ between training and inference."""
    in_training, in_inference = _descriptions(inputs, *training), _descriptions(inputs, *inference)
    if in_training == in_inference:
        return
    place = _first_difference(in_training, in_inference, max(training[0], inference[0], key=len))
    raise ValueError(
        f"A model that is divided over devices must apply the same operations in training and in inference, received "
        f"{type(model).__name__}, where they differ {place}; move code that depends on training into a keras.Layer "
        "with the argument training."
    )


def _first_difference(left: Sequence[Any], right: Sequence[Any], calls: Sequence[Recorded]) -> str:
    """Describe where two descriptions first differ; `calls` are the layer calls of one of them."""
    common = range(min(len(left), len(right)) - 1)
    first = next((index for index in common if left[index] != right[index]), len(common))
    return f"at {'/'.join(calls[first].path)!r}" if first < len(calls) else "in their outputs"


def _descriptions(inputs: Any, recorded: Sequence[Recorded], outputs: Any) -> list[Any]:
    """Return comparable descriptions of the calls, and at the end of the outputs."""
    numbers = {id(tensor): number for number, tensor in enumerate(keras.tree.flatten(inputs)) if tensor is not None}

    def describe(structure: Any) -> list[Any]:
        leaves = keras.tree.flatten_with_path(structure)
        return [(path, numbers[id(leaf)] if id(leaf) in numbers else _constant(leaf)) for path, leaf in leaves]

    descriptions: list[Any] = []
    for call in recorded:
        descriptions.append((_identity(call.operation), describe((call.args, call.kwargs))))
        numbers |= {id(tensor): len(numbers) + index for index, tensor in enumerate(call.outputs)}
    return [*descriptions, describe(outputs)]


def _identity(operation: keras.Operation) -> Any:
    if isinstance(operation, keras.Layer):
        return id(operation)
    settings = {name: repr(value) for name, value in vars(operation).items() if name != "name" and name[0] != "_"}
    return type(operation), settings


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable) or not hasattr(leaf, "shape"):
        return id(leaf) if isinstance(leaf, keras.Variable) else repr(leaf)
    return hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
