"""The update of metrics by the outputs of a micro-batch, as a compiled function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_function, tf_graph
from tfpar._compat.models import keras_losses_in_call, keras_metrics
from tfpar._compat.variables import keras_variables
from tfpar.pipeline.loss.output_functions import OutputFunction
from tfpar.pipeline.stages.staged_model import StagedModel
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.reduction import metric_logs
from tfpar.reduction.vocabulary import gathered_classes


class MetricsUpdate:
    """The compiled update of metrics by the outputs of one micro-batch, or of the whole batch.

    A single replica assigns the metric variables. Several replicas compute sums from zero, which are added to the
    variables later. With sharded outputs, the update returns new values instead of assigning them, because a
    conditional cannot contain operations on several devices: the values are computed even for a micro-batch without
    examples, and then discarded.

    Args:
        staged: A compiled model in stages.
        outputs: The spec of each flat output.
        batch: The spec of the result of `last_stage_batch`, for any batch size.
        devices: The device of each shard of the outputs.
        others: Metrics that are not updated.
        in_place: Whether to assign the metric variables, instead of computing sums from zero.

    Attributes:
        variables: The variables whose values are carried from call to call; empty if the update assigns them. It then
            carries a zero, so that each call depends on the one before.
        is_added: Whether the carried values start at zero and are added to the variables, instead of replacing them.

    Raises:
        ValueError: If the sums cannot be computed separately from the variables.
    """

    def __init__(
        self,
        staged: StagedModel,
        outputs: Sequence[ValueSpec],
        batch: Any,
        devices: Sequence[str],
        others: Sequence[keras.Metric],
        *,
        in_place: bool,
    ) -> None:
        self._staged, self._outputs, self._devices, self._others = staged, outputs, devices, others
        self._is_sharded, self.is_added = any(spec.is_sharded for spec in outputs), not in_place
        self.variables: tuple[keras.Variable, ...] = ()
        if self.is_added:
            self.variables = _summed_states(staged.model, others)
            function, changed = self._traced(self.variables, batch)
            _check_sums(staged.model, self.variables, function, changed)
        elif self._is_sharded and (apart := self._traced_apart(batch)) is not None:
            self.variables, function, changed = apart
        else:
            function, changed = self._traced((), batch)
        self._changed = frozenset(map(id, changed))
        self._function = OutputFunction(function, outputs if self.variables or self.is_added else (), devices)

    def __call__(
        self,
        carried: Sequence[tf.Tensor],
        num_counted: tf.Tensor,
        fraction: tf.Tensor,
        batch: Any,
        outputs: Sequence[Any],
        masks: Sequence[tf.Tensor | None],
    ) -> list[tf.Tensor]:
        """Return `carried` for the next call.

        Args:
            carried: The result of the previous call, or `initial()`.
            num_counted: The number of examples that count, an int64 scalar.
            fraction: Their fraction of the global batch, a float64 scalar.
            batch: The result of `last_stage_batch`.
            outputs: The flat outputs of the model.
            masks: The Keras mask of each output, or None.
        """
        return list(self._function(carried, num_counted, fraction, batch, outputs, masks))

    def initial(self) -> list[tf.Tensor]:
        """Return `carried` for the first call."""
        if self.variables and not self.is_added:
            return [variable.value.read_value() for variable in self.variables]
        return [tf.zeros(spec.shape, spec.dtype) for spec in _carried(self.variables)]

    def updated(self, values: Sequence[tf.Tensor]) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return the carried variables that change, with their values."""
        pairs = zip(self.variables, values, strict=True) if self.variables else ()
        return [pair for pair in pairs if id(pair[0]) in self._changed]

    def _traced_apart(self, batch: Any) -> tuple[tuple[keras.Variable, ...], Any, list[Any]] | None:
        """Return the metric variables and an update of their values; None if metrics have other side effects."""
        variables = _states_of_metrics(self._staged.model, self._others)
        with contextlib.suppress(Exception):  # for example, of a metric that uses the tf.Variable of a keras.Variable
            function, changed = self._traced(variables, batch)
            if variables and not _unknown(changed, variables) and not tf_graph.effects(function.graph):
                return variables, function, changed
        return None

    def _traced(self, variables: Sequence[keras.Variable], batch: Any) -> tuple[Any, list[Any]]:
        """Return the concrete function of the update, and the variables whose carried values change.

        Args:
            variables: The variables whose values are carried; empty to assign them in place.
            batch: The spec of the examples.
        """
        changed = list[Any]()

        def update(
            carried: list[tf.Tensor],
            num_counted: tf.Tensor,
            fraction: tf.Tensor,
            batch: Any,
            outputs: list[Any],
            masks: list[Any],
        ) -> list[tf.Tensor]:
            def count() -> list[tf.Tensor]:
                with _states(variables, carried, changed) as values:
                    self._count(fraction, batch, outputs, masks)
                return values or list(map(tf.identity, carried))

            def assign() -> tf.Tensor:
                count()
                return tf.constant(True)

            with tf.device("CPU:0"):  # otherwise the host waits for the device to choose a branch
                has_examples = num_counted > 0
            with tf.device(self._devices[0]):
                if self._is_sharded and (variables or self.is_added):
                    return [tf.where(has_examples, new, old) for new, old in zip(count(), carried, strict=True)]
                if variables or self.is_added:
                    return list(tf.cond(has_examples, count, lambda: list(map(tf.identity, carried))))
                tf.cond(has_examples, assign, lambda: tf.constant(False))
            return carried

        counts = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)]
        output_specs = [spec.spec for spec in self._outputs], [spec.mask for spec in self._outputs]
        # If inlined, its conditional would become part of the loop over steps.
        function = tf_function.noinline_function(update, _carried(variables), *counts, batch, *output_specs)
        return function, changed

    def _count(self, fraction: tf.Tensor, batch: Any, outputs: Sequence[Any], masks: Sequence[Any]) -> None:
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        sent = zip(self._outputs, outputs, masks, strict=True)
        received = [spec.received(tensor, mask, self._devices) for spec, tensor, mask in sent]
        with (
            keras_losses_in_call.scalars_weighted(lambda _: fraction),
            gathered_classes.reading_shards(),
            metric_logs.not_updated(self._others),
        ):
            packed = self._staged.packed_outputs(received)
            metric_logs.update_metrics(self._staged.model, inputs, targets, packed, weights, whole=False)


