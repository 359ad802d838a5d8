"""The logs of a model: results of its metrics, and entries that an overridden `compute_metrics` adds.

Keras 3.15 logs what `compute_metrics` returned for the last batch, unless its names are exactly those of the model's
metrics. On one device variables store these values. With replicas or micro-batches an entry is recomputed from the
reduced metrics, which is exact if it depends on metrics alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar._compat.models import keras_metrics, keras_model
from tfpar.reduction import own_step
from tfpar.reduction.objective import objectives_of
from tfpar.reduction.verdict import Verdict
from tfpar.xla_choice import NotCompiledError


@dataclasses.dataclass
class Entries:
    """The logs from `compute_metrics` of one model.

    Args:
        specs: The specs of its arguments; None if it sees whole batches.
        values: Variables that store its result for the last batch; None if it sees parts of batches.
    """

    specs: Any
    values: Any


_entries: weakref.WeakKeyDictionary[keras.Model, Entries] = weakref.WeakKeyDictionary()


def update_metrics(model: keras.Model, inputs: Any, targets: Any, outputs: Any, weights: Any, *, whole: bool) -> None:
    """Call `compute_metrics` and record the log entries that it adds.

    Args:
        model: A compiled model.
        inputs: The inputs of the model, `[batch, ...]` each.
        targets: Its targets, or None.
        outputs: Its outputs.
        weights: Sample weights, or None.
        whole: Whether these are all examples of the global batch, on one device.
    """
    returned = model.compute_metrics(inputs, targets, outputs, sample_weight=weights)
    if not keras_model.overridden(model, "compute_metrics") or not isinstance(returned, dict):
        return
    if returned.keys() == keras_metrics.own_results(model).keys():
        _entries.pop(model, None)
        return
    if whole:
        before = _entries.get(model)
        _entries[model] = Entries(None, _stored(model, returned, None if before is None else before.values))
    else:
        _entries[model] = Entries(_specs((inputs, targets, outputs, weights)), None)


def results(model: keras.Model, kind: str) -> dict[str, Any]:
    """Return the logs of steps of a kind, reduced over all replicas if called in cross-replica context.

    Raises:
        ValueError: If `compute_metrics` sees parts of a batch and adds an entry that depends on its examples.
    """
    if (of_own_step := own_step.results(model, kind)) is not None:
        return of_own_step
    entries = _entries.get(model)
    logs: dict[str, Any]
    if entries is None:
        logs = keras_metrics.own_results(model)
        return _with_loss(model, logs) if objectives_of(model) else logs
    if entries.values is not None:
        logs = keras.tree.map_structure(lambda variable: variable.read_value(), entries.values)
        return logs
    return _recomputed(model, entries)


def _with_loss(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Add the sum of the objectives to the logs, where it is missing if the model overrides `metrics`."""
    return logs if "loss" in logs else {"loss": keras_metrics.loss_tracker(model).result(), **logs}


def _stored(model: keras.Model, returned: dict[str, Any], before: Any) -> Any:
    """Store the result of `compute_metrics` in variables, created by the first trace."""
    tensors = keras.tree.map_structure(tf.convert_to_tensor, returned)
    if model.jit_compile:
        _check_fixed_shapes(model, tensors)
    if before is None or _layout(before) != _layout(tensors):
        with tf.init_scope():
            before = keras.tree.map_structure(lambda tensor: _variable_for(tensor, model.jit_compile), tensors)
    for variable, tensor in zip(keras.tree.flatten(before), keras.tree.flatten(tensors), strict=True):
        variable.assign(tensor)
    return before


def _check_fixed_shapes(model: keras.Model, tensors: dict[str, Any]) -> None:
    for name, value in tensors.items():
        for tensor in keras.tree.flatten(value):
            if tensor.shape.is_fully_defined():
                continue
            if keras_model.is_chosen(model):
                raise NotCompiledError(f"the entry {name!r} of compute_metrics has no fixed shape")
            raise ValueError(
                f"With jit_compile=True an entry that compute_metrics adds must have a fixed shape, and {name!r} of "
                f"{type(model).__name__} has {tensor.shape}. Reduce it over the batch, or leave jit_compile out."
            )


def _layout(values: Any) -> Any:
    """Return the dtype and rank of each value, in the same structure."""
    return keras.tree.map_structure(lambda value: f"{value.dtype.name} {value.shape.rank}", values)


def _variable_for(tensor: tf.Tensor, fixed: bool) -> tf.Variable:
    """Return a variable of any size, because a step may be traced again for another batch."""
    zeros = tf.zeros([size or 0 for size in tensor.shape.as_list()] if tensor.shape.rank else [], tensor.dtype)
    shape = tensor.shape if fixed or tensor.shape.rank is None else [None] * tensor.shape.rank
    return tf.Variable(zeros, trainable=False, shape=shape)


