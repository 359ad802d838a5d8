"""The functions of Keras' own `fit`, `evaluate` and `predict`, traced again after weights have moved.

Written for Keras 3.15 (keras/src/backend/tensorflow/trainer.py). A model keeps them until it is compiled, and they hold
the memory that its weights had when they were traced. A strategy allocates it again, also that of layers that other
models share, such as the encoder of an autoencoder.
"""

from __future__ import annotations

import functools
from typing import Any

from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfpar._compat import versions
from tfpar._compat.variables import keras_variables

_OF_TFPAR = "_tfpar_follows_moves"
_MOVES = "_tfpar_moves"
_MADE_BY = {
    "make_train_function": "train_function",
    "make_test_function": "test_function",
    "make_predict_function": "predict_function",
}


def trace_again_after_moves() -> None:
    """Let Keras make the functions of any model again where its weights have moved since, from now on."""
    if hasattr(TensorFlowTrainer.make_train_function, _OF_TFPAR):
        return
    for method, name in _MADE_BY.items():
        versions.replace(TensorFlowTrainer, method, _following_moves(getattr(TensorFlowTrainer, method), name))


def _following_moves(original: Any, name: str) -> Any:
    @functools.wraps(original)
    def make(model: Any, force: bool = False) -> Any:
        out_of_scope = versions.private(model, "_distribute_strategy") is None
        if name == "train_function" and out_of_scope and any(map(keras_variables.home_of, model.variables)):
            raise ValueError(
                f"fit of {model.name!r} is Keras' own, which does not train layers that a trainer has on several "
                f"devices. Use tfpar.fit({model.name}, ...)."
            )
        before = versions.private(model, name)
        num_moves = keras_variables.num_moves(model.variables)
        has_moved = before is not None and getattr(before, _MOVES, 0) != num_moves
        made = original(model, force=force or has_moved)
        function = getattr(model, name)
        if function is not before:
            setattr(function, _MOVES, num_moves)
        return made

    setattr(make, _OF_TFPAR, True)
    return make
