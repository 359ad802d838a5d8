"""The seconds of the optimizer's update of all weights of a model on one device."""

from __future__ import annotations

import statistics

import keras
import tensorflow as tf

from tfpar._compat import keras_optimizer
from tfpar.pipeline.partition.layer_profile import wait_for_gpus
from tfpar.planning.costs import Curve
from tfpar.planning.given_data import ReadOnce, prepared
from tfpar.planning.step_timing import TimedLoop, alternate_seconds, repeated_seconds
from tfpar.planning.steps_without_update import DeviceWithoutUpdate
from tfpar.reduction import objective

# Of a step, where neither the update by itself nor its part of the step can be measured.
_USUAL_PART = 0.7


def measure_update(make_trainer: ReadOnce, model: keras.Model, loop: TimedLoop, device: str, steps: Curve) -> float:
    """Measure the update of all weights.

    Args:
        make_trainer: Returns a trainer of the same model under a strategy, and its data.
        model: A compiled model whose optimizer is built; its weights change.
        loop: Its training steps.
        device: Its device.
        steps: The seconds of a step, by its number of examples.

    Returns:
        Seconds, less than those of the shortest step. An update by itself takes longer than that where its operations
        run between others in a step: then the difference of the step and one without the update, measured in turns.
    """
    size, step_seconds = steps.sizes[0], steps.seconds[0]
    apart_seconds = _apart_seconds(model, device)
    if apart_seconds < step_seconds:
        return apart_seconds
    if objective.objectives_of(model):
        return _USUAL_PART * step_seconds
    try:
        without = prepared(make_trainer, DeviceWithoutUpdate(device)).loop
        for one in (loop, without):
            one.resize(size)
        with_seconds, without_seconds = alternate_seconds([loop, without])
    except tf.errors.ResourceExhaustedError:
        return _USUAL_PART * step_seconds
    return min(max(0.0, with_seconds - without_seconds), step_seconds)


def _apart_seconds(model: keras.Model, device: str) -> float:
    """Return the median seconds of an update of all weights by itself, which changes them."""
    weights = model.trainable_variables
    if not weights:
        return 0.0
    with tf.device(device):
        gradients = [tf.zeros(weight.shape, weight.dtype) for weight in weights]

    @tf.function(autograph=False)
    def update(num_steps: tf.Tensor, gradients: list[tf.Tensor]) -> tf.Tensor:
        def one(done: tf.Tensor) -> tuple[tf.Tensor]:
            with tf.device(device), keras_optimizer.one_device_optimizer():
                keras_optimizer.apply(model.optimizer, gradients, weights)
            return (done + 1,)

        (done,) = tf.while_loop(lambda done: done < num_steps, one, (tf.constant(0),))
        return done

    def run(num_steps: int) -> None:
        update(tf.constant(num_steps), gradients).numpy()
        wait_for_gpus()

    return statistics.median(repeated_seconds(run))