def _specs(arguments: Any) -> Any:
    def spec(value: Any) -> Any:
        if value is None or not isinstance(value, tf.Tensor):
            return None if value is None else tf.type_spec_from_value(value)
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    return keras.tree.map_structure(spec, arguments)


def _recomputed(model: keras.Model, entries: Entries) -> dict[str, Any]:
    """Compute the entries of `compute_metrics` from the current metrics, without updating them."""
    by_id = {id(variable): variable for metric in all_metrics(model) for variable in metric.variables}
    variables = list(by_id.values())
    feeds: list[tf.Tensor] = []
    examples: list[Any] = []

    def compute(batch: Any, counts: list[tf.Tensor]) -> Any:
        feeds[:], examples[:] = counts, tf.nest.flatten(batch, expand_composites=True)
        inputs, targets, outputs, weights = batch
        # Variables are read outside: inside a function TensorFlow 2.21 may read a variable before its assignment.
        scope = keras.StatelessScope(list(zip(variables, counts, strict=True)))
        with scope, tf_function.own_traces(), not_updated(all_metrics(model)):
            returned = model.compute_metrics(inputs, targets, outputs, sample_weight=weights)
        return keras.tree.map_structure(tf.convert_to_tensor, returned)

    count_specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    wrapped = tf.compat.v1.wrap_function(compute, [entries.specs, count_specs])
    for name, value in wrapped.structured_outputs.items():
        if any(_depends(tensor, examples) for tensor in keras.tree.flatten(value)):
            raise ValueError(
                f"With replicas or micro-batches an entry that compute_metrics adds must be computed from the model's "
                f"metrics, and {name!r} of {type(model).__name__} depends on the examples. Count it in a "
                "keras.metrics.Mean of the model and return its result, or train on SingleDevice()."
            )
    counts = [tf.convert_to_tensor(variable.value) for variable in variables]
    logs: dict[str, Any] = wrapped.prune(feeds, wrapped.structured_outputs)(*counts)
    return logs


@contextlib.contextmanager
def not_updated(metrics: Iterable[keras.Metric]) -> Iterator[None]:
    """Ignore updates of metrics in this context."""
    with contextlib.ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(mock.patch.dict(vars(metric), {"update_state": lambda *_, **__: None}))
        yield


@contextlib.contextmanager
def results_noted(model: keras.Model) -> Iterator[dict[int, tuple[Any, keras.Metric]]]:
    """Note which tensors are results of a model's metrics inside this context.

    Yields:
        Each result by its `id`, with its metric.
    """
    results: dict[int, tuple[Any, keras.Metric]] = {}

    def noting(metric: keras.Metric) -> Any:
        def result() -> Any:
            value = type(metric).result(metric)
            results[id(value)] = value, metric
            return value

        return result

    metrics = all_metrics(model)
    for metric in metrics:
        vars(metric)["result"] = noting(metric)
    try:
        yield results
    finally:
        for metric in metrics:
            del vars(metric)["result"]


def all_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics of a model and its layers, and the metrics inside them."""
    waiting, metrics = [*model.metrics, *keras_metrics.own_metrics(model), keras_metrics.loss_tracker(model)], {}
    waiting += own_step.all_last_values(model)
    while waiting:
        metric = waiting.pop()
        if id(metric) not in metrics:
            metrics[id(metric)] = metric
            waiting += keras_metrics.inner_metrics(metric)
    return list(metrics.values())


def whole_metrics(model: keras.Model, verdict: Verdict) -> list[keras.Metric]:
    """Return the metrics of a model that take the whole batch."""
    if verdict.whole_metrics:
        return all_metrics(model)
    compiled = keras_metrics.compiled_metrics(model)
    return [compiled[number] for number in verdict.metrics]


def other_metrics(model: keras.Model, metrics: Sequence[keras.Metric]) -> list[keras.Metric]:
    """Return all metrics of a model except `metrics` and those that contain one of them."""

    def concerns(metric: keras.Metric) -> bool:
        return any(metric is other for other in metrics) or any(map(concerns, keras_metrics.inner_metrics(metric)))

    return [metric for metric in all_metrics(model) if not concerns(metric)]


def _depends(tensor: tf.Tensor, on: list[Any]) -> bool:
    sources = {source.op for source in on if isinstance(source, tf.Tensor)}
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op in sources:
            return True
        if op not in seen:
            seen.add(op)
            waiting += [operand.op for operand in op.inputs]
    return False
