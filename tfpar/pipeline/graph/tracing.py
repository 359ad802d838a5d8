"""A Keras model as data: the operations it applies, in order, and the tensors that flow between them.

    model                            graph
    ┌ encoder ────────┐              embed ── encoder/dense ── encoder/norm ─┐
  ──│ embed dense norm│── head ──      └──────────────────────────────── add ┴─ head
    └─────────────────┘

A model is run once on symbolic tensors, so that nested models open up and a `call` of one's own is read as well.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_model, keras_tracing
from tfpar._compat.keras_tracing import Recorded
from tfpar.pipeline.graph.ir import Call, Graph, Value, run
from tfpar.pipeline.graph.topological_order import build_graph

__all__ = ["Call", "Graph", "Value", "build", "run", "standardize", "trace"]


def trace(model: keras.Model, input_specs: Any = None) -> Graph:
    """Read a model's operations in order, those of nested models too.

    Args:
        model: Functional, Sequential, or a subclass whose `call` uses layers and `keras.ops`.
        input_specs: Anything with `shape` and `dtype` for each input, the batch first, in the structure that the
            model is called with; needed for a model without declared inputs. To others it adds sizes that they leave
            open, and a None says that an optional input is not given.

    Returns:
        The graph. It shares the layers of the model.

    Raises:
        ValueError: If the inputs of the model are not known, or its `call` cannot be read or depends on `training`.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="hidden")])
        >>> [call.name for call in trace(model).calls]
        ['hidden']
    """
    if keras_tracing.has_own_ending(model):
        raise ValueError(
            f"A model that is cut into stages must end with its outputs, received {type(model).__name__} with a "
            "compute_mask or activity_regularizer of its own; move that into a layer at its end."
        )
    build(model, input_specs)
    inputs = _symbolic_inputs(model, input_specs)
    recorded, outputs = _record(model, inputs, training=True)
    told: list[bool | None] = [None] * len(recorded)
    if any(
        isinstance(layer, keras.Model) and keras_tracing.has_own_call(layer) for layer in keras_model.all_layers(model)
    ):
        inference = _record(model, inputs, training=False)
        _check_alike(model, inputs, (recorded, outputs), inference)
        both = zip(recorded, inference[0], strict=True)
        told = [one.training if one.training == other.training else None for one, other in both]
    return build_graph(inputs, recorded, told, outputs)


def build(model: keras.Model, input_specs: Any = None) -> None:
    """Let a model make the weights that wait for the shapes of its inputs.

    Args:
        model: Any model.
        input_specs: As for `trace`.

    Raises:
        ValueError: If the inputs of the model are not known.
    """
    if not keras_tracing.is_built(model):
        model(_symbolic_inputs(model, input_specs))


def standardize(model: keras.Model, inputs: Any) -> list[Any]:
    """Convert what a model is called with into the tensors of `Graph.inputs`, in their order.

    Args:
        model: The model that was traced.
        inputs: Tensors or arrays, as the model takes them: one, or a list, tuple or dict.

    Returns:
        Tensors of the dtype and rank of the declared inputs; an optional input that is None is left out.

    Raises:
        ValueError: Keras' own, if the inputs do not fit the declared ones.
    """
    if keras_tracing.declared_inputs(model) is not None:
        tensors = keras_tracing.standardize_inputs(model, inputs)
    else:
        tensors = [leaf if leaf is None else keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(inputs)]
    return [tensor for tensor in tensors if tensor is not None]


# --- what goes in -----------------------------------------------------------------------------------------------------


def _symbolic_inputs(model: keras.Model, specs: Any) -> Any:
    declared = keras_tracing.declared_inputs(model)
    if declared is None and specs is None:
        raise ValueError(
            f"The inputs of a model must be known before it is cut into stages, received {type(model).__name__} "
            f"{model.name!r} without any; begin it with keras.Input, or pass input_specs."
        )
    if declared is None:
        return keras.tree.map_structure(_symbolic, specs)
    given = _by_place(declared, specs)
    return keras.tree.map_structure(lambda spec: _symbolic(spec, *given.get(id(spec), ())), declared)


def _by_place(declared: Any, specs: Any) -> dict[int, tuple[Any]]:
    """Return what `specs` has for each declared input, by its `id`; specs may come by name or by place."""
    flat = keras.tree.flatten(declared)
    if isinstance(specs, dict) and not isinstance(declared, dict):
        return {id(spec): (specs[spec.name],) for spec in flat if spec.name in specs}
    return {} if specs is None else {id(s): (given,) for s, given in zip(flat, keras.tree.flatten(specs), strict=False)}


def _symbolic(spec: Any, given: Any = ...) -> Any:
    """Return a symbolic tensor with the declared dtype and rank, and with the sizes of what is given."""
    if spec is None or given is None:
        return None
    # Micro-batches are of any size, whatever batch size the model declares.
    sizes, known = tuple(spec.shape)[1:], tuple(getattr(given, "shape", ()))[1:]
    if len(sizes) == len(known):
        sizes = tuple(there if size is None else size for size, there in zip(sizes, known, strict=True))
    tensors = {"sparse": tf.SparseTensor, "ragged": tf.RaggedTensor}
    kinds = {kind: getattr(spec, kind, False) or isinstance(spec, tensor) for kind, tensor in tensors.items()}
    dtype = keras.backend.standardize_dtype(spec.dtype)
    return keras.KerasTensor((None, *sizes), dtype, name=getattr(spec, "name", None) or "input", **kinds)


# --- what happens to it -----------------------------------------------------------------------------------------------


def _record(model: keras.Model, inputs: Any, training: bool) -> tuple[list[Recorded], Any]:
    try:
        return keras_tracing.record(model, inputs, training)
    except Exception as error:
        if not keras_tracing.has_own_call(model):
            raise
        reason = textwrap.shorten(str(error).rstrip(".;"), width=400, placeholder=" ...")
        raise ValueError(
            f"The call of a model that is cut into stages must run on symbolic tensors, received "
            f"{type(model).__name__}, where: {reason}; use keras.ops in place of tf, move what needs real "
            "tensors into a keras.Layer of its own, or build the model with keras.Model(inputs, outputs)."
        ) from error


def _check_alike(
    model: keras.Model,
    inputs: Any,
    training: tuple[Sequence[Recorded], Any],
    inference: tuple[Sequence[Recorded], Any],
) -> None:
    """Refuse a model that applies other operations in training than in inference."""
    one, other = _described(inputs, *training), _described(inputs, *inference)
    if one == other:
        return
    common = range(min(len(one), len(other)) - 1)
    first = next((index for index in common if one[index] != other[index]), len(common))
    calls = max(training[0], inference[0], key=len)
    place = f"at {'/'.join(calls[first].path)!r}" if first < len(calls) else "in what it returns"
    raise ValueError(
        f"A model that is cut into stages must apply the same operations in training and in inference, received "
        f"{type(model).__name__}, where they differ {place}; move what depends on training into a keras.Layer whose "
        "call takes it."
    )


def _described(inputs: Any, recorded: Sequence[Recorded], outputs: Any) -> list[Any]:
    """Describe each call, and at the end the outputs, so that equal ones of two runs have equal descriptions."""
    numbers = {id(tensor): number for number, tensor in enumerate(keras.tree.flatten(inputs)) if tensor is not None}

    def described(structure: Any) -> list[Any]:
        leaves = keras.tree.flatten_with_path(structure)
        return [(path, numbers[id(leaf)] if id(leaf) in numbers else _constant(leaf)) for path, leaf in leaves]

    descriptions: list[Any] = []
    for call in recorded:
        descriptions.append((_identity(call.operation), described((call.args, call.kwargs))))
        numbers |= {id(tensor): len(numbers) + index for index, tensor in enumerate(call.outputs)}
    return [*descriptions, described(outputs)]


def _identity(operation: keras.Operation) -> Any:
    if isinstance(operation, keras.Layer):
        return id(operation)
    settings = {name: repr(value) for name, value in vars(operation).items() if name != "name" and name[0] != "_"}
    return type(operation), settings


def _constant(leaf: Any) -> Any:
    if isinstance(leaf, keras.Variable) or not hasattr(leaf, "shape"):
        return id(leaf) if isinstance(leaf, keras.Variable) else repr(leaf)
    return np.asarray(leaf).tobytes()
