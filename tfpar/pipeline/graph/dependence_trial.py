"""Trial of a model's layer calls on a few examples: as a whole batch, as two halves, and with other neighbours.

It judges each call by itself, with the inputs that the calls before it give.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tfpar import data
from tfpar._compat import keras_model, random_state, typical_draws
from tfpar.pipeline.graph.example_comparison import agree, close, example_axis, joined, part_of
from tfpar.pipeline.graph.ir import Call, Value, run
from tfpar.pipeline.graph.known_layers import is_batch_independent, layers_of, uses_batch_statistics
from tfpar.pipeline.graph.trial_batch import moving_statistics

# Batch-dependent layers that a trial may miss: random ones, and Equalization, which in Keras 3.15 has one histogram for
# the whole batch.
_BATCH_DEPENDENT = (layers.MixUp, layers.CutMix, layers.Equalization)
# Number of trials with different random numbers.
NUM_SEEDS = 3


class Trial:
    """The values of a graph for a few examples, as a whole batch and as two halves of it.

    Args:
        whole: The inputs of the graph.
        training: Whether the layers run in training or in inference.
    """

    def __init__(self, whole: dict[Value, Any], training: bool) -> None:
        self.batch_dependent: list[str] = []
        self.irreproducible: list[str] = []  # calls with different random numbers in each run
        self.batch_normalizations: list[str] = []
        # The axis of the examples; None for a value that does not depend on the batch.
        self.axes: dict[Value, int | None] = {}
        self._whole, self._training = whole, training
        self._halves: tuple[dict[Value, Any], dict[Value, Any]] = ({}, {})
        for value, tensor in whole.items():
            self._store_halves(value, 0, int(data.num_rows(tensor)) // 2)

    def release(self, values: Iterable[Value]) -> None:
        """Free the tensors of values after their last use.

        Args:
            values: Values of the graph.
        """
        for value in values:
            for tensors in (self._whole, *self._halves):
                tensors.pop(value, None)

    def test(self, call: Call) -> None:
        """Run a call, record whether it is batch-dependent, and store its outputs for the whole and both halves.

        Args:
            call: A layer call whose inputs are stored.
        """
        if uses_batch_statistics(call, self._training):
            self.batch_normalizations.append(call.name)
        is_ragged = any(isinstance(self._whole[value], tf.RaggedTensor) for value in call.inputs)
        all_rows = bool(call.inputs) and all(self.axes[value] == 0 for value in call.inputs)
        if is_batch_independent(call, self._training) and not is_ragged and all_rows:
            for value, tensor in zip(call.outputs, self._run(call, self._whole), strict=True):
                self._whole[value] = tensor
                self._store_halves(value, 0, int(data.num_rows(tensor)) // 2)
            return
        with typical_draws.typical_draws() as drawn:
            outputs = self._run_on_halves(call)
            differs = _differ(outputs)
            depends: bool | None = differs and not self._is_random(call)
        for value, tensor, one, other in outputs:
            axis = example_axis(tensor, one, other)
            self._whole[value] = tensor
            self._store_halves(value, axis, 0 if axis is None else one.shape[axis])
        if not depends and (differs or drawn):
            depends = self._depends_at_random(call, drawn)
        if depends is None:
            self.irreproducible.append(call.name)
        if depends or (self._training and isinstance(call.operation, _BATCH_DEPENDENT)):
            self.batch_dependent.append(call.name)

    def adopt(self, call: Call, other: Trial) -> None:
        """Store the outputs of a call from a trial on other examples, and whether it is batch-dependent there.

        Args:
            call: A call that fails on the examples of this trial.
            other: The other trial, which has as many examples, and has tested the call.

        Raises:
            ValueError: If the inputs of the call are the same in both halves there, which shows nothing.
        """
        inputs = [value for value in call.inputs if other.axes[value] is not None]
        if inputs and all(close(*(half[value] for half in other._halves)) for value in inputs):
            raise ValueError(f"The inputs of {call.name!r} are equal in all examples.")
        for value in call.outputs:
            self.axes[value], self._whole[value] = other.axes[value], other._whole[value]
            for own, half in zip(self._halves, other._halves, strict=True):
                own[value] = half[value]
        self.batch_dependent += [name for name in other.batch_dependent if name == call.name]
        self.irreproducible += [name for name in other.irreproducible if name == call.name]

    def run_whole(self, calls: Iterable[Call]) -> None:
        """Run calls on the whole batch alone; raise what they raise.

        Args:
            calls: The calls of the graph up to one.
        """
        for call in calls:
            self._whole.update(zip(call.outputs, self._run(call, self._whole), strict=True))

    def _depends_at_random(self, call: Call, drawn: Sequence[str]) -> bool | None:
        """Return whether a call is batch-dependent for some random numbers; None if no seed reproduces them."""
        unusual: tuple[float, ...] = ()
        seeds = range(1)
        if not typical_draws.is_dropout(drawn):
            unusual, seeds = typical_draws.UNUSUAL, range(NUM_SEEDS)
        for quantile in unusual:
            # A call that fails for unusual numbers is not judged by them.
            with contextlib.suppress(tf.errors.OpError, ValueError), typical_draws.typical_draws(quantile):
                if _differ(self._run_on_halves(call)) and not self._is_random(call):
                    return True
        results = {self._depends_on_neighbours(call, seed) for seed in seeds}
        return True if True in results else None if None in results else False

    def _run_on_halves(self, call: Call) -> list[tuple[Value, Any, Any, Any]]:
        """Run a call on the whole batch and on both halves; return each output with its three tensors."""
        runs = [self._run(call, tensors) for tensors in (self._whole, *self._halves)]
        return list(zip(call.outputs, *runs, strict=True))

    def _store_halves(self, value: Value, axis: int | None, size: int) -> None:
        """Store the halves of a whole value as inputs of later calls, so that these are checked separately."""
        self.axes[value] = axis
        tensor = self._whole[value]
        if axis is None:
            parts = [tensor, tensor]
        else:
            parts = [part_of(tensor, 0, size, axis), part_of(tensor, size, tensor.shape[axis], axis)]
        for half, part in zip(self._halves, parts, strict=True):
            half[value] = part

    def _is_random(self, call: Call) -> bool:
        """Return whether a call has random numbers that typical numbers do not replace, so that halves differ."""
        one = self._run(call, self._whole)
        others = (self._run(call, self._whole, seed) for seed in range(1, 1 + NUM_SEEDS))
        return not all(close(*pair) for other in others for pair in zip(one, other, strict=True))

    def _depends_on_neighbours(self, call: Call, seed: int) -> bool | None:
        """Return whether the first half changes with the second, for the same random numbers in both runs.

        None if no seed reproduces the random numbers.
        """
        neighbours = dict(self._whole)
        for value in call.inputs:
            axis, first = self.axes[value], self._halves[0][value]
            if axis is not None:
                masks = keras_model.mask_of(first)
                doubled = joined(first, first, axis)
                neighbours[value] = keras_model.with_mask(
                    doubled, None if masks is None else tf.concat([masks, masks], axis)
                )
        runs = [self._run(call, tensors, seed) for tensors in (self._whole, self._whole, neighbours)]
        for value, one, repeated, other in zip(call.outputs, *runs, strict=True):
            axis = self.axes[value]
            if not close(one, repeated):
                return None
            if axis is not None:
                one, other = (part_of(tensor, 0, one.shape[axis] // 2, axis) for tensor in (one, other))
            if not close(one, other):
                return True
        return False

    def _run(self, call: Call, tensors: dict[Value, Any], seed: int = 0) -> list[Any]:
        """Run a call on copies of its weights and states.

        Args:
            call: The layer call.
            tensors: Its inputs.
            seed: Runs with the same seed have the same random numbers.
        """
        values = {value: tensors[value] for value in call.inputs}
        # Weights may be on several devices, and operations compiled with XLA read weights of their own device only.
        states = {id(variable): (variable, tf.identity(variable.value)) for variable in call.variables}
        random_states = [random_state.state_of_no_layer(), *typical_draws.seed_states(layers_of(call))]
        states |= {id(state): (state, value) for state, value in random_state.seeded(random_states, seed)}
        statistics = moving_statistics() if self._training else contextlib.nullcontext()
        with keras.StatelessScope(list(states.values())), statistics:
            run([call], values, training=self._training)
        return [values[value] for value in call.outputs]


def _differ(outputs: Iterable[tuple[Value, Any, Any, Any]]) -> bool:
    """Return whether the outputs of a call differ between the whole and its halves."""
    return not all(agree(whole, one, other, example_axis(whole, one, other)) for _, whole, one, other in outputs)