def _check_sums(model: keras.Model, variables: Sequence[keras.Variable], function: Any, changed: Sequence[Any]) -> None:
    """Refuse metrics that change more than their own variables."""
    others = _unknown(changed, variables)
    if others or any(map(tf_graph.assigns, tf_graph.effects(function.graph))):
        what = "assigns one that is not a keras.Variable"
        if others:
            what = f"changes {others[0].path!r}, which belongs to no metric"
        raise ValueError(
            "In replicas of a pipeline, metrics may change only variables created with add_variable, and a metric of "
            f"{model.name!r} {what}. Use add_variable, or train with Pipeline."
        )


def _unknown(changed: Sequence[Any], variables: Sequence[keras.Variable]) -> list[Any]:
    known = set(map(id, variables))
    return [variable for variable in changed if id(variable) not in known]


def _carried(variables: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables] or [
        tf.TensorSpec([], keras.config.floatx())
    ]


def _summed_states(model: keras.Model, others: Sequence[keras.Metric]) -> tuple[keras.Variable, ...]:
    """Return the metric variables to sum over replicas, without those of loss trackers."""
    variables = _states_of_metrics(model, others)
    for variable in variables:
        if variable.aggregation != "sum":
            raise ValueError(
                f"Replicas of a pipeline sum the variables of metrics, and {variable.path!r} has aggregation="
                f"{variable.aggregation!r}. Create it with aggregation='sum', or train with Pipeline."
            )
    return variables


def _states_of_metrics(model: keras.Model, others: Sequence[keras.Metric]) -> tuple[keras.Variable, ...]:
    """Return the variables of all metrics except `others` and loss trackers."""
    known = {*map(id, others), id(keras_metrics.loss_tracker(model)), *map(id, keras_metrics.trackers_of_losses(model))}
    metrics = [metric for metric in metric_logs.all_metrics(model) if id(metric) not in known]
    return tuple({id(state): state for metric in metrics for state in metric.variables}.values())


@contextlib.contextmanager
def _states(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], changed: list[Any]
) -> Iterator[list[tf.Tensor]]:
    """Replace the values of variables in this context.

    Args:
        variables: The variables; empty to assign them in place.
        values: Their values.
        changed: A list to which assigned variables are added.

    Yields:
        A list that contains the new values once the context has ended.
    """
    after: list[tf.Tensor] = []
    if not variables:
        yield after
        return
    scope = keras_variables.AssignmentScope(list(zip(variables, values, strict=True)))
    with scope, tf_function.own_traces():
        yield after
    changed += [variable for variable, _ in scope.assigned.values()]
    after += [scope.get_current_value(variable) for variable in variables]
