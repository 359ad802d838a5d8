"""The state of a model by name: read, hash, serialize and restore it.

State has no layout: it is stored by the names of layers and slots, not by device, replica or worker.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.optimizers import keras_sharded_slots
from tfpar._compat.variables import sharded_memory
from tfpar.checkpoint import file_format, host_copies
from tfpar.checkpoint.held_arrays import HeldArray
from tfpar.checkpoint.model_differences import refusal
from tfpar.reduction import objective

PACK_BYTES = 4 << 20
Assign = Callable[[keras.Variable, Any], Any]
Array = np.ndarray | HeldArray


def state_variables(model: keras.Model) -> dict[str, Any]:
    """Return every variable of a training run by name: weights and random state, optimizer, metrics.

    The names are those of layers and slots, without the suffix numbers that Keras adds to repeated names in one
    process, so that the same model function gives the same names. Equal names are numbered in order.

    Args:
        model: A built model, compiled or not.
    """
    optimizers = [model.optimizer, *(optimizer for optimizer, _ in objective.updates_of(model))]
    groups = {
        "weights": model.variables,
        "optimizer": [
            variable for optimizer in optimizers if optimizer is not None for variable in optimizer.variables
        ],
        "metrics": [variable for metric in model.metrics for variable in metric.variables],
    }
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for group, variables in groups.items():
        for variable in variables:
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            path = re.sub(r"_\d+(?=[_/]|$)", "", variable.path)
            name, count = f"{group}/{path}", 1
            while name in named:
                count += 1
                name = f"{group}/{path}#{count}"
            named[name] = variable
    return named


def names(model: keras.Model) -> dict[int, str]:
    """Return the name of every state variable by its `id`."""
    return {id(variable): name for name, variable in state_variables(model).items()}


def describe(model: keras.Model) -> str:
    """Return a line for each state variable: its name, shape and type."""
    variables = state_variables(model)
    return "".join(f"{name} {tuple(variable.shape)} {variable.dtype}\n" for name, variable in variables.items())


def read_weights(model: keras.Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a copy of every weight and random state with its name, one after another.

    Optimizer state is left out: with `shard="optimizer"` another worker may hold it.
    """
    for name, variable in state_variables(model).items():
        if name.startswith("weights/"):
            yield name, _array(variable)


def read_at_once(model: keras.Model, without: Collection[str] = ()) -> tuple[dict[str, np.ndarray], bool]:
    """Return copies of all variables by name, and whether all weights among them are finite.

    Values on GPUs are copied together, and checked there.

    Args:
        model: A built and compiled model.
        without: Names of variables that are not copied.
    """
    variables = {name: variable for name, variable in state_variables(model).items() if name not in without}
    copies, finite = host_copies.copy_to_host(model, variables)
    arrays: dict[str, np.ndarray] = {}
    for name, variable in variables.items():
        if not finite:
            break
        if name in copies:
            arrays[name] = storable(copies[name])
            continue
        arrays[name] = _array(variable)
        if name.startswith("weights/"):
            finite = bool(np.isfinite(arrays[name]).all())
    return arrays, finite


def _array(variable: Any) -> np.ndarray:
    """Return a copy of a variable, or the array that another process has lent to it."""
    lent = sharded_memory.lent_array(variable)
    return storable(np.asarray(variable.numpy() if lent is None else lent))


def storable(array: np.ndarray) -> np.ndarray:
    """Return an array in a type that NumPy can store: bfloat16 becomes float32, without rounding."""
    return array.astype("float32") if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def assign_arrays(
    variables: dict[str, Any], arrays: Mapping[str, Array], origin: str, assign: Assign = keras.Variable.assign
) -> None:
    """Set state variables of a model.

    Args:
        variables: State variables by name, as `state_variables` returns them.
        arrays: The array of each of these variables by name, and no other; those of variables of another process in
            that process.
        origin: The origin of the arrays for the message; it begins a sentence.
        assign: Sets a variable; that of a strategy sets a metric variable on one replica, as replicas are summed.

    Raises:
        ValueError: If names, shapes or types are those of another model or optimizer; then no variable is set.
    """
    saved = {name: array.shape for name, array in arrays.items()}
    wanted = {name: tuple(variable.shape) for name, variable in variables.items()}
    if saved != wanted:
        raise ValueError(f"{origin} {refusal(saved, wanted)}")
    converted = {name: _convert(name, arrays[name], variable, origin) for name, variable in variables.items()}
    for name, variable in variables.items():
        array = converted[name]
        if isinstance(array, HeldArray):
            with tf.device(array.host):
                assign(variable, array.tensor)
        else:
            assign(variable, array)


