"""Find the layers of a model that mix the examples of a batch, so that micro-batches change what they compute.

whole      [a b c d] ── call ── [A B C D]
halves     [a b]     ── call ── [A B]           must be the same examples: an example is computed alone
               [c d] ── call ──     [C D]
neighbours [a b a b] ── call ── [A B . .]       for what draws at random: same numbers, other neighbours

Halves draw other numbers than the whole, so that first typical numbers stand in for random ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tfpar import _compat, _compat_draws, _compat_pipeline, _compat_random, data
from tfpar.pipeline.calls import Call, Graph, Value, run
from tfpar.pipeline.trial import moving_statistics, trial_examples

# Layers that compute each example alone, whatever their settings, if the examples come first.
_SAFE = {
    *(layers.Dense, layers.Embedding, layers.Identity, layers.Masking, layers.ActivityRegularization),
    *(layers.Activation, layers.ReLU, layers.LeakyReLU, layers.PReLU, layers.ELU),
    *(layers.Conv1D, layers.Conv2D, layers.Conv3D, layers.DepthwiseConv1D, layers.DepthwiseConv2D),
    *(layers.SeparableConv1D, layers.SeparableConv2D),
    *(layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose),
    *(layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D),
    *(layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D),
    *(layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D),
    *(layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D, layers.GlobalMaxPooling3D),
    *(layers.Dropout, layers.AlphaDropout, layers.GaussianDropout, layers.GaussianNoise),
    *(layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D),
    *(layers.Flatten, layers.Reshape, layers.Permute, layers.RepeatVector, layers.Rescaling),
    *(layers.UpSampling1D, layers.UpSampling2D, layers.UpSampling3D),
    *(layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D),
    *(layers.Cropping1D, layers.Cropping2D, layers.Cropping3D),
    *(layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum),
}
# Layers that do so if their axis is not that of the examples.
_SAFE_BY_AXIS = {layers.Concatenate, layers.LayerNormalization, layers.RMSNormalization, layers.Softmax}
# Layers that mix by a chance, or with examples, that a trial may miss: Keras 3.15 counts one histogram of a batch.
_MIXING = (layers.MixUp, layers.CutMix, layers.Equalization)

# Relative to the largest element, by the bytes of a number: about the root of its precision.
_TOLERANCES = {1: 0.5, 2: 0.1, 4: 3e-4, 8: 1e-8}


@dataclasses.dataclass(frozen=True)
class Mixing:
    """What micro-batches change in a model.

    Args:
        calls: Names of the calls whose result for an example depends on the others in the batch.
        batch_normalizations: Names of those that take their statistics from the batch: usual, and so told apart.
        outputs: Names of the model's outputs that do not have the examples first.
    """

    calls: tuple[str, ...] = ()
    batch_normalizations: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def check_mixing(graph: Graph, inputs: Sequence[Any]) -> None:
    """Refuse a model that micro-batches change; BatchNormalization is let through.

    Args:
        graph: The model.
        inputs: A batch of its flat inputs, `[examples, ...]` each.

    Raises:
        ValueError: If a call mixes the examples, or an output does not have them first.
    """
    found = find_mixing(graph, inputs)
    if found.calls:
        raise ValueError(
            "Every layer must compute each example alone, or micro-batches change the result, received "
            f"{', '.join(map(repr, found.calls))}, where an example depends on the others of its batch; use "
            "num_microbatches=1, or allow_mixing=True to train so all the same."
        )
    if found.outputs:
        raise ValueError(
            "Every output of a model must have the examples as its first axis, so that those of micro-batches are put "
            f"together, received {', '.join(map(repr, found.outputs))}; move the axis with keras.ops.transpose, or use "
            "num_microbatches=1."
        )


def check_synchronized(graph: Graph) -> None:
    """Refuse a BatchNormalization that asks for the statistics of the global batch.

    Args:
        graph: The model.

    Raises:
        ValueError: If there is one.
    """
    for call in graph.calls:
        if isinstance(call.operation, layers.BatchNormalization) and call.operation.synchronized:
            raise ValueError(
                f"BatchNormalization(synchronized=True) takes its statistics from the global batch, and in a pipeline "
                f"{call.name!r} sees one micro-batch at a time. Leave synchronized out to normalize each micro-batch "
                "by itself, or use num_microbatches=1 or allow_mixing=True."
            )


@_compat_random.preserved_random_state()
def find_mixing(graph: Graph, inputs: Sequence[Any]) -> Mixing:
    """Return the calls whose result for an example depends on which others are in the batch.

    Layers of Keras that cannot mix are known by their type; every other call that an output depends on runs on four
    examples and on two halves of them, in training mode. No weight and no state changes, random ones included.

    Args:
        graph: The model.
        inputs: Its flat inputs, `[examples, ...]` each; the first four examples are used, or others made of one.

    Returns:
        What was found; names in the order of the graph.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.UnitNormalization(axis=0, name="mixes")])
        >>> find_mixing(trace(model), [np.ones((4, 4))]).calls
        ('mixes',)
    """
    inputs, is_ragged = trial_examples(inputs), any(isinstance(tensor, tf.RaggedTensor) for tensor in inputs)
    calls, size = _needed(graph), int(data.num_rows(inputs))
    if not is_ragged and all(_is_safe(call) for call in calls):
        return Mixing(batch_normalizations=tuple(call.name for call in calls if _normalizes(call)))
    trial = _Trial(dict(zip(graph.inputs, inputs, strict=True)))
    last_use = {value: index for index, call in enumerate(calls) for value in call.inputs}
    returned = [leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)]
    last_use |= dict.fromkeys(returned, len(calls))
    for index, call in enumerate(calls):
        try:
            trial.test(call)
        except (tf.errors.InvalidArgumentError, ValueError) as error:
            raise ValueError(
                f"Every layer must run on any number of examples, and {call.name!r} does not run on {size // 2} and "
                f"{size}: {str(error).splitlines()[0]} Leave the number of examples open (None, or -1 in a reshape), "
                "or use num_microbatches=1."
            ) from error
        trial.forget(value for value in [*call.inputs, *call.outputs] if last_use.get(value, -1) <= index)
    outputs = tuple(value.name for value in dict.fromkeys(returned) if trial.axes[value] != 0)
    return Mixing(tuple(trial.mixing), tuple(trial.batch_normalizations), outputs)


class _Trial:
    """The values of a graph for a few examples at once and for two halves of them."""

    def __init__(self, whole: dict[Value, Any]) -> None:
        self.mixing: list[str] = []
        self.batch_normalizations: list[str] = []
        # The axis of the examples; None for a value that is the same for every batch.
        self.axes: dict[Value, int | None] = {}
        self._whole = whole
        self._halves: tuple[dict[Value, Any], dict[Value, Any]] = ({}, {})
        for value, tensor in whole.items():
            self._cut(value, 0, int(data.num_rows(tensor)) // 2)

    def forget(self, values: Iterable[Value]) -> None:
        """Drop the tensors of values that are not needed any more."""
        for value in values:
            for tensors in (self._whole, *self._halves):
                tensors.pop(value, None)

    def test(self, call: Call) -> None:
        """Run a call, note whether it mixes, and keep what it makes for both halves as if it did not."""
        if _normalizes(call):
            self.batch_normalizations.append(call.name)
        is_ragged = any(isinstance(self._whole[value], tf.RaggedTensor) for value in call.inputs)
        if _is_safe(call) and not is_ragged and call.inputs and all(self.axes[value] == 0 for value in call.inputs):
            for value, tensor in zip(call.outputs, _run(call, self._whole), strict=True):
                self._whole[value] = tensor
                self._cut(value, 0, int(data.num_rows(tensor)) // 2)
            return
        with _compat_draws.typical_draws() as drawn:
            mixes = self._halves_differ(call)
            hides = mixes and self._is_random(call)
        if hides or (drawn and not mixes):
            mixes = self._depends_on_neighbours(call)
        if mixes or isinstance(call.operation, _MIXING):
            self.mixing.append(call.name)

    def _halves_differ(self, call: Call) -> bool:
        """Run a call on all examples and on both halves, and keep what it makes."""
        whole = _run(call, self._whole)
        halves = [_run(call, half) for half in self._halves]
        differs = False
        for value, tensor, one, other in zip(call.outputs, whole, *halves, strict=True):
            axis = _axis(tensor, one, other)
            differs |= not _agree(tensor, one, other, axis)
            self._whole[value] = tensor
            self._cut(value, axis, 0 if axis is None else one.shape[axis])
        return differs

    def _cut(self, value: Value, axis: int | None, size: int) -> None:
        """Keep a value of all examples for each half, so that what made it is not blamed on those who take it."""
        self.axes[value] = axis
        tensor = self._whole[value]
        if axis is None:
            parts = [tensor, tensor]
        else:
            parts = [_part(tensor, 0, size, axis), _part(tensor, size, tensor.shape[axis], axis)]
        for half, part in zip(self._halves, parts, strict=True):
            half[value] = part

    def _is_random(self, call: Call) -> bool:
        """Say whether a call draws numbers that are not typical ones, and so other ones for halves."""
        one, other = (_run(call, self._whole, seed) for seed in (0, 1))
        return not all(close(*pair) for pair in zip(one, other, strict=True))

    def _depends_on_neighbours(self, call: Call) -> bool:
        """Say whether the first half changes with the second, where both runs draw the same random numbers."""
        neighbours = dict(self._whole)
        for value in call.inputs:
            axis, first = self.axes[value], self._halves[0][value]
            if axis is not None:
                masks = _compat_pipeline.mask_of(first)
                doubled = _joined(first, first, axis)
                neighbours[value] = _compat_pipeline.with_mask(
                    doubled, None if masks is None else tf.concat([masks, masks], axis)
                )
        runs = [_run(call, tensors, seed=0) for tensors in (self._whole, self._whole, neighbours)]
        for value, one, again, other in zip(call.outputs, *runs, strict=True):
            axis = self.axes[value]
            if not close(one, again):
                return False  # it draws anew each time: nothing can be compared
            if axis is not None:
                one, other = (_part(tensor, 0, one.shape[axis] // 2, axis) for tensor in (one, other))
            if not close(one, other):
                return True
        return False


def _needed(graph: Graph) -> list[Call]:
    """Return the calls that outputs depend on; the others have losses and states, not results."""
    wanted = {leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)}
    needed = []
    for call in reversed(graph.calls):
        if wanted.intersection(call.outputs):
            wanted.update(call.inputs)
            needed.append(call)
    return needed[::-1]


def _is_safe(call: Call) -> bool:
    kind = type(call.operation)
    if kind is layers.BatchNormalization:
        return True
    if kind in (layers.LSTM, layers.GRU, layers.SimpleRNN):
        return not call.operation.stateful
    rank = len(call.inputs[0].shape) if call.inputs else 0
    if kind in _SAFE_BY_AXIS and rank:
        return all(axis % rank for axis in keras.tree.flatten(call.operation.axis))
    return kind in _SAFE


def _normalizes(call: Call) -> bool:
    """Say whether a layer holds a BatchNormalization that takes its statistics from the batch in training."""
    return call.training is not False and any(
        isinstance(layer, layers.BatchNormalization) and layer.trainable for layer in _layers(call)
    )


def _layers(call: Call) -> list[keras.Layer]:
    return _compat.all_layers(call.operation) if isinstance(call.operation, keras.Layer) else []


def _run(call: Call, tensors: dict[Value, Any], seed: int | None = None) -> list[Any]:
    """Run a call as in training with the states that it has now, and leave them so.

    Args:
        call: The call.
        tensors: The values that it takes.
        seed: Runs with the same seed draw the same numbers; None leaves TensorFlow's own functions unseeded.
    """
    given = {value: tensors[value] for value in call.inputs}
    # Weights may live on several devices, and what XLA compiles reads those of its own alone.
    states = {id(variable): (variable, tf.identity(variable.value)) for variable in call.variables}
    for state in (_compat_random.state_of_no_layer(), *_compat_draws.seed_states(_layers(call))):
        states[id(state)] = state, state.value + (seed or 0)
    if seed is not None:
        tf.random.set_seed(seed)
    with keras.StatelessScope(list(states.values())), moving_statistics():
        run([call], given, training=True)
    return [given[value] for value in call.outputs]


def _axis(whole: Any, one: Any, other: Any) -> int | None:
    """Return the axis along which two halves make up the whole; None if no axis has another size."""
    sizes = zip(whole.shape, one.shape, other.shape, strict=True)
    return next((axis for axis, (all_, first, _) in enumerate(sizes) if all_ != first), None)


def _agree(whole: Any, one: Any, other: Any, axis: int | None) -> bool:
    if axis is None:
        return close(whole, one) and close(whole, other)
    rest = [tuple(tensor.shape[:axis]) + tuple(tensor.shape[axis + 1 :]) for tensor in (whole, one, other)]
    return rest[0] == rest[1] == rest[2] and close(whole, _joined(one, other, axis))


def _joined(one: Any, other: Any, axis: int) -> Any:
    return tf.sparse.concat(axis, [one, other]) if isinstance(one, tf.SparseTensor) else tf.concat([one, other], axis)


def close(one: Any, other: Any) -> bool:
    """Say whether two tensors are the same but for rounding, which depends on the size of the batch."""
    composites = (tf.RaggedTensor, tf.SparseTensor)
    if isinstance(one, composites) or isinstance(other, composites):
        one, other = (tf.sparse.reorder(x) if isinstance(x, tf.SparseTensor) else x for x in (one, other))
        parts = [tf.nest.flatten(tensor, expand_composites=True) for tensor in (one, other)]
        return len(parts[0]) == len(parts[1]) and all(map(close, *parts))
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape or not tf.as_dtype(one.dtype).is_floating:
        return bool(np.array_equal(one, other))
    tolerance = _TOLERANCES[one.dtype.itemsize]
    one, other = one.astype("float64"), other.astype("float64")
    largest = float(np.max(np.abs(one), initial=0.0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True))


def _part(tensor: Any, start: int, stop: int, axis: int) -> Any:
    """Return a part of a tensor along an axis, with the same part of its mask."""
    if isinstance(tensor, tf.SparseTensor):
        begin, size = [0] * len(tensor.shape), list(tensor.shape)
        begin[axis], size[axis] = start, stop - start
        return tf.sparse.slice(tensor, begin, size)
    where = (*[slice(None)] * axis, slice(start, stop))
    mask = _compat_pipeline.mask_of(tensor)
    cut = mask is not None and axis < len(mask.shape)
    return _compat_pipeline.with_mask(tensor[where], mask[where] if cut else mask)
