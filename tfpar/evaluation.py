"""One evaluation and one prediction: steps and callbacks in Keras' order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar.calls import Caller, to_python
from tfpar.strategies import Strategy
from tfpar.stream import Stream


def evaluate(caller: Caller) -> dict[str, Any]:
    """Run one evaluation over a fresh stream and return its logs.

    It ends with the data, the number of steps, or a callback of any worker that sets `model.stop_evaluating`.
    """
    callbacks, stream, model = caller.callbacks, caller.stream, caller.model
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    stream.begin_epoch()
    logs: dict[str, Any] = {}
    step, num_steps, stop = 0, caller.num_steps, False
    (wanted,) = caller.strategy.add_up([caller.wanted_steps()])
    while stream.has_more() and (num_steps is None or step < num_steps) and not stop:
        callbacks.on_test_batch_begin(step)
        done, last, _, logs = caller.call(step, int(wanted), end_at_nonfinite=False)
        step += done
        callbacks.on_test_batch_end(last, logs)
        wanted, stop = caller.strategy.add_up([caller.wanted_steps(), float(model.stop_evaluating)])
    logs = to_python(logs)
    callbacks.on_test_end(logs)
    return logs


def predict(
    model: keras.Model,
    strategy: Strategy,
    stream: Stream,
    predict_batch: Callable[[Any], Any],
    callbacks: keras.callbacks.CallbackList,
) -> Any:
    """Run one prediction over a fresh stream and return the outputs `[examples, ...]` as NumPy arrays.

    It ends with the data, or a callback of any worker that sets `model.stop_predicting`.
    """
    model.stop_predicting = False
    callbacks.on_predict_begin()
    outputs: list[Any] = []
    step, stop, per_execution = 0, False, model.steps_per_execution
    while stream.has_more() and not stop:
        callbacks.on_predict_batch_begin(step)
        parts: list[Any] = []
        while stream.has_more() and len(parts) < per_execution:
            parts.append(predict_batch(stream.peek()))
            stream.advance(stream.iterator.get_next_as_optional(), 1)
        step += per_execution
        together = _joined(parts)
        outputs.append(keras.tree.map_structure(np.asarray, together))
        callbacks.on_predict_batch_end(step - 1, {"outputs": together})
        stop = bool(strategy.add_up([float(model.stop_predicting)])[0])
    callbacks.on_predict_end()
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else keras.tree.map_structure(lambda *some: tf.concat(some, 0), *parts)
