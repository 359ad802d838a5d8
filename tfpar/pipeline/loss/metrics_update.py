"""The update of metrics with the outputs of a micro-batch, as a compiled function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat import keras_losses_in_call, keras_metrics, keras_variables, tf_function, tf_graph
from tfpar.pipeline.loss.output_functions import OutputFunction
from tfpar.pipeline.stages.staged_model import StagedModel
from tfpar.pipeline.stages.values import ValueSpec
from tfpar.reduction import gathered_classes, metric_logs


class MetricsUpdate(NamedTuple):
    """The compiled update of the metrics with the outputs of one micro-batch.

    Args:
        function: A function of `carried`, the number of examples without padding, the part of the global batch, the
            micro-batch, the outputs and their masks. It returns `carried` after the update.
        variables: The variables whose values are carried; empty where the function assigns them. It then carries a
            zero, which makes a call depend on the one before.
        changed: The `id` of each variable that the function gives another value.
        is_added: Whether the values begin at zero, to be added to the variables; else they replace those of these.
    """

    function: OutputFunction
    variables: tuple[keras.Variable, ...]
    changed: frozenset[int]
    is_added: bool

    def initial(self) -> list[tf.Tensor]:
        """Return what the first call takes as `carried`."""
        if self.variables and not self.is_added:
            return [variable.value.read_value() for variable in self.variables]
        return [tf.zeros(spec.shape, spec.dtype) for spec in _carried(self.variables)]

    def updated(self, values: Sequence[tf.Tensor]) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return the variables that change, with what is carried of them; nothing where the function assigns them."""
        pairs = zip(self.variables, values, strict=True) if self.variables else ()
        return [pair for pair in pairs if id(pair[0]) in self.changed]


def compile_metrics_update(
    staged: StagedModel,
    outputs: Sequence[ValueSpec],
    batch: Any,
    devices: Sequence[str],
    others: Sequence[keras.Metric],
    *,
    in_place: bool,
) -> MetricsUpdate:
    """Compile the update of metrics with the outputs of one micro-batch, or of the whole batch.

    Args:
        staged: A compiled model in stages.
        outputs: The specs of its flat outputs.
        batch: The spec of what `taken_after_stages` returns of a batch of any size.
        devices: The device of the outputs; then those of the other shards of sharded ones.
        others: Metrics that it leaves as they are.
        in_place: Whether it updates the variables of the metrics; else it computes sums from zero.

    Raises:
        ValueError: If the sums cannot be computed apart from the variables.
    """
    update = _Update(staged, outputs, batch, devices, others)
    if not in_place:
        return update.of_sums()
    found = update.of_shards() if any(spec.is_sharded for spec in outputs) else None
    return update.of_variables() if found is None else found


