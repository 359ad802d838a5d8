"""The state of a model, by the names of layers and slots and without a layout: read, hash and restore it."""

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
from tfpar.checkpoint.model_differences import refusal
from tfpar.checkpoint.remote_arrays import RemoteArray
from tfpar.reduction import objective

PACK_BYTES = 4 << 20
Assign = Callable[[keras.Variable, Any], Any]
Array = np.ndarray | RemoteArray


def state_variables(model: keras.Model) -> dict[str, Any]:
    """Return every variable of a model, its optimizers and its metrics by name.

    Numbers that Keras appends to repeated names in a process are removed, so that the same model function gives the
    same names. Equal names are then numbered in order.

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
    """Return the names of the state variables by their `id`."""
    return {id(variable): name for name, variable in state_variables(model).items()}


def describe(model: keras.Model) -> str:
    """Return a line with name, shape and type for each state variable."""
    variables = state_variables(model)
    return "".join(f"{name} {tuple(variable.shape)} {variable.dtype}\n" for name, variable in variables.items())


def read_weights(model: keras.Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and a copy of each weight and random state, but no optimizer state, which may be sharded."""
    for name, variable in state_variables(model).items():
        if name.startswith("weights/"):
            yield name, _array(variable)


def read_at_once(model: keras.Model, without: Collection[str] = ()) -> tuple[dict[str, np.ndarray], bool]:
    """Return copies of the state variables by name, and whether the weights are finite.

    Args:
        model: A built and compiled model.
        without: Names of variables to leave out.
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
    """Return a copy of a variable, or the array collected for it from another process."""
    lent = sharded_memory.lent_array(variable)
    return storable(np.asarray(variable.numpy() if lent is None else lent))


def storable(array: np.ndarray) -> np.ndarray:
    """Return an array in a type that NumPy can store: bfloat16 becomes float32."""
    return array.astype("float32") if array.dtype.kind == "V" or array.dtype.name == "bfloat16" else array


def assign_arrays(
    variables: dict[str, Any], arrays: Mapping[str, Array], origin: str, assign: Assign = keras.Variable.assign
) -> None:
    """Set state variables of a model.

    Args:
        variables: State variables by name.
        arrays: The value of each of these variables, by the same names.
        origin: Where the arrays are from, to begin the error message with.
        assign: Sets a variable. `Engine.assign` sets a metric variable on one replica, as replicas are summed.

    Raises:
        ValueError: If names, shapes or types do not match; then no variable is set.
    """
    saved = {name: array.shape for name, array in arrays.items()}
    expected = {name: tuple(variable.shape) for name, variable in variables.items()}
    if saved != expected:
        raise ValueError(f"{origin} {refusal(saved, expected)}")
    converted = {name: _convert(name, arrays[name], variable, origin) for name, variable in variables.items()}
    for name, variable in variables.items():
        array = converted[name]
        if isinstance(array, RemoteArray):
            with tf.device(array.host):
                assign(variable, array.tensor)
        else:
            assign(variable, array)


def assign_replica_metrics(model: keras.Model, replica_metrics: dict[str, np.ndarray], assign: Assign) -> None:
    """Set the metric variables on each replica where shapes match; `assign_arrays` has set their sums.

    Args:
        model: A built and compiled model.
        replica_metrics: Values `[replicas, ...]` by name.
        assign: Sets a variable on each replica if their number matches.
    """
    for name, variable in state_variables(model).items():
        values = replica_metrics.get(name)
        if values is None or not values.ndim or values.shape[1:] != tuple(variable.shape):
            continue
        dtype = _numpy_type(variable)
        if np.can_cast(values.dtype, dtype, "same_kind"):
            assign(variable, values.astype(dtype))


def _numpy_type(variable: Any) -> np.dtype[Any]:
    """Return the NumPy type of a variable; float32 for bfloat16, which NumPy lacks."""
    return np.dtype("float32" if variable.dtype == "bfloat16" else variable.dtype)


def _convert(name: str, array: Array, variable: Any, origin: str) -> Array:
    """Convert an array to the type of its variable; raise an error if a number is out of range."""
    dtype = _numpy_type(variable)
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(
            f"{origin} is of another model: {name!r} is {array.dtype} there and {variable.dtype} in this model. Resume "
            "with the model that wrote it, or use another directory."
        )
    if array.dtype == dtype:
        return array
    converted: Array
    if isinstance(array, RemoteArray):
        converted = array.astype(dtype)
        fits = converted.is_as_finite_as(array)
    else:
        with np.errstate(over="ignore"):
            converted = array.astype(dtype)
        fits = bool(np.array_equal(np.isfinite(converted), np.isfinite(array)))
    if not fits:
        raise ValueError(
            f"{origin} holds numbers in {name!r} that {variable.dtype} cannot hold. Resume with the precision that it "
            "was written with, or use another directory."
        )
    return converted


def packs(model: keras.Model, pack_bytes: int = PACK_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the state variables of a model by name, in packs for broadcast.

    Variables that a single worker holds are excluded.

    Args:
        model: A built and compiled model.
        pack_bytes: Size at which a pack ends.

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
        size_bytes += math.prod(variable.shape) * _numpy_type(variable).itemsize
        if size_bytes >= pack_bytes:
            yield pack
            pack, size_bytes = {}, 0
    if pack:
        yield pack


def to_bytes(variables: dict[str, Any]) -> bytes:
    """Return the values of state variables, by name, as bytes for a broadcast."""
    return file_format.encode((name, _array(variable)) for name, variable in variables.items())


def assign_bytes(variables: dict[str, Any], blob: bytes, assign: Assign = keras.Variable.assign) -> None:
    """Set state variables to the values that `to_bytes` returned on the chief.

    Args:
        variables: State variables by name.
        blob: The bytes.
        assign: As for `assign_arrays`.

    Raises:
        ValueError: If the bytes are the state of another model, or damaged.
    """
    assign_arrays(variables, file_format.decode(blob), "The chief's state", assign)


def digest(model: keras.Model) -> str:
    """Return the SHA-256 of weights, optimizer and random state, as 64 hexadecimal digits.

    Metrics, which differ between workers, and variables that a single worker holds are excluded.
    """
    total = hashlib.sha256()
    for name, variable in state_variables(model).items():
        if name.startswith("metrics/") or keras_sharded_slots.holder_of(variable) is not None:
            continue
        array = _array(variable)
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()
