"""Find the layers of a model that mix the examples of a batch, so that micro-batches change what they compute.

whole      [a b c d] ── call ── [A B C D]
halves     [a b]     ── call ── [A B]           must be the same examples: an example is computed alone
               [c d] ── call ──     [C D]
neighbours [a b a b] ── call ── [A B . .]       for what draws at random: same numbers, other neighbours

Halves draw other numbers than the whole, so that first typical numbers stand in for random ones, and then unusual ones:
what a layer does with a small chance shows only there. All runs are seeded, and so every process finds the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfpar import data
from tfpar._compat import keras_model, keras_pipeline, random_state, typical_draws
from tfpar.pipeline.graph.example_comparison import agree, close, example_axis, joined, part_of
from tfpar.pipeline.graph.ir import Call, Graph, Value, run
from tfpar.pipeline.graph.trial_batch import moving_statistics, trial_examples

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
# How many times a call runs with other random numbers.
NUM_SEEDS = 3


@dataclasses.dataclass(frozen=True)
class BatchDependence:
    """What micro-batches change in a model.

    Args:
        calls: Names of the calls whose result for an example depends on the others in the batch.
        batch_normalizations: Names of those that take their statistics from the batch: usual, and so told apart.
        outputs: Names of the model's outputs that do not have the examples first.
    """

    calls: tuple[str, ...] = ()
    batch_normalizations: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def check_batch_independence(graph: Graph, inputs: Sequence[Any], training: bool = True) -> None:
    """Refuse a model that micro-batches change; BatchNormalization is let through where it normalizes in training.

    Args:
        graph: The model.
        inputs: A batch of its flat inputs, `[examples, ...]` each.
        training: Whether the model is going to train, or to evaluate and predict.

    Raises:
        ValueError: If a call mixes the examples, or an output does not have them first.
    """
    found = find_batch_dependence(graph, inputs, training)
    if found.calls:
        names = ", ".join(map(repr, found.calls))
        raise ValueError(
            "Every layer must compute each example alone, or micro-batches change the result, received "
            f"{names}{'' if training else ' in inference'}, where an example depends on the others of its batch; use "
            "num_microbatches=1, or allow_batch_dependent_layers=True to run it so all the same."
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
        if any(isinstance(layer, layers.BatchNormalization) and layer.synchronized for layer in _layers(call)):
            raise ValueError(
                f"BatchNormalization(synchronized=True) takes its statistics from the global batch, and in a pipeline "
                f"{call.name!r} sees one micro-batch at a time. Leave synchronized out to normalize each micro-batch "
                "by itself, or use num_microbatches=1 or allow_batch_dependent_layers=True."
            )


@random_state.preserved_random_state()
def find_batch_dependence(graph: Graph, inputs: Sequence[Any], training: bool = True) -> BatchDependence:
    """Return the calls whose result for an example depends on which others are in the batch.

    Layers of Keras that cannot mix are known by their type; every other call that an output depends on runs on four
    examples and on two halves of them. No weight and no state changes, random ones included.

    Args:
        graph: The model.
        inputs: Its flat inputs, `[examples, ...]` each; the first four examples are used, or others made of one.
        training: Whether the calls run as in training, or as in inference. A call that draws numbers in training that
            no seed repeats counts as in inference.

    Returns:
        What was found; names in the order of the graph.

    Example:
        >>> from tfpar.pipeline.graph.tracing import trace
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.UnitNormalization(axis=0, name="mixes")])
        >>> find_batch_dependence(trace(model), [np.ones((4, 4))]).calls
        ('mixes',)
    """
    inputs, is_ragged = trial_examples(inputs), any(isinstance(tensor, tf.RaggedTensor) for tensor in inputs)
    calls, size = _needed(graph), int(data.num_rows(inputs))
    if not is_ragged and all(_is_safe(call, training) for call in calls):
        return BatchDependence(batch_normalizations=tuple(call.name for call in calls if _normalizes(call, training)))
    trial = _Trial(dict(zip(graph.inputs, inputs, strict=True)), training)
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
    mixing = tuple(trial.mixing)
    if trial.unknown and training:
        in_inference = find_batch_dependence(graph, inputs, training=False).calls
        found = {*mixing, *(name for name in trial.unknown if name in in_inference)}
        mixing = tuple(call.name for call in calls if call.name in found)
    return BatchDependence(mixing, tuple(trial.batch_normalizations), outputs)


class _Trial:
    """The values of a graph for a few examples at once and for two halves of them."""

    def __init__(self, whole: dict[Value, Any], training: bool) -> None:
        self.mixing: list[str] = []
        self.unknown: list[str] = []  # calls that draw other numbers in each run
        self.batch_normalizations: list[str] = []
        # The axis of the examples; None for a value that is the same for every batch.
        self.axes: dict[Value, int | None] = {}
        self._whole, self._training = whole, training
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
        if _normalizes(call, self._training):
            self.batch_normalizations.append(call.name)
        is_ragged = any(isinstance(self._whole[value], tf.RaggedTensor) for value in call.inputs)
        all_rows = bool(call.inputs) and all(self.axes[value] == 0 for value in call.inputs)
        if _is_safe(call, self._training) and not is_ragged and all_rows:
            for value, tensor in zip(call.outputs, self._run(call, self._whole), strict=True):
                self._whole[value] = tensor
                self._cut(value, 0, int(data.num_rows(tensor)) // 2)
            return
        with typical_draws.typical_draws() as drawn:
            made = self._made(call)
            differs = _differ(made)
            mixes: bool | None = differs and not self._is_random(call)
        for value, tensor, one, other in made:
            axis = example_axis(tensor, one, other)
            self._whole[value] = tensor
            self._cut(value, axis, 0 if axis is None else one.shape[axis])
        if not mixes and (differs or drawn):
            mixes = self._mixes_by_chance(call, drawn)
        if mixes is None:
            self.unknown.append(call.name)
        if mixes or (self._training and isinstance(call.operation, _MIXING)):
            self.mixing.append(call.name)

    def _mixes_by_chance(self, call: Call, drawn: Sequence[str]) -> bool | None:
        """Say whether a call mixes for some random numbers; None where it draws others in each run."""
        unusual: tuple[float, ...] = ()
        seeds = range(1)
        if not typical_draws.is_dropout(drawn):
            unusual, seeds = typical_draws.UNUSUAL, range(NUM_SEEDS)
        for quantile in unusual:
            # What it cannot do with unusual numbers, it need not do on halves either.
            with contextlib.suppress(tf.errors.OpError, ValueError), typical_draws.typical_draws(quantile):
                if _differ(self._made(call)) and not self._is_random(call):
                    return True
        found = {self._depends_on_neighbours(call, seed) for seed in seeds}
        return True if True in found else None if None in found else False

    def _made(self, call: Call) -> list[tuple[Value, Any, Any, Any]]:
        """Run a call on all examples and on both halves; return each value with what it is for these."""
        runs = [self._run(call, tensors) for tensors in (self._whole, *self._halves)]
        return list(zip(call.outputs, *runs, strict=True))

    def _cut(self, value: Value, axis: int | None, size: int) -> None:
        """Keep a value of all examples for each half, so that what made it is not blamed on those who take it."""
        self.axes[value] = axis
        tensor = self._whole[value]
        if axis is None:
            parts = [tensor, tensor]
        else:
            parts = [part_of(tensor, 0, size, axis), part_of(tensor, size, tensor.shape[axis], axis)]
        for half, part in zip(self._halves, parts, strict=True):
            half[value] = part

    def _is_random(self, call: Call) -> bool:
        """Say whether a call draws numbers that are not typical ones, and so other ones for halves."""
        one = self._run(call, self._whole)
        others = (self._run(call, self._whole, seed) for seed in range(1, 1 + NUM_SEEDS))
        return not all(close(*pair) for other in others for pair in zip(one, other, strict=True))

    def _depends_on_neighbours(self, call: Call, seed: int) -> bool | None:
        """Say whether the first half changes with the second, where both runs draw the same random numbers.

        None where no run draws the same.
        """
        neighbours = dict(self._whole)
        for value in call.inputs:
            axis, first = self.axes[value], self._halves[0][value]
            if axis is not None:
                masks = keras_pipeline.mask_of(first)
                doubled = joined(first, first, axis)
                neighbours[value] = keras_pipeline.with_mask(
                    doubled, None if masks is None else tf.concat([masks, masks], axis)
                )
        runs = [self._run(call, tensors, seed) for tensors in (self._whole, self._whole, neighbours)]
        for value, one, again, other in zip(call.outputs, *runs, strict=True):
            axis = self.axes[value]
            if not close(one, again):
                return None
            if axis is not None:
                one, other = (part_of(tensor, 0, one.shape[axis] // 2, axis) for tensor in (one, other))
            if not close(one, other):
                return True
        return False

    def _run(self, call: Call, tensors: dict[Value, Any], seed: int = 0) -> list[Any]:
        """Run a call with the weights and states that it has now, and leave them so.

        Args:
            call: The call.
            tensors: The values that it takes.
            seed: Runs with the same seed draw the same numbers.
        """
        given = {value: tensors[value] for value in call.inputs}
        # Weights may live on several devices, and what XLA compiles reads those of its own alone.
        states = {id(variable): (variable, tf.identity(variable.value)) for variable in call.variables}
        drawing = [random_state.state_of_no_layer(), *typical_draws.seed_states(_layers(call))]
        states |= {id(state): (state, value) for state, value in random_state.seeded(drawing, seed)}
        normalized = moving_statistics() if self._training else contextlib.nullcontext()
        with keras.StatelessScope(list(states.values())), normalized:
            run([call], given, training=self._training)
        return [given[value] for value in call.outputs]


def _differ(made: Iterable[tuple[Value, Any, Any, Any]]) -> bool:
    """Say whether a call makes something else of halves than of all examples."""
    return not all(agree(whole, one, other, example_axis(whole, one, other)) for _, whole, one, other in made)


def _needed(graph: Graph) -> list[Call]:
    """Return the calls that outputs depend on; the others have losses and states, not results."""
    wanted = {leaf for leaf in keras.tree.flatten(graph.outputs) if isinstance(leaf, Value)}
    needed = []
    for call in reversed(graph.calls):
        if wanted.intersection(call.outputs):
            wanted.update(call.inputs)
            needed.append(call)
    return needed[::-1]


def _is_safe(call: Call, training: bool) -> bool:
    kind = type(call.operation)
    if kind is layers.BatchNormalization:
        return training or not _normalizes(call, training)
    if kind in (layers.LSTM, layers.GRU, layers.SimpleRNN):
        return not call.operation.stateful
    rank = len(call.inputs[0].shape) if call.inputs else 0
    if kind in _SAFE_BY_AXIS and rank:
        return all(axis % rank for axis in keras.tree.flatten(call.operation.axis))
    return kind in _SAFE


def _normalizes(call: Call, training: bool) -> bool:
    """Say whether a layer holds a BatchNormalization that takes its statistics from the batch."""
    return (training if call.training is None else call.training) and any(
        isinstance(layer, layers.BatchNormalization) and layer.trainable for layer in _layers(call)
    )


def _layers(call: Call) -> list[keras.Layer]:
    return keras_model.all_layers(call.operation) if isinstance(call.operation, keras.Layer) else []
