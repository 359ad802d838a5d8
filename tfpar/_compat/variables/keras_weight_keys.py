"""Keeps weights excluded from weight decay when their memory is replaced.

In Keras 3.15, `exclude_from_weight_decay(var_list=...)` stores the key of each weight's memory
(keras/src/backend/tensorflow/optimizer.py). A weight without memory has no key, and a moved weight gets a new one.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer

_OF_TFPAR = "_tfpar_keys_without_memory"


def give_keys_without_memory() -> None:
    """Give weights without memory a key as well, from now on."""
    original = TFOptimizer._var_key
    if getattr(original, _OF_TFPAR, False):
        return

    def key_of(optimizer: Any, variable: Any) -> Any:
        without_memory = isinstance(variable, Variable) and variable._value is None
        return _key_without_memory(variable) if without_memory else original(optimizer, variable)

    setattr(key_of, _OF_TFPAR, True)
    TFOptimizer._var_key = key_of


def note_key(variable: Any) -> None:
    """Record the key of a variable before its memory is replaced.

    Args:
        variable: A Keras variable, allocated or not.
    """
    key = _key_without_memory(variable) if variable._value is None else getattr(variable._value, "_unique_id", None)
    variable._tfpar_keys = {*_former_keys(variable), key}


def is_excluded(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer excluded a weight from weight decay before its memory was replaced.

    Args:
        optimizer: An innermost optimizer.
        variable: A Keras variable.
    """
    return not _former_keys(variable).isdisjoint(getattr(optimizer, "_exclude_from_weight_decay", ()))


def _former_keys(variable: Any) -> set[Any]:
    return getattr(variable, "_tfpar_keys", set())


def _key_without_memory(variable: Any) -> str:
    return f"tfpar_{id(variable)}"
