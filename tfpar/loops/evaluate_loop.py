"""The loops of `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfpar import data
from tfpar._compat.models import keras_metrics
from tfpar.loops.agreement.deferred_errors import DeferringCallbacks
from tfpar.loops.epoch_iterator import EpochIterator
from tfpar.loops.step_calls import StepCalls, to_python
from tfpar.messages import user_warnings
from tfpar.strategies import Strategy


def evaluate(caller: StepCalls) -> dict[str, Any]:
    """Evaluate over an unused epoch iterator and return the logs.

    Evaluation ends with the data, after the number of steps, or once a callback of any worker sets
    `model.stop_evaluating`.
    """
    callbacks, epoch_iterator, model = caller.callbacks, caller.epoch_iterator, caller.model
    model.stop_evaluating = False
    callbacks.on_test_begin()
    keras_metrics.reset(model)
    epoch_iterator.begin_epoch()
    logs: dict[str, Any] = {}
    step, num_steps, stop = 0, caller.num_steps, False
    (next_steps,) = callbacks.errors.vote([caller.next_steps()])
    while epoch_iterator.has_more() and (num_steps is None or step < num_steps) and not stop:
        callbacks.on_test_batch_begin(step)
        done, last, _, logs = caller.call(step, int(next_steps), end_at_nonfinite=False)
        step += done
        callbacks.on_test_batch_end(last, logs)
        next_steps, stop = callbacks.errors.vote([caller.next_steps(), float(model.stop_evaluating)])
    if epoch_iterator.end_epoch(step) and not stop and caller.strategy.is_chief:
        user_warnings.warn(data.RAN_OUT)
    logs = to_python(logs)
    callbacks.on_test_end(logs)
    callbacks.errors.vote()
    return logs


def predict(
    model: keras.Model,
    strategy: Strategy,
    epoch_iterator: EpochIterator,
    predict_batch: Callable[[Any], Any],
    callbacks: DeferringCallbacks,
) -> Any:
    """Predict over an unused epoch iterator and return the outputs `[examples, ...]` as NumPy arrays.

    The outputs of a step are copied to the host while the next step runs. Prediction ends with the data, or once a
    callback of any worker sets `model.stop_predicting`.
    """
    model.stop_predicting = False
    callbacks.on_predict_begin()
    epoch_iterator.begin_epoch()
    outputs: list[Any] = []
    uncopied: list[Any] = []
    step, num_batches, stop, per_execution = 0, 0, False, model.steps_per_execution
    limit = epoch_iterator.steps_per_epoch
    while epoch_iterator.has_more() and (limit is None or step < limit) and not stop:
        callbacks.on_predict_batch_begin(step)
        batches: list[Any] = []
        digests: list[Any] = []
        while epoch_iterator.has_more() and len(batches) < per_execution:
            element = epoch_iterator.peek()
            batches.append(predict_batch(element))
            digests.append(epoch_iterator.distributed.digest(element))
            epoch_iterator.read_next()
        callbacks.errors.read_order.note(num_batches, [digest for digest in digests if digest is not None])
        step, num_batches = step + per_execution, num_batches + len(batches)
        joined = batches[0] if len(batches) == 1 else data.join_batches(batches)
        outputs += map(_to_numpy, uncopied)
        uncopied = [joined]
        callbacks.on_predict_batch_end(step - 1, {"outputs": joined})
        stop = bool(callbacks.errors.vote([float(model.stop_predicting)])[0])
    if epoch_iterator.end_epoch(num_batches) and not stop and strategy.is_chief:
        user_warnings.warn(data.RAN_OUT)
    callbacks.on_predict_end()
    callbacks.errors.vote()
    return data.join_outputs([*outputs, *map(_to_numpy, uncopied)])


def _to_numpy(outputs: Any) -> Any:
    return keras.tree.map_structure(data.to_numpy, outputs)
