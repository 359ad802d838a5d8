"""The results of a step that outlive it: new states, the tracked losses and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_losses_in_call, keras_metrics, keras_model, tf_function
from tfpar.pipeline.execution.stage_values import ValueSpec
from tfpar.pipeline.execution.staged_model import StagedModel
from tfpar.pipeline.partition.placement import follow_data
from tfpar.reduction import metric_logs


def assign_states(new_states: Sequence[tuple[keras.Variable, tf.Tensor]], after: Sequence[tf.Tensor]) -> None:
    """Assign the new values of states once all that reads the old values has run.

    Args:
        new_states: Each state with its new value.
        after: Tensors whose computation comes first.
    """
    with tf.control_dependencies([tf.group(*after)]), follow_data():
        for variable, value in new_states:
            variable.assign(value)


def update_loss_trackers(
    model: keras.Model, batch: Any, loss: tf.Tensor, num_examples: tf.Tensor, of_outputs: Sequence[tf.Tensor]
) -> None:
    """Update the metric of the loss, and those of single outputs' losses where Keras logs them.

    Args:
        model: A compiled model.
        batch: The global batch.
        loss: Its loss, a scalar.
        num_examples: Its size, an int64 scalar.
        of_outputs: The losses of single outputs, scalars.
    """
    # Keras weights the loss of an output by the size of the batch where that is fixed, and else by one.
    fixed_size = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None).shape[0]
    tracker = keras_metrics.loss_tracker(model)
    with tf.device(tracker.variables[0].value.device):
        tracker.update_state(loss, sample_weight=num_examples)
        for one, value in zip(keras_metrics.trackers_of_losses(model), of_outputs, strict=True):
            one.update_state(value, sample_weight=fixed_size)


def compile_metrics_update(staged: StagedModel, outputs: Sequence[ValueSpec], batch: Any) -> Any:
    """Compile the update of the metrics with the outputs of one micro-batch.

    Args:
        staged: A compiled model in stages.
        outputs: The specs of its flat outputs.
        batch: The spec of a batch of any size, `(inputs, targets, sample_weight)` as far as given.

    Returns:
        A concrete function of a scalar, the number of examples without padding, the part of the global batch, the
        micro-batch, the outputs and their masks. It returns the scalar, which makes a call depend on the one before.
    """

    def update(
        after: tf.Tensor,
        num_counted: tf.Tensor,
        part: tf.Tensor,
        batch: Any,
        tensors: list[tf.Tensor],
        masks: list[Any],
    ) -> tf.Tensor:
        def count() -> tf.Tensor:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
            packed = staged.packed_outputs(list(map(keras_model.with_mask, tensors, masks)))
            with keras_losses_in_call.scalars_weighted(lambda _: part):
                metric_logs.update_metrics(staged.model, inputs, targets, packed, weights, whole=False)
            return tf.constant(True)

        with tf.device("CPU:0"):  # else the host, which launches one of the branches, waits for the device
            counts_here = num_counted > 0
        with tf.device(staged.devices[-1]):
            tf.cond(counts_here, count, lambda: tf.constant(False))
        return after

    scalar = tf.TensorSpec([], keras.config.floatx())
    counts = [scalar, tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)]
    specs = [*counts, batch, [one.spec for one in outputs], [one.mask for one in outputs]]
    # Inlined, its conditional would become part of the loop around the steps.
    return tf_function.noinline_function(update, *specs)
