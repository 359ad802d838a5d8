"""The state of Keras callbacks: read from their attributes, and restored in another process."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfpar._compat import keras_callbacks

State = dict[str, dict[str, Any]]


def remembered(callbacks: Sequence[keras.callbacks.Callback]) -> State:
    """Return the state of callbacks: attributes that are numbers, text, arrays, and lists or dicts of these.

    The state of a callback with an attribute `forgets = True` is not saved.

    Args:
        callbacks: Any Keras callbacks.

    Returns:
        For each callback its attributes by name.
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
    """Yield each callback with its key: its class and its index among those of its class."""
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, keras.callbacks.ProgbarLogger) and not getattr(callback, "forgets", False):
            yield f"{name}.{counts[name]}", callback
        counts[name] += 1


def changed(state: State, initial: State) -> State:
    """Return the attributes that training changed from their initial values."""
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
        ValueError: If a saved attribute is not state of a callback, such as a method.
    """
    for key, callback in _by_key(callbacks):
        for name, value in state.get(key, {}).items():
            inherited = getattr(type(callback), name, None)
            if name in keras_callbacks.NOT_STATE or callable(inherited) or hasattr(inherited, "__set__"):
                raise ValueError(
                    f"The checkpoint's state of {key} sets {name[:40]!r}, which is no state of a callback: the "
                    "file was changed. Resume from an unchanged checkpoint."
                )
            setattr(callback, name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic)


def _copy(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(_equal(a, b) for a, b in zip(value, other, strict=True))
    return bool(value == other)


def extract_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Replace arrays by names, so that the rest is JSON, and add them to `arrays` under these names."""
    if isinstance(value, np.ndarray):
        name = f"callbacks/{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, dict):
        return {key: extract_arrays(item, arrays) for key, item in value.items()}
    return [extract_arrays(item, arrays) for item in value] if isinstance(value, list) else value


def insert_arrays(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Replace the names that `extract_arrays` returned by their arrays.

    Raises:
        KeyError: If an array is missing.
    """
    if isinstance(value, dict):
        name = value.get("array")
        if len(value) == 1 and isinstance(name, str) and name.startswith("callbacks/"):
            return arrays[name]
        return {key: insert_arrays(item, arrays) for key, item in value.items()}
    return [insert_arrays(item, arrays) for item in value] if isinstance(value, list) else value