def assign_parts(model: keras.Model, parts: dict[str, np.ndarray], assign: Assign) -> None:
    """Set the metric variables of each replica, where shapes match; their sums are set already.

    Args:
        model: A built and compiled model.
        parts: `[replicas, ...]` by name.
        assign: Sets the variable of each replica, if the number of replicas matches.
    """
    for name, variable in state_variables(model).items():
        values = parts.get(name)
        if values is not None and values.shape[1:] == tuple(variable.shape) and _holds(variable, values):
            assign(variable, values.astype(_kind(variable)))


def _kind(variable: Any) -> np.dtype[Any]:
    """Return the NumPy type of a variable; float32 for bfloat16, which NumPy does not have."""
    return np.dtype("float32" if variable.dtype == "bfloat16" else variable.dtype)


def _holds(variable: Any, array: np.ndarray) -> bool:
    return array.ndim > 0 and bool(np.can_cast(array.dtype, _kind(variable), "same_kind"))


def _convert(name: str, array: Array, variable: Any, origin: str) -> Array:
    """Return an array in the type of its variable, or refuse one with numbers beyond the range of that type."""
    kind = _kind(variable)
    if not np.can_cast(array.dtype, kind, "same_kind"):
        raise ValueError(
            f"{origin} is of another model: {name!r} is {array.dtype} there and {variable.dtype} in this model. Resume "
            "with the model that wrote it, or use another directory."
        )
    if array.dtype == kind:
        return array
    converted: Array
    if isinstance(array, HeldArray):
        converted = array.astype(kind)
        fits = converted.is_as_finite_as(array)
    else:
        with np.errstate(over="ignore"):
            converted = array.astype(kind)
        fits = bool(np.array_equal(np.isfinite(converted), np.isfinite(array)))
    if not fits:
        raise ValueError(
            f"{origin} holds numbers in {name!r} that {variable.dtype} cannot hold. Resume with the precision that it "
            "was written with, or use another directory."
        )
    return converted


def packs(model: keras.Model, pack_bytes: int = PACK_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the state variables of a model by name, in packs of about a given size or of one larger variable.

    Variables that one worker alone holds are excluded.

    Args:
        model: A built and compiled model.
        pack_bytes: The size.

    Example:
        >>> len(list(packs(model, pack_bytes=1 << 30)))
        1
    """
    pack: dict[str, Any] = {}
    size_bytes = 0
    for name, variable in state_variables(model).items():
        if keras_sharded_slots.holder_of(variable) is not None:
            continue
        pack[name] = variable
        size_bytes += math.prod(variable.shape) * _kind(variable).itemsize
        if size_bytes >= pack_bytes:
            yield pack
            pack, size_bytes = {}, 0
    if pack:
        yield pack


def to_bytes(variables: dict[str, Any]) -> bytes:
    """Return the values of state variables as bytes, to broadcast those of the chief.

    Args:
        variables: State variables by name.
    """
    return file_format.encode((name, _array(variable)) for name, variable in variables.items())


def assign_bytes(variables: dict[str, Any], blob: bytes, assign: Assign = keras.Variable.assign) -> None:
    """Set state variables to the values of `to_bytes`.

    Args:
        variables: State variables by name.
        blob: The bytes.
        assign: Sets a variable, as for `assign_arrays`.

    Raises:
        ValueError: If it is the state of another model, or damaged.
    """
    assign_arrays(variables, file_format.decode(blob), "The chief's state", assign)


def digest(model: keras.Model) -> str:
    """Return a SHA-256 of weights, optimizer and random state: equal on two workers if all of these are equal.

    Metrics are excluded, since every worker counts its own examples, and variables that one worker alone holds.

    Args:
        model: A built and compiled model.

    Returns:
        64 hexadecimal digits.
    """
    total = hashlib.sha256()
    for name, variable in state_variables(model).items():
        if name.startswith("metrics/") or keras_sharded_slots.holder_of(variable) is not None:
            continue
        array = _array(variable)
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()
