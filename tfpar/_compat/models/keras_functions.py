"""Retracing of Keras' own train, test and predict functions after weights have moved to other devices.

Keras 3.15 caches these functions until the model is compiled again (keras/src/backend/tensorflow/trainer.py), and they
reference the variables of the time of tracing. A strategy replaces the variables, also those of layers shared with
other models, such as the encoder of an autoencoder.
"""

from __future__ import annotations

import functools
from typing import Any

from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tfpar._compat import versions
from tfpar._compat.variables import keras_variables

_IS_PATCHED = "_tfpar_follows_moves"
_MOVES = "_tfpar_moves"
_MADE_BY = {
    "make_train_function": "train_function",
    "make_test_function": "test_function",
    "make_predict_function": "predict_function",
}


def trace_again_after_moves() -> None:
    """From now on, make Keras recreate the functions of a model whose weights have moved."""
    if hasattr(TensorFlowTrainer.make_train_function, _IS_PATCHED):
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

    setattr(make, _IS_PATCHED, True)
    return make
