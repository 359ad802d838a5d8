"""The results of a step that outlive it: new states, the tracked losses and the metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_losses_in_call, keras_metrics, tf_function
from tfpar.pipeline.execution.output_functions import OutputFunction
from tfpar.pipeline.execution.stage_values import ValueSpec
from tfpar.pipeline.execution.staged_model import StagedModel
from tfpar.pipeline.partition.placement import follow_data
from tfpar.reduction import gathered_classes, metric_logs


def assign_states(new_states: Sequence[tuple[keras.Variable, tf.Tensor]], after: Sequence[tf.Tensor]) -> None:
    """Assign the new values of states once all that reads the old values has run.

    Args:
        new_states: Each state with its new value.
        after: Tensors whose computation comes first.
    """
    with tf.control_dependencies([tf.group(*after)]), follow_data():
        for variable, value in new_states:
            variable.assign(value)


def add_to_metrics(sums: Sequence[tuple[keras.Variable, tf.Tensor]], after: Sequence[tf.Tensor]) -> None:
    """Add sums to the variables of metrics.

    Args:
        sums: Each variable with a sum.
        after: Tensors whose computation comes first, the updates of the variables included.
    """
    with tf.control_dependencies([tf.group(*after)]), follow_data():
        for variable, value in sums:
            variable.assign_add(value)


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


class MetricsUpdate(NamedTuple):
    """The compiled update of the metrics with the outputs of one micro-batch.

    Args:
        function: A function of `carried`, the number of examples without padding, the part of the global batch, the
            micro-batch, the outputs and their masks. It returns `carried` after the update.
        variables: The variables whose values are carried; empty where the function assigns them. It then carries a
            zero, which makes a call depend on the one before.
        is_added: Whether the values begin at zero, to be added to the variables; else they replace those of these.
    """

    function: OutputFunction
    variables: tuple[keras.Variable, ...]
    is_added: bool

    def initial(self) -> list[tf.Tensor]:
        """Return what the first call takes as `carried`."""
        if self.variables and not self.is_added:
            return [variable.value.read_value() for variable in self.variables]
        return [tf.zeros(spec.shape, spec.dtype) for spec in _carried(self.variables)]


def compile_metrics_update(
    staged: StagedModel, outputs: Sequence[ValueSpec], batch: Any, devices: Sequence[str], *, in_place: bool
) -> MetricsUpdate:
    """Compile the update of the metrics with the outputs of one micro-batch.

    Outputs in pieces are read by operations on several devices, which no conditional can contain: there the states of a
    micro-batch without examples are computed, and not taken.

    Args:
        staged: A compiled model in stages.
        outputs: The specs of its flat outputs.
        batch: The spec of what `taken_after_stages` returns of a batch of any size.
        devices: The device of the outputs; then those of pieces.
        in_place: Whether it may assign the variables of the metrics; else it computes sums from zero.

    Raises:
        ValueError: If the sums cannot be computed apart from the variables.
    """
    if not in_place:
        variables = _summed_states(staged.model)
        function = _traced_update(staged, outputs, batch, devices, variables, assigns=False)
        if _assigns(function):
            raise ValueError(
                "Replicas of a pipeline compute the states of metrics apart from their variables, and a metric of "
                f"{staged.model.name!r} assigns one that is no keras.Variable. Use add_variable, or train with "
                "Pipeline."
            )
        return MetricsUpdate(OutputFunction(function, outputs, devices), variables, is_added=True)
    variables = _states_of_metrics(staged.model)
    if variables and any(one.is_in_pieces for one in outputs):
        function = _traced_update(staged, outputs, batch, devices, variables, assigns=False)
        if not _assigns(function):  # else a metric has variables that are no Keras variables, and reads whole outputs
            return MetricsUpdate(OutputFunction(function, outputs, devices), variables, is_added=False)
    function = _traced_update(staged, outputs, batch, devices, (), assigns=True)
    return MetricsUpdate(OutputFunction(function, (), devices), (), is_added=False)


def _traced_update(
    staged: StagedModel,
    outputs: Sequence[ValueSpec],
    batch: Any,
    devices: Sequence[str],
    variables: Sequence[keras.Variable],
    *,
    assigns: bool,
) -> Any:
    """Return the concrete function of an update, which assigns the variables of metrics or carries their values."""
    device, has_pieces = devices[0], any(one.is_in_pieces for one in outputs)

    def update(
        carried: list[tf.Tensor],
        num_counted: tf.Tensor,
        part: tf.Tensor,
        batch: Any,
        tensors: list[tf.Tensor],
        masks: list[Any],
    ) -> list[tf.Tensor]:
        def count() -> list[tf.Tensor]:
            inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
            received = zip(outputs, tensors, masks, strict=True)
            packed = staged.packed_outputs([spec.received(tensor, mask, devices) for spec, tensor, mask in received])
            with (
                _states(variables, carried) as values,
                keras_losses_in_call.scalars_weighted(lambda _: part),
                gathered_classes.read_in_pieces(),
            ):
                metric_logs.update_metrics(staged.model, inputs, targets, packed, weights, whole=False)
            return values or list(map(tf.identity, carried))

        def assign() -> tf.Tensor:
            count()
            return tf.constant(True)

        with tf.device("CPU:0"):  # else the host, which launches one of the branches, waits for the device
            counts_here = num_counted > 0
        with tf.device(device):
            if has_pieces and not assigns:
                return [tf.where(counts_here, new, old) for new, old in zip(count(), carried, strict=True)]
            if not assigns:
                return list(tf.cond(counts_here, count, lambda: list(map(tf.identity, carried))))
            tf.cond(counts_here, assign, lambda: tf.constant(False))
        return carried

    counts = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)]
    specs = [_carried(variables), *counts, batch, [one.spec for one in outputs], [one.mask for one in outputs]]
    # Inlined, its conditional would become part of the loop around the steps.
    return tf_function.noinline_function(update, *specs)


def _assigns(function: Any) -> bool:
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return any(node.op.startswith("Assign") for node in nodes)


def _carried(variables: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(one.shape, one.dtype) for one in variables] or [tf.TensorSpec([], keras.config.floatx())]


def _summed_states(model: keras.Model) -> tuple[keras.Variable, ...]:
    """Return the variables of the metrics, which add up over replicas; those of the loss are updated once a step."""
    variables = _states_of_metrics(model)
    for variable in variables:
        if variable.aggregation != "sum":
            raise ValueError(
                f"Replicas of a pipeline add the states of metrics, and {variable.path!r} has aggregation="
                f"{variable.aggregation!r}. Create it with aggregation='sum', or train with Pipeline."
            )
    return variables


def _states_of_metrics(model: keras.Model) -> tuple[keras.Variable, ...]:
    """Return the variables of all metrics that each micro-batch updates; those of the loss are updated once a step."""
    once = [keras_metrics.loss_tracker(model), *keras_metrics.trackers_of_losses(model)]
    metrics = [metric for metric in metric_logs.all_metrics(model) if not any(metric is one for one in once)]
    return tuple({id(one): one for metric in metrics for one in metric.variables}.values())


@contextlib.contextmanager
def _states(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> Iterator[list[tf.Tensor]]:
    """Replace the values of variables in this context; yield a list that has those after it, once it has ended."""
    after: list[tf.Tensor] = []
    if not variables:
        yield after
        return
    with keras.StatelessScope(list(zip(variables, values, strict=True))) as scope, tf_function.own_traces():
        yield after
    after += [scope.get_current_value(variable) for variable in variables]
