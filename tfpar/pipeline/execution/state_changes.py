"""Changes of states by the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar.pipeline.execution.live_tensors import Key, LiveTensors
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.stages.bundles import Bundle, bundle_specs, bundled, unbundle
from tfpar.reduction.gradients.gradient_addition import sum_of


class Change(NamedTuple):
    """The change of a state in a step.

    Args:
        state: The state.
        before: Its value before the step.
        change: The sum of its changes; its new value if it is replaced.
        is_replaced: Whether the step replaces the value.
    """

    state: keras.Variable
    before: tf.Tensor
    change: tf.Tensor
    is_replaced: bool


def sum_changes(replicas: Sequence[Sequence[Change]]) -> list[Change]:
    """Sum the changes of states over the replicas of a pipeline, on the device of each state.

    Args:
        replicas: For each replica, the changes of the same states.
    """
    sums = []
    for first, *others in zip(*replicas, strict=True):
        with tf.device(first.state.value.device):
            change = first.change if first.is_replaced else sum_of([first.change, *(other.change for other in others)])
            sums.append(first._replace(change=tf.identity(change)))
    return sums


def new_values(changes: Sequence[Change]) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return each state with its value after the step."""
    pairs = []
    for state, before, change, is_replaced in changes:
        with tf.device(state.value.device):
            pairs.append((state, tf.identity(change) if is_replaced else before + change))
    return pairs


def sum_by_variable(
    replicas: Sequence[Sequence[tuple[keras.Variable, tf.Tensor]]],
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return each variable with the sum of its values over several lists."""
    variables = {id(variable): variable for pairs in replicas for variable, _ in pairs}
    values: dict[int, list[tf.Tensor]] = {key: [] for key in variables}
    for variable, value in [pair for pairs in replicas for pair in pairs]:
        values[id(variable)].append(value)
    sums = []
    for key, variable in variables.items():
        with tf.device(variable.value.device):
            sums.append((variable, sum_of(values[key])))
    return sums


class StateChanges:
    """Accumulates the changes of the states that one stage, or the loss, is the last to change in a micro-batch.

    A state changes by the mean of its changes over micro-batches, weighted by their sizes; averaging changes instead of
    values keeps unchanged states exact. Metric states of layers are summed. Other integer states change as in one
    micro-batch: a seed advances once a step.

    Args:
        owner: The stage, or the loss.
        states: All states that it changes.
        owned: The states that it is the last to change.
        before: Their values before the step.
        counting: The `id` of each metric state that a layer holds.
        device: The device of the stage.
    """

    def __init__(
        self,
        owner: Hashable,
        states: Sequence[keras.Variable],
        owned: Sequence[keras.Variable],
        before: Sequence[tf.Tensor],
        counting: Container[int],
        device: str,
    ) -> None:
        self._key, self._owned, self._values, self._device = Key("changes", owner), owned, before, device
        self._specs = [tf.TensorSpec(state.shape, state.dtype) for state in states]
        self._indices = [next(i for i, state in enumerate(states) if state is owned_state) for owned_state in owned]
        self._owned_specs = [self._specs[index] for index in self._indices]
        self._counts = [id(state) in counting for state in owned]
        pairs = zip(self._owned_specs, self._counts, strict=True)
        self._replaced = [not (spec.dtype.is_floating or counts) for spec, counts in pairs]
        self._before = bundled(before, device)
        with tf_function.outside_of_functions():
            self._adder = self._compile()

    def add(self, live: LiveTensors, new: Bundle, microbatch: Microbatch) -> None:
        """Add the changes by a micro-batch.

        Args:
            live: The live tensors of the step.
            new: The new values of `states`.
            microbatch: The micro-batch.
        """
        sums = live.get(self._key)
        with tf.device(self._device):
            if sums is None:
                sums = bundled([tf.zeros(spec.shape, spec.dtype) for spec in self._owned_specs], self._device)
            weights = microbatch.fraction, microbatch.example_weight
            live[self._key] = list(tf_function.unordered_call(self._adder, sums, self._before, new, *weights))

    def results(self, live: LiveTensors) -> list[Change]:
        """Remove the sums from the live tensors, and return the change of each state, if a micro-batch has run."""
        sums = live.take(self._key)
        if sums is None:
            return []
        changes = unbundle(sums, self._owned_specs, self._device)
        return list(map(Change, self._owned, self._values, changes, self._replaced))

    def _compile(self) -> Any:
        def body(sums: Bundle, before: Bundle, new: Bundle, fraction: tf.Tensor, example_weight: tf.Tensor) -> Bundle:
            totals, olds = (unbundle(bundle, self._owned_specs, self._device) for bundle in (sums, before))
            values = unbundle(new, self._specs, self._device)
            after = []
            with tf.device(self._device):
                for number, index in enumerate(self._indices):
                    value = values[index]
                    if not self._replaced[number]:
                        weight = tf.cast(example_weight if self._counts[number] else fraction, value.dtype)
                        value = totals[number] + weight * (value - olds[number])
                    after.append(value)
            return bundled(after, self._device)

        owned, scalar = bundle_specs(self._owned_specs), tf.TensorSpec([], keras.config.floatx())
        new = bundle_specs(self._specs)
        return tf_function.noinline_function(body, owned, owned, new, tf.TensorSpec([], tf.float64), scalar)
