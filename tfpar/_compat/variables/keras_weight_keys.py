"""Weights that an optimizer excludes from weight decay, also after their memory was allocated again.

`exclude_from_weight_decay(var_list=...)` of Keras 3.15 stores the key of the memory of each weight
(keras/src/backend/tensorflow/optimizer.py). A weight without memory has none, and a moved weight has another one.
"""

from __future__ import annotations

from typing import Any

from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer

_OF_TFPAR = "_tfpar_keys_without_memory"


def give_keys_without_memory() -> None:
    """Give weights without memory a key too, from now on."""
    original = TFOptimizer._var_key
    if getattr(original, _OF_TFPAR, False):
        return

    def key_of(optimizer: Any, variable: Any) -> Any:
        without_memory = isinstance(variable, Variable) and variable._value is None
        return _key_without_memory(variable) if without_memory else original(optimizer, variable)

    setattr(key_of, _OF_TFPAR, True)
    TFOptimizer._var_key = key_of


def note_key(variable: Any) -> None:
    """Note the key of a variable before its memory is allocated again.

    Args:
        variable: A Keras variable, perhaps without memory.
    """
    key = _key_without_memory(variable) if variable._value is None else getattr(variable._value, "_unique_id", None)
    variable._tfpar_keys = {*_former_keys(variable), key}


def is_excluded(optimizer: Any, variable: Any) -> bool:
    """Return whether an optimizer excludes a weight from weight decay by a key of its former memory.

    Args:
        optimizer: An optimizer, without others that it wraps.
        variable: A Keras variable.
    """
    return not _former_keys(variable).isdisjoint(getattr(optimizer, "_exclude_from_weight_decay", ()))


def _former_keys(variable: Any) -> set[Any]:
    return getattr(variable, "_tfpar_keys", set())


def _key_without_memory(variable: Any) -> str:
    return f"tfpar_{id(variable)}"
