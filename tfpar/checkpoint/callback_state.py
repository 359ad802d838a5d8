"""The state of Keras callbacks, read from their attributes and restored in another process."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfpar._compat import keras_callbacks

State = dict[str, dict[str, Any]]


def read(callbacks: Sequence[keras.callbacks.Callback]) -> State:
    """Return the attributes of each callback that are numbers, strings, arrays, or lists or dicts of these.

    Callbacks with an attribute `forgets = True` and arrays of Python objects are left out.
    """
    return {
        key: {
            name: _copy(value)
            for name, value in vars(callback).items()
            if name not in keras_callbacks.NOT_STATE and _is_plain(value)
        }
        for key, callback in _by_key(callbacks)
    }


def _by_key(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yield each callback with its key: its class and its index among the callbacks of that class."""
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, keras.callbacks.ProgbarLogger) and not getattr(callback, "forgets", False):
            yield f"{name}.{counts[name]}", callback
        counts[name] += 1


def changed(state: State, initial: State) -> State:
    """Return the attributes that differ from their initial values."""
    return {
        key: {
            name: value
            for name, value in attributes.items()
            if name not in initial[key] or not _equal(value, initial[key][name])
        }
        for key, attributes in state.items()
    }


def restore(callbacks: Sequence[keras.callbacks.Callback], state: State) -> None:
    """Set the saved attributes on callbacks of the same classes.

    Raises:
        ValueError: If a saved attribute is not state, such as a method.
    """
    for key, callback in _by_key(callbacks):
        for name, value in state.get(key, {}).items():
            inherited = getattr(type(callback), name, None)
            if name in keras_callbacks.NOT_STATE or callable(inherited) or hasattr(inherited, "__set__"):
                raise ValueError(
                    f"The checkpoint's state of {key} sets {name[:40]!r}, which is not state of a callback: the "
                    "file was changed. Resume from an unchanged checkpoint."
                )
            setattr(callback, name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, np.ndarray | np.generic):
        return not value.dtype.hasobject
    return value is None or isinstance(value, bool | int | float | str)


def _copy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(_equal(a, b) for a, b in zip(value, other, strict=True))
    return bool(value == other)


def extract_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as JSON: NumPy scalars become bytes; arrays move to `arrays`, and leave their names."""
    if isinstance(value, np.generic):  # before numbers and text: np.float64 is a float, np.str_ is a str
        return {"scalar": [_type_name(value.dtype), value.tobytes().hex()]}
    if isinstance(value, np.ndarray):
        name = f"callbacks/{len(arrays)}"
        arrays[name] = value
        return {"array": [_type_name(value.dtype), name]}
    if isinstance(value, dict):
        return {key: extract_arrays(item, arrays) for key, item in value.items()}
    return [extract_arrays(item, arrays) for item in value] if isinstance(value, list) else value


def insert_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Undo `extract_arrays`.

    Raises:
        KeyError: If an array is missing.
        TypeError, ValueError: If a type is unknown or of another size, or bytes cannot be parsed.
    """
    if isinstance(value, dict):
        match value:
            case {"array": [str(kind), str(name)]} if len(value) == 1 and name.startswith("callbacks/"):
                array = arrays[name]
                return array.view(kind) if array.dtype.kind == "V" and array.dtype.names is None else array
            case {"scalar": [str(kind), str(content)]} if len(value) == 1:
                return _scalar(kind, bytes.fromhex(content))
        return {key: insert_arrays(item, arrays) for key, item in value.items()}
    return [insert_arrays(item, arrays) for item in value] if isinstance(value, list) else value


def _type_name(dtype: np.dtype[Any]) -> str:
    """Return a name that NumPy can parse; in files, types of other packages such as bfloat16 are `V2`."""
    return dtype.name if dtype.isbuiltin == 2 else dtype.str


def _scalar(kind: str, content: bytes) -> Any:
    dtype = np.dtype(kind)
    if dtype.hasobject:
        raise ValueError(f"no run writes the type {kind[:20]}")
    return np.ndarray((), dtype, content)[()]
