"""The update of metrics with the outputs of a micro-batch, as a compiled function."""

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
    """The compiled update of the metrics with the outputs of one micro-batch, or of the whole batch.

    Replicas add up sums from zero, apart from the variables of the metrics. Otherwise the update assigns the variables;
    from sharded outputs it carries their values instead, because no conditional can contain operations on several
    devices: the states of a micro-batch without examples are computed, and not taken.

    Args:
        staged: A compiled model in stages.
        outputs: The specs of its flat outputs.
        batch: The spec of what `taken_after_stages` returns of a batch of any size.
        devices: The device of the outputs; then those of the other shards of sharded ones.
        others: Metrics that it leaves as they are.
        in_place: Whether it updates the variables of the metrics; else it computes sums from zero.

    Attributes:
        variables: The variables whose values are carried from call to call; empty where the update assigns them. It
            then carries a zero, which makes a call depend on the one before.
        is_added: Whether the values begin at zero, to be added to the variables; else they replace those of these.

    Raises:
        ValueError: If the sums cannot be computed apart from the variables.
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
        part: tf.Tensor,
        batch: Any,
        outputs: Sequence[Any],
        masks: Sequence[tf.Tensor | None],
    ) -> list[tf.Tensor]:
        """Return what the next call takes as `carried`.

        Args:
            carried: The result of the call before, at first `initial()`.
            num_counted: The number of examples without padding, an int64 scalar.
            part: Their part of the global batch, a float64 scalar.
            batch: The examples, as `taken_after_stages` returns them.
            outputs: The flat outputs of the model for them.
            masks: The Keras mask of each output; None for none.
        """
        return list(self._function(carried, num_counted, part, batch, outputs, masks))

    def initial(self) -> list[tf.Tensor]:
        """Return what the first call takes as `carried`."""
        if self.variables and not self.is_added:
            return [variable.value.read_value() for variable in self.variables]
        return [tf.zeros(spec.shape, spec.dtype) for spec in _carried(self.variables)]

    def updated(self, values: Sequence[tf.Tensor]) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return the variables that change, with what is carried of them; nothing where the update assigns them."""
        pairs = zip(self.variables, values, strict=True) if self.variables else ()
        return [pair for pair in pairs if id(pair[0]) in self._changed]

    def _traced_apart(self, batch: Any) -> tuple[tuple[keras.Variable, ...], Any, list[Any]] | None:
        """Return variables with the update of their values; None if it would do more than change these."""
        variables = _states_of_metrics(self._staged.model, self._others)
        with contextlib.suppress(Exception):  # such as of a metric that uses the tf.Variable of a keras.Variable
            function, changed = self._traced(variables, batch)
            if variables and not _unknown(changed, variables) and not tf_graph.effects(function.graph):
                return variables, function, changed
        return None

    def _traced(self, variables: Sequence[keras.Variable], batch: Any) -> tuple[Any, list[Any]]:
        """Return a concrete function, and the variables that a trace apart from them would have assigned.

        Args:
            variables: The variables whose values it carries; none to assign them in place.
            batch: The spec of the examples.
        """
        changed = list[Any]()

        def update(
            carried: list[tf.Tensor],
            num_counted: tf.Tensor,
            part: tf.Tensor,
            batch: Any,
            outputs: list[Any],
            masks: list[Any],
        ) -> list[tf.Tensor]:
            def count() -> list[tf.Tensor]:
                with _states(variables, carried, changed) as values:
                    self._count(part, batch, outputs, masks)
                return values or list(map(tf.identity, carried))

            def assign() -> tf.Tensor:
                count()
                return tf.constant(True)

            with tf.device("CPU:0"):  # else the host, which launches one of the branches, waits for the device
                counts_here = num_counted > 0
            with tf.device(self._devices[0]):
                if self._is_sharded and (variables or self.is_added):
                    return [tf.where(counts_here, new, old) for new, old in zip(count(), carried, strict=True)]
                if variables or self.is_added:
                    return list(tf.cond(counts_here, count, lambda: list(map(tf.identity, carried))))
                tf.cond(counts_here, assign, lambda: tf.constant(False))
            return carried

        counts = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)]
        of_outputs = [spec.spec for spec in self._outputs], [spec.mask for spec in self._outputs]
        # Inlined, its conditional would become part of the loop around the steps.
        function = tf_function.noinline_function(update, _carried(variables), *counts, batch, *of_outputs)
        return function, changed

    def _count(self, part: tf.Tensor, batch: Any, outputs: Sequence[Any], masks: Sequence[Any]) -> None:
        """Update the metrics with examples of which the model computed the outputs."""
        inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
        sent = zip(self._outputs, outputs, masks, strict=True)
        received = [spec.received(tensor, mask, self._devices) for spec, tensor, mask in sent]
        with (
            keras_losses_in_call.scalars_weighted(lambda _: part),
            gathered_classes.reading_shards(),
            metric_logs.not_updated(self._others),
        ):
            packed = self._staged.packed_outputs(received)
            metric_logs.update_metrics(self._staged.model, inputs, targets, packed, weights, whole=False)


def _check_sums(model: keras.Model, variables: Sequence[keras.Variable], function: Any, changed: Sequence[Any]) -> None:
    """Refuse an update that adds to more than the variables of metrics."""
    others = _unknown(changed, variables)
    if others or any(map(tf_graph.assigns, tf_graph.effects(function.graph))):
        what = "assigns one that is no keras.Variable"
        if others:
            what = f"changes {others[0].path!r}, which is none of a metric"
        raise ValueError(
            "Replicas of a pipeline compute the states of metrics apart from their variables, and a metric of "
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
    """Return the variables of the metrics, which add up over replicas; those of the loss are updated once a step."""
    variables = _states_of_metrics(model, others)
    for variable in variables:
        if variable.aggregation != "sum":
            raise ValueError(
                f"Replicas of a pipeline add the states of metrics, and {variable.path!r} has aggregation="
                f"{variable.aggregation!r}. Create it with aggregation='sum', or train with Pipeline."
            )
    return variables


def _states_of_metrics(model: keras.Model, others: Sequence[keras.Metric]) -> tuple[keras.Variable, ...]:
    """Return the variables of all metrics but some that each micro-batch updates; not those of the loss."""
    known = {*map(id, others), id(keras_metrics.loss_tracker(model)), *map(id, keras_metrics.trackers_of_losses(model))}
    metrics = [metric for metric in metric_logs.all_metrics(model) if id(metric) not in known]
    return tuple({id(state): state for metric in metrics for state in metric.variables}.values())


@contextlib.contextmanager
def _states(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], changed: list[Any]
) -> Iterator[list[tf.Tensor]]:
    """Replace the values of variables in this context; yield a list that has those after it, once it has ended.

    Args:
        variables: Variables; none to assign them in place.
        values: Their values.
        changed: A list, to which the variables that are assigned are added.
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
