"""Find the first layer of a model that mixes the rows of a batch.

    whole       a b c d e ─► model ─► A B C D E
    parts       a b       ─► model ─► A B            equal to the whole if each row is computed alone
                    c d e ─► model ─►     C D E
    neighbours  a b a b a ─► model ─► A B . . .      for random layers: the same random numbers, other neighbours

Only if the outputs differ do further runs look for the layer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.models import keras_model
from tfpar._compat.models.keras_calls import LayerCall
from tfpar.reduction import whole_batch
from tfpar.reduction.partial_sums import PartialSums
from tfpar.study import relation
from tfpar.study.observation import Mode, Observation, observe
from tfpar.study.rows import SIZES, parts_of, with_other_neighbours

# In Keras 3.15 they mix images, draw once for all images, or compute one histogram for all images.
_MIXING = (
    *(keras.layers.MixUp, keras.layers.CutMix, keras.layers.AugMix, keras.layers.RandAugment),
    keras.layers.Equalization,
)
_NUM_SEEDS = 3


class MixingLayer(NamedTuple):
    """A layer whose result for a row depends on other rows.

    Args:
        operation: The layer, an operation of `keras.ops`, or the model, if its own `call` mixes rows or the layer has
            several rows for each example.
        path: The name of the layer after those of the layers around it.
        args: For each leaf of its positional arguments, whether it has rows.
        kwargs: The same for its keyword arguments, by name.
        outputs: The same for its results.
    """

    operation: Any
    path: str
    args: list[bool]
    kwargs: dict[str, list[bool]]
    outputs: list[bool]


class Runs:
    """Runs of a model on five rows, then on both parts of them, where `tfpar.gather` returns the five rows.

    Args:
        model: A built model.
        rows: Five rows of its inputs.
        mode: How it runs.
        replays_losses: Whether losses in `call` are those of the whole batch.
        with_whole_batch: Context manager in which some layers are called with the whole batch.
    """

    def __init__(
        self,
        model: keras.Model,
        rows: Any,
        mode: Mode,
        replays_losses: bool = True,
        with_whole_batch: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.model, self.rows, self.mode, self._with_whole_batch = model, rows, mode, with_whole_batch
        self._gathered = whole_batch.Recording(mode.gathers, replays_losses)

    def whole(self, **settings: Any) -> Observation:
        """Run the model on all rows; settings as for `observe`."""
        with self._gathered.recording(sum(SIZES)), self._with_whole_batch():
            return observe(self.model, self.rows, self.mode, **settings)

    def parts(self, states: Sequence[Any] = (None, None), **settings: Any) -> list[Observation]:
        """Run the model on each part, after `whole`, with states for each; settings as for `observe`."""
        seen = []
        for part, before in zip(parts_of(self.rows), states, strict=True):
            with self._gathered.replaying(part.start), self._with_whole_batch():
                seen.append(observe(self.model, part.rows, self.mode, states=before, **settings))
        return seen

    def with_losses_of_parts(self) -> Runs:
        """Return runs in which losses in `call` are those of the part, not of the whole batch."""
        return Runs(self.model, self.rows, self.mode, False, self._with_whole_batch)

    @property
    def losses(self) -> list[PartialSums]:
        """The losses that `call` computed in the last runs of `whole` and `parts`."""
        return self._gathered.losses

    def neighbours(self, **settings: Any) -> Observation:
        """Run the model on the rows of the first part beside other rows, after `whole`."""
        with self._gathered.replaying(0), self._with_whole_batch():
            return observe(self.model, with_other_neighbours(self.rows), self.mode, **settings)


def find_mixing(runs: Runs, whole: Observation, parts: Sequence[Observation]) -> MixingLayer | None:
    """Return the first layer that mixes rows; None if there is none.

    Args:
        runs: Further runs.
        whole: A run on all rows.
        parts: Runs on the parts of them.
    """
    mode, layers = runs.mode, keras_model.all_layers(runs.model)
    is_known = mode.training and any(isinstance(layer, _MIXING) for layer in layers)
    is_joined = joins(whole.outputs, [part.outputs for part in parts])
    if is_known or (not is_joined and not _is_random(runs, whole)):
        return _first(runs.whole(keeps_calls=True), runs.parts(keeps_calls=True), joins, runs)
    if is_joined and whole.random_functions <= {"dropout"}:
        return None
    for seed in range(_NUM_SEEDS):
        random = {"seed": seed, "is_random": True, "keeps_calls": True}
        drawn, again, neighbours = runs.whole(**random), runs.whole(**random), runs.neighbours(**random)
        if not _same_rows(drawn.outputs, [again.outputs]):
            return None  # the seed does not reproduce the random numbers
        if not _same_rows(drawn.outputs, [neighbours.outputs]):
            return _first(drawn, [neighbours], _same_rows, runs)
    return None


def calls_at(runs: Runs, paths: Sequence[str]) -> list[MixingLayer]:
    """Return the layers that the model calls under some paths."""
    calls = runs.whole(keeps_calls=True).calls
    whole = MixingLayer(runs.model, runs.model.name, _have_rows(runs.rows), {}, [])
    return [*([whole] if runs.model.name in paths else []), *(_mixing(call) for call in calls if call.path in paths)]


def _is_random(runs: Runs, whole: Observation) -> bool:
    """Return whether the outputs depend on the seed, although typical values replace random numbers."""
    return not _agree_all(whole.outputs, runs.whole(seed=1).outputs)


def _first(
    whole: Observation, others: Sequence[Observation], agree: Callable[[Any, Sequence[Any]], bool], runs: Runs
) -> MixingLayer:
    """Return the first layer whose arguments agree in all runs while its results do not."""
    for number, call in enumerate(whole.calls):
        same = [other.calls[number] for other in others if number < len(other.calls)]
        if len(same) < len(others) or any(other.operation is not call.operation for other in same):
            break
        if not agree((call.args, call.kwargs), [(other.args, other.kwargs) for other in same]):
            continue
        mixes = runs.mode.training and isinstance(call.operation, _MIXING)
        if mixes or not agree(call.outputs, [other.outputs for other in same]):
            mixing = _mixing(call)
            if any((*mixing.args, *itertools.chain(*mixing.kwargs.values()))):
                return mixing
            return mixing._replace(operation=runs.model, args=_have_rows(runs.rows), outputs=_have_rows(whole.outputs))
    return MixingLayer(runs.model, runs.model.name, _have_rows(runs.rows), {}, _have_rows(whole.outputs))


def _mixing(call: LayerCall) -> MixingLayer:
    kwargs = {name: _have_rows(value) for name, value in call.kwargs.items()}
    return MixingLayer(call.operation, call.path, _have_rows(call.args), kwargs, _have_rows(call.outputs))


def _have_rows(structure: Any) -> list[bool]:
    """Return for each leaf whether it has rows."""
    leaves = keras.tree.flatten(structure)
    return [isinstance(leaf, tf.Tensor) and leaf.shape.rank and leaf.shape[0] == sum(SIZES) for leaf in leaves]


def joins(whole: Any, parts: Sequence[Any]) -> bool:
    """Return whether each tensor is the concatenation of those of the parts, or equal to each of them."""
    columns = zip(_arrays(whole), *map(_arrays, parts), strict=False)
    return all(relation.is_joined(values, of_parts) or _all_close(values, of_parts) for values, *of_parts in columns)


def _same_rows(whole: Any, others: Sequence[Any]) -> bool:
    """Return whether the rows of the first part are equal in all tensors."""
    columns = zip(_arrays(whole), *map(_arrays, others), strict=False)
    return all(_all_close(_first_rows(values), map(_first_rows, rest)) for values, *rest in columns)


def _agree_all(structure: Any, other: Any) -> bool:
    return all(relation.close(*pair) for pair in zip(_arrays(structure), _arrays(other), strict=False))


def _all_close(values: np.ndarray, others: Any) -> bool:
    return all(relation.close(other, values) for other in others)


def _first_rows(values: np.ndarray) -> np.ndarray:
    return values[: SIZES[0]] if values.ndim and len(values) == sum(SIZES) else values


def _arrays(structure: Any) -> list[np.ndarray]:
    """Return the tensors of a structure as arrays that can be concatenated."""
    arrays: list[np.ndarray] = []
    for leaf in tf.nest.flatten(structure):
        if isinstance(leaf, tf.RaggedTensor):
            arrays += [np.asarray(leaf.flat_values), *map(np.asarray, leaf.nested_row_lengths())]
        elif isinstance(leaf, tf.SparseTensor):
            arrays.append(np.asarray(tf.sparse.to_dense(leaf)))
        elif isinstance(leaf, tf.Tensor):
            arrays.append(np.asarray(leaf))
    return arrays