class _Update(NamedTuple):
    """What an update of metrics is traced from; the fields are the arguments of `compile_metrics_update`."""

    staged: StagedModel
    outputs: Sequence[ValueSpec]
    batch: Any
    devices: Sequence[str]
    others: Sequence[keras.Metric]

    def of_sums(self) -> MetricsUpdate:
        """Return an update that adds to sums.

        Raises:
            ValueError: If a state is no sum, or is none of a metric.
        """
        model = self.staged.model
        variables = _summed_states(model, self.others)
        function, assigned = self._traced(variables, assigns=False)
        others = [one.path for one in assigned if not any(one is known for known in variables)]
        if others or any(map(tf_graph.assigns, tf_graph.effects(function.graph))):
            what = "assigns one that is no keras.Variable"
            if others:
                what = f"changes {others[0]!r}, which is none of a metric"
            raise ValueError(
                "Replicas of a pipeline compute the states of metrics apart from their variables, and a metric of "
                f"{model.name!r} {what}. Use add_variable, or train with Pipeline."
            )
        return self._update(function, variables, assigned, is_added=True)

    def of_shards(self) -> MetricsUpdate | None:
        """Return an update that reads sharded outputs; None if it would do more than change variables of metrics.

        No conditional can contain operations on several devices: the states of a micro-batch without examples are
        computed, and not taken.
        """
        variables = _states_of_metrics(self.staged.model, self.others)
        with contextlib.suppress(Exception):  # such as of a metric that uses the tf.Variable of a keras.Variable
            function, assigned = self._traced(variables, assigns=False)
            is_known = all(any(one is known for known in variables) for one in assigned)
            if variables and is_known and not tf_graph.effects(function.graph):
                return self._update(function, variables, assigned, is_added=False)
        return None

    def of_variables(self) -> MetricsUpdate:
        """Return an update that assigns the variables, from whole outputs."""
        function, _ = self._traced((), assigns=True)
        return MetricsUpdate(OutputFunction(function, (), self.devices), (), frozenset(), is_added=False)

    def _update(
        self, function: Any, variables: tuple[keras.Variable, ...], assigned: Iterable[Any], *, is_added: bool
    ) -> MetricsUpdate:
        called = OutputFunction(function, self.outputs, self.devices)
        return MetricsUpdate(called, variables, frozenset(map(id, assigned)), is_added)

    def _traced(self, variables: Sequence[keras.Variable], *, assigns: bool) -> tuple[Any, list[Any]]:
        """Return a concrete function, and the variables that a trace apart from them would have assigned."""
        staged, outputs, devices = self.staged, self.outputs, self.devices
        is_sharded, assigned = any(spec.is_sharded for spec in outputs), list[Any]()

        def update(
            carried: list[tf.Tensor],
            num_counted: tf.Tensor,
            part: tf.Tensor,
            batch: Any,
            tensors: list[Any],
            masks: list[Any],
        ) -> list[tf.Tensor]:
            def count() -> list[tf.Tensor]:
                inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)
                received = zip(outputs, tensors, masks, strict=True)
                packed = staged.packed_outputs([one.received(given, mask, devices) for one, given, mask in received])
                with (
                    _states(variables, carried, assigned) as values,
                    keras_losses_in_call.scalars_weighted(lambda _: part),
                    gathered_classes.read_in_pieces(),
                    metric_logs.not_updated(self.others),
                ):
                    metric_logs.update_metrics(staged.model, inputs, targets, packed, weights, whole=False)
                return values or list(map(tf.identity, carried))

            def assign() -> tf.Tensor:
                count()
                return tf.constant(True)

            with tf.device("CPU:0"):  # else the host, which launches one of the branches, waits for the device
                counts_here = num_counted > 0
            with tf.device(devices[0]):
                if is_sharded and not assigns:
                    return [tf.where(counts_here, new, old) for new, old in zip(count(), carried, strict=True)]
                if not assigns:
                    return list(tf.cond(counts_here, count, lambda: list(map(tf.identity, carried))))
                tf.cond(counts_here, assign, lambda: tf.constant(False))
            return carried

        counts = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)]
        of_outputs = [one.spec for one in outputs], [one.mask for one in outputs]
        # Inlined, its conditional would become part of the loop around the steps.
        function = tf_function.noinline_function(update, _carried(variables), *counts, self.batch, *of_outputs)
        return function, assigned


def _carried(variables: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(one.shape, one.dtype) for one in variables] or [tf.TensorSpec([], keras.config.floatx())]


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
    others = [*others, keras_metrics.loss_tracker(model), *keras_metrics.trackers_of_losses(model)]
    metrics = [metric for metric in metric_logs.all_metrics(model) if not any(metric is one for one in others)]
    return tuple({id(one): one for metric in metrics for one in metric.variables}.values())


@contextlib.contextmanager
def _states(
    variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], assigned: list[Any]
) -> Iterator[list[tf.Tensor]]:
    """Replace the values of variables in this context; yield a list that has those after it, once it has ended.

    Args:
        variables: Variables; none to assign them in place.
        values: Their values.
        assigned: A list, to which the variables that are assigned are added.
    """
    after: list[tf.Tensor] = []
    if not variables:
        yield after
        return
    scope = keras_variables.AssignmentScope(list(zip(variables, values, strict=True)))
    with scope, tf_function.own_traces():
        yield after
    assigned += [variable for variable, _ in scope.assigned.values()]
    after += [scope.get_current_value(variable) for variable in variables]
