"""Trials of a whole model: does the output for one example depend on the other examples of the batch?"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar import data
from tfpar._compat import keras_losses, keras_model, python_draws, random_state, tf_function, typical_draws
from tfpar.pipeline.graph.dependence_trial import NUM_SEEDS
from tfpar.pipeline.graph.example_comparison import close
from tfpar.pipeline.graph.known_layers import in_dataset
from tfpar.pipeline.graph.trial_batch import moving_statistics
from tfpar.reduction import whole_batch


def mixes(model: keras.Model, inputs: Any, training: bool) -> bool:
    """Return whether the outputs of a model for some examples depend on others, from calls with all and with parts.

    Args:
        model: A built model.
        inputs: Inputs of four or two examples.
        training: Whether the model is called in training or in inference mode. If its random numbers in training have
            no seed, it is called in inference mode too.

    Raises:
        ValueError: If the model draws from NumPy or Python.
    """
    with python_draws.noted([model, *keras_model.all_layers(model)]) as drawn:
        found = _ModelTrial(model, inputs, training).mixes()
        if found is None and training:
            with contextlib.suppress(Exception):  # RandomCrop does not crop in inference, and other layers may fail
                found = _ModelTrial(model, inputs, training=False).mixes()
    if drawn:
        layers = in_dataset(keras_model.all_layers(model))
        raise python_draws.refusal([model.name], "train on SingleDevice()", layers)
    return bool(found)


class _ModelTrial:
    """Calls of a model with examples and with two halves of them, which receive its gathered tensors of both halves."""

    def __init__(self, model: keras.Model, inputs: Any, training: bool) -> None:
        self._size = size = int(data.num_rows(inputs)) // 2
        self._model, self._inputs, self._training = model, inputs, training
        self._halves = [data.take_rows(inputs, 0, size), data.take_rows(inputs, size, 2 * size)]
        self._whole = whole_batch.Trial()

    def mixes(self) -> bool | None:
        """Return whether examples depend on others; None if calls with one seed draw different random numbers."""
        unusual: tuple[float, ...] = ()
        seeds = range(1)
        with typical_draws.typical_draws() as drawn:
            differ = self._halves_differ()
            if not differ and not drawn:
                return False
            if differ and not self._is_random():
                return True
        if not typical_draws.is_dropout(drawn):
            unusual, seeds = typical_draws.UNUSUAL, range(NUM_SEEDS)
        for quantile in unusual:
            with contextlib.suppress(tf.errors.OpError, ValueError), typical_draws.typical_draws(quantile):
                if self._halves_differ() and not self._is_random():
                    return True
        found = {self._depends_on_neighbours(seed) for seed in seeds}
        return True if True in found else None if None in found else False

    def _halves_differ(self) -> bool:
        rows = slice(self._size), slice(self._size, None)
        expected = self._recorded()
        starts = 0, self._size
        parts = [self._replayed(half, start) for half, start in zip(self._halves, starts, strict=True)]
        return not all(_agree(expected, part, of) for part, of in zip(parts, rows, strict=True))

    def _is_random(self) -> bool:
        """Return whether the outputs depend on the seed although typical values replace random numbers."""
        one = self._recorded()
        return not all(_agree(one, self._recorded(seed), slice(None)) for seed in range(1, 1 + NUM_SEEDS))

    def _depends_on_neighbours(self, seed: int) -> bool | None:
        """Return whether outputs of the first half depend on the second; None if one seed gives different outputs."""
        again, expected = self._recorded(seed), self._recorded(seed)
        if not _agree(expected, again, slice(None)):
            return None
        doubled = self._replayed(data.join_batches([self._halves[0], self._halves[0]]), 0, seed)
        rows = slice(self._size)
        return not all(close(_rows(one, rows), _rows(two, rows)) for one, two in zip(expected, doubled, strict=True))

    def _recorded(self, seed: int = 0) -> list[Any]:
        with self._whole.recording(2 * self._size):
            return self._outputs(self._inputs, seed)

    def _replayed(self, inputs: Any, start: int, seed: int = 0) -> list[Any]:
        with self._whole.replaying(start):
            return self._outputs(inputs, seed)

    def _outputs(self, inputs: Any, seed: int) -> list[Any]:
        layers = keras_model.all_layers(self._model)
        drawing = [random_state.state_of_no_layer(), *typical_draws.seed_states(layers)]
        with (
            keras.StatelessScope(random_state.seeded(drawing, seed)),
            keras_losses.collect_added_losses(list),
            tf_function.own_traces(),
            moving_statistics(of_synchronized=not self._training),
        ):
            outputs = keras_model.call_model(self._model, inputs, self._training)
        return [one for one in tf.nest.flatten(outputs) if one is not None]


def _agree(one: Sequence[Any], other: Sequence[Any], rows: slice) -> bool:
    return len(one) == len(other) and all(close(_rows(a, rows), _dense(b)) for a, b in zip(one, other, strict=True))


def _rows(tensor: Any, rows: slice) -> tf.Tensor:
    """Return rows of an output; rows of a ragged output are padded to the longest of these rows."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor[rows].to_tensor()
    dense = _dense(tensor)
    return dense[rows] if dense.shape.rank else dense


def _dense(tensor: Any) -> tf.Tensor:
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.to_dense(tensor)
    return tensor.to_tensor() if isinstance(tensor, tf.RaggedTensor) else tf.convert_to_tensor(tensor)
