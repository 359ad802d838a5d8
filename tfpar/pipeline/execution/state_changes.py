"""The changes of states by the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfpar._compat.graphs import tf_function
from tfpar.pipeline.execution.live_tensors import Key, LiveTensors
from tfpar.pipeline.execution.microbatches import Microbatch
from tfpar.pipeline.stages.bundles import Bundle, bundled, specs_of, unbundle
from tfpar.reduction.gradients.gradient_addition import sum_of


class Change(NamedTuple):
    """The change of a state in a step.

    Args:
        state: The state.
        before: Its value before the step.
        change: The sum of its changes, or its new value.
        is_replaced: Whether `change` is its new value.
    """

    state: keras.Variable
    before: tf.Tensor
    change: tf.Tensor
    is_replaced: bool


def added_changes(replicas: Sequence[Sequence[Change]]) -> list[Change]:
    """Return the changes of states over all replicas of a pipeline, on the device of each state.

    Args:
        replicas: The changes on each replica, of the same states.
    """
    found = []
    for first, *others in zip(*replicas, strict=True):
        with tf.device(first.state.value.device):
            change = first.change if first.is_replaced else sum_of([first.change, *(one.change for one in others)])
            found.append(first._replace(change=tf.identity(change)))
    return found


def values_after(changes: Sequence[Change]) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return each state with its value after the step."""
    found = []
    for state, before, change, is_replaced in changes:
        with tf.device(state.value.device):
            found.append((state, tf.identity(change) if is_replaced else before + change))
    return found


def sums_of_pairs(
    many: Sequence[Sequence[tuple[keras.Variable, tf.Tensor]]],
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return each variable with the sum of its values in several lists."""
    variables = {id(variable): variable for pairs in many for variable, _ in pairs}
    values: dict[int, list[tf.Tensor]] = {key: [] for key in variables}
    for variable, value in [pair for pairs in many for pair in pairs]:
        values[id(variable)].append(value)
    found = []
    for key, variable in variables.items():
        with tf.device(variable.value.device):
            found.append((variable, sum_of(values[key])))
    return found


class StateChanges:
    """The changes of the states that one stage, or the loss, is the last to change in a micro-batch.

    A state changes by the mean of its changes over micro-batches, weighted by their sizes, so that an unchanged state
    is equal to the last bit. The states of metrics that layers hold are summed. Other integer states change as in one
    micro-batch: a seed advances once a step.

    Args:
        owner: The stage, or the loss.
        states: All states that it changes, in the order of its results.
        owned: Those that it is the last to change.
        before: Their values before the step.
        counting: The `id` of each state of a metric that a layer holds.
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
        self._places = [next(i for i, state in enumerate(states) if state is one) for one in owned]
        self._owned_specs = [self._specs[place] for place in self._places]
        self._counts = [id(state) in counting for state in owned]
        pairs = zip(self._owned_specs, self._counts, strict=True)
        self._replaced = [not (spec.dtype.is_floating or counts) for spec, counts in pairs]
        self._before = bundled(before, device)
        with tf_function.outside_of_functions():
            self._adder = self._compile()

    def add(self, live: LiveTensors, new: Bundle, microbatch: Microbatch) -> None:
        """Add the changes by a micro-batch to the held sums.

        Args:
            live: The tensors that the step holds.
            new: The new values of `states`.
            microbatch: The micro-batch.
        """
        sums = live.get(self._key)
        with tf.device(self._device):
            if sums is None:
                sums = bundled([tf.zeros(spec.shape, spec.dtype) for spec in self._owned_specs], self._device)
            weights = microbatch.part, microbatch.example_weight
            live[self._key] = list(tf_function.unordered_call(self._adder, sums, self._before, new, *weights))

    def results(self, live: LiveTensors) -> list[Change]:
        """Return the change of each state; nothing if no micro-batch ran.

        Args:
            live: The tensors that the step holds. The sums are held no longer.
        """
        sums = live.take(self._key)
        if sums is None:
            return []
        changes = unbundle(sums, self._owned_specs, self._device)
        return list(map(Change, self._owned, self._values, changes, self._replaced))

    def _compile(self) -> Any:
        def body(sums: Bundle, before: Bundle, new: Bundle, part: tf.Tensor, example_weight: tf.Tensor) -> Bundle:
            totals, olds = (unbundle(one, self._owned_specs, self._device) for one in (sums, before))
            values = unbundle(new, self._specs, self._device)
            after = []
            with tf.device(self._device):
                for index, place in enumerate(self._places):
                    value = values[place]
                    if not self._replaced[index]:
                        weight = tf.cast(example_weight if self._counts[index] else part, value.dtype)
                        value = totals[index] + weight * (value - olds[index])
                    after.append(value)
            return bundled(after, self._device)

        owned, scalar = specs_of(self._owned_specs), tf.TensorSpec([], keras.config.floatx())
        new = specs_of(self._specs)
        return tf_function.noinline_function(body, owned, owned, new, tf.TensorSpec([], tf.float64), scalar)
