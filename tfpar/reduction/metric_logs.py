"""The logs of a model: results of its metrics, and the entries that an overridden `compute_metrics` adds.

Keras 3.15 logs what `compute_metrics` returned for the last batch, unless it has exactly the names of the model's
metrics. On one device that is kept in variables. Where replicas or micro-batches each see a part of the batch, an
entry is computed again from what all of them counted, which is exact if it depends on metrics alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfpar._compat import keras_metrics, keras_model, tf_function


@dataclasses.dataclass
class Entries:
    """What `compute_metrics` of one model returns.

    Args:
        specs: Of its arguments.
        values: Variables with what it returned for the last batch, in its structure; None for parts of batches.
    """

    specs: Any
    values: Any


_entries: weakref.WeakKeyDictionary[keras.Model, Entries] = weakref.WeakKeyDictionary()


def update_metrics(model: keras.Model, inputs: Any, targets: Any, outputs: Any, weights: Any, *, whole: bool) -> None:
    """Add examples to the compiled metrics, or to those that an overridden `compute_metrics` counts.

    Args:
        model: A compiled model.
        inputs: What the model took, `[batch, ...]` each.
        targets: Its targets, or None.
        outputs: Its outputs.
        weights: Sample weights, or None.
        whole: Whether these are the whole global batch, on one device.
    """
    returned = model.compute_metrics(inputs, targets, outputs, sample_weight=weights)
    if not keras_model.overridden(model, "compute_metrics") or not isinstance(returned, dict):
        return
    if returned.keys() == model.get_metrics_result().keys():
        _entries.pop(model, None)
        return
    if whole:
        before = _entries.get(model)
        _entries[model] = Entries(None, _kept(model, returned, None if before is None else before.values))
    else:
        _entries[model] = Entries(_specs((inputs, targets, outputs, weights)), None)


def results(model: keras.Model) -> dict[str, Any]:
    """Return the logs, from what has been counted: of all replicas where read outside of them.

    Raises:
        ValueError: If an entry of `compute_metrics` depends on the examples of a batch of which replicas or
            micro-batches see a part each.
    """
    entries = _entries.get(model)
    logs: dict[str, Any]
    if entries is None:
        logs = model.get_metrics_result()
        return logs
    if entries.values is not None:
        logs = keras.tree.map_structure(lambda variable: variable.read_value(), entries.values)
        return logs
    return _computed_again(model, entries)


def _kept(model: keras.Model, returned: dict[str, Any], before: Any) -> Any:
    """Assign what was returned to variables, made with the first trace."""
    tensors = keras.tree.map_structure(tf.convert_to_tensor, returned)
    if model.jit_compile:
        _check_fixed_shapes(model, tensors)
    if before is None or _layout(before) != _layout(tensors):
        with tf.init_scope():
            before = keras.tree.map_structure(_variable_for, tensors)
    for variable, tensor in zip(keras.tree.flatten(before), keras.tree.flatten(tensors), strict=True):
        variable.assign(tensor)
    return before


def _check_fixed_shapes(model: keras.Model, tensors: dict[str, Any]) -> None:
    for name, value in tensors.items():
        for tensor in keras.tree.flatten(value):
            if not tensor.shape.is_fully_defined():
                raise ValueError(
                    f"With jit_compile=True an entry that compute_metrics adds must have a fixed shape, and {name!r} "
                    f"of {type(model).__name__} has {tensor.shape}. Reduce it over the batch, or leave jit_compile out."
                )


def _layout(values: Any) -> Any:
    """Return the structure, with the type and the shape of each value."""
    return keras.tree.map_structure(lambda value: f"{value.dtype.name} {value.shape}", values)


def _variable_for(tensor: tf.Tensor) -> tf.Variable:
    zeros = tf.zeros([size or 0 for size in tensor.shape.as_list()] if tensor.shape.rank else [], tensor.dtype)
    return tf.Variable(zeros, trainable=False, shape=tensor.shape)


def _specs(arguments: Any) -> Any:
    def spec(value: Any) -> Any:
        if value is None or not isinstance(value, tf.Tensor):
            return None if value is None else tf.type_spec_from_value(value)
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)

    return keras.tree.map_structure(spec, arguments)


def _computed_again(model: keras.Model, entries: Entries) -> dict[str, Any]:
    """Return what `compute_metrics` makes of the metrics as they are; no example is counted."""
    found = {id(variable): variable for metric in all_metrics(model) for variable in metric.variables}
    variables = list(found.values())
    feeds: list[tf.Tensor] = []
    examples: list[Any] = []

    def compute(batch: Any, counts: list[tf.Tensor]) -> Any:
        feeds[:], examples[:] = counts, tf.nest.flatten(batch, expand_composites=True)
        inputs, targets, outputs, weights = batch
        # The counts are read outside: TensorFlow 2.21 may read a variable in a function before it was assigned.
        held = keras.StatelessScope(list(zip(variables, counts, strict=True)))
        with held, tf_function.own_traces(), _no_updates(model):
            returned = model.compute_metrics(inputs, targets, outputs, sample_weight=weights)
        return keras.tree.map_structure(tf.convert_to_tensor, returned)

    count_specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    wrapped = tf.compat.v1.wrap_function(compute, [entries.specs, count_specs])
    for name, value in wrapped.structured_outputs.items():
        if any(_depends(tensor, examples) for tensor in keras.tree.flatten(value)):
            raise ValueError(
                f"Where replicas or micro-batches share a batch, an entry that compute_metrics adds must follow from "
                f"the model's metrics, and {name!r} of {type(model).__name__} depends on the examples. Count it in a "
                "keras.metrics.Mean of the model and return its result, or train on SingleDevice()."
            )
    counts = [tf.convert_to_tensor(variable.value) for variable in variables]
    logs: dict[str, Any] = wrapped.prune(feeds, wrapped.structured_outputs)(*counts)
    return logs


@contextlib.contextmanager
def _no_updates(model: keras.Model) -> Iterator[None]:
    """Let the metrics of a model ignore examples inside this context."""
    with contextlib.ExitStack() as stack:
        for metric in all_metrics(model):
            stack.enter_context(mock.patch.dict(vars(metric), {"update_state": lambda *_, **__: None}))
        yield


def all_metrics(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that a model lists, those that it and its layers hold, and those inside of them."""
    waiting, found = [*model.metrics, *keras_model.own_metrics(model), keras_model.loss_tracker(model)], {}
    while waiting:
        metric = waiting.pop()
        if id(metric) not in found:
            found[id(metric)] = metric
            waiting += keras_metrics.inner_metrics(metric)
    return list(found.values())


def _depends(tensor: tf.Tensor, on: list[Any]) -> bool:
    """Say whether a tensor is computed from others."""
    sources = {one.op for one in on if isinstance(one, tf.Tensor)}
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op in sources:
            return True
        if op not in seen:
            seen.add(op)
            waiting += [given.op for given in op.inputs]
    return False
