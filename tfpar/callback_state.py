"""What callbacks remember: taken out of any Keras callback, and given back to one like it in another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

State = dict[str, dict[str, Any]]


def remembered(callbacks: Sequence[keras.callbacks.Callback]) -> State:
    """Return what callbacks remember, as far as it is numbers, text, arrays and lists or dicts of these.

    Args:
        callbacks: Any Keras callbacks.

    Returns:
        For each callback (by class name and place) its attributes by name.
    """
    state = {}
    for index, callback in enumerate(callbacks):
        if not isinstance(callback, keras.callbacks.ProgbarLogger):
            attributes = {name: value for name, value in vars(callback).items() if name not in ("params", "_model")}
            plain = {name: _copy(value) for name, value in attributes.items() if _is_plain(value)}
            state[f"{index}.{type(callback).__name__}"] = plain
    return state


def changed(state: State, initial: State) -> State:
    """Return the attributes that differ from their initial values: what training changed, not what the user set."""
    return {
        key: {
            name: value
            for name, value in attributes.items()
            if name not in initial[key] or not _equal(value, initial[key][name])
        }
        for key, attributes in state.items()
    }


def restore(callbacks: Sequence[keras.callbacks.Callback], state: State) -> None:
    """Give callbacks of the same classes at the same places their saved attributes."""
    for index, callback in enumerate(callbacks):
        for name, value in state.get(f"{index}.{type(callback).__name__}", {}).items():
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
    """Replace arrays by the names under which they are put into `arrays`, so that the rest is JSON."""
    if isinstance(value, np.ndarray):
        name = f"callbacks/{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, dict):
        return {key: extract_arrays(item, arrays) for key, item in value.items()}
    return [extract_arrays(item, arrays) for item in value] if isinstance(value, list) else value


def insert_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Put the arrays back that `extract_arrays` took out."""
    if isinstance(value, dict):
        if set(value) == {"array"}:
            return arrays[value["array"]]
        return {key: insert_arrays(item, arrays) for key, item in value.items()}
    return [insert_arrays(item, arrays) for item in value] if isinstance(value, list) else value
