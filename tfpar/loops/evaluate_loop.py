"""The loops of `evaluate` and `predict`: steps and callbacks in Keras' order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfpar import data
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.step_calls import StepCalls, to_python
from tfpar.messages import user_warnings
from tfpar.strategies import Strategy


def evaluate(caller: StepCalls) -> dict[str, Any]:
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
    (wanted,) = caller.strategy.all_reduce_sum([caller.wanted_steps()])
    while stream.has_more() and (num_steps is None or step < num_steps) and not stop:
        callbacks.on_test_batch_begin(step)
        done, last, _, logs = caller.call(step, int(wanted), end_at_nonfinite=False)
        step += done
        callbacks.on_test_batch_end(last, logs)
        wanted, stop = caller.strategy.all_reduce_sum([caller.wanted_steps(), float(model.stop_evaluating)])
    if stream.end_epoch(step) and not stop and caller.strategy.is_chief:
        user_warnings.warn(data.RAN_OUT)
    logs = to_python(logs)
    callbacks.on_test_end(logs)
    return logs


def predict(
    model: keras.Model,
    strategy: Strategy,
    stream: EpochIterator,
    predict_batch: Callable[[Any], Any],
    callbacks: keras.callbacks.CallbackList,
) -> Any:
    """Run one prediction over a fresh stream and return the outputs `[examples, ...]` as NumPy arrays.

    It ends with the data, or a callback of any worker that sets `model.stop_predicting`.
    """
    model.stop_predicting = False
    callbacks.on_predict_begin()
    stream.begin_epoch()
    outputs: list[Any] = []
    step, num_batches, stop, per_execution = 0, 0, False, model.steps_per_execution
    limit = stream.steps_per_epoch
    while stream.has_more() and (limit is None or step < limit) and not stop:
        callbacks.on_predict_batch_begin(step)
        parts: list[Any] = []
        while stream.has_more() and len(parts) < per_execution:
            parts.append(predict_batch(stream.peek()))
            stream.advance(stream.iterator.get_next_as_optional(), 1)
        step, num_batches = step + per_execution, num_batches + len(parts)
        together = parts[0] if len(parts) == 1 else data.join_batches(parts)
        outputs.append(keras.tree.map_structure(data.to_numpy, together))
        callbacks.on_predict_batch_end(step - 1, {"outputs": together})
        stop = bool(strategy.all_reduce_sum([float(model.stop_predicting)])[0])
    if stream.end_epoch(num_batches) and not stop and strategy.is_chief:
        user_warnings.warn(data.RAN_OUT)
    callbacks.on_predict_end()
    return data.join_outputs(outputs)
