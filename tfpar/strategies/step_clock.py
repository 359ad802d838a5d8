"""The clock of a train step: when the phases of a step end on each replica.

    began │ forward │ backward │ all-reduce │ update │

The clock is that of the host. The phases of a timed step run one after another: an operation that reads the clock may
wait for a thread, while those after it run already. In a step without a clock gradients may be summed, and weights
updated, during the backward pass. Workers sum gradients during it in a timed step, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import tf_divided_memory, tf_function, tf_replica_memory
from tfpar.reduction.replicas import local_replica_id
from tfpar.strategies.batches_ahead import HOST

PHASES = ("forward", "backward", "all-reduce", "update")


class NoClock:
    """The clock of a step that is not timed: it notes nothing."""

    def began(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Note the begin of a step of the calling replica; return the context of what runs after it.

        Args:
            batch: What the step reads first.
        """
        return contextlib.nullcontext()

    def forward_ended(self, results: Any) -> contextlib.AbstractContextManager[Any]:
        """Note the end of the forward pass of the calling replica; return the context of the backward pass.

        Args:
            results: The results of the forward pass.
        """
        return contextlib.nullcontext()

    def backward_ended(self, gradients: Any) -> contextlib.AbstractContextManager[Any]:
        """Note the end of the backward pass of the calling replica; return the context of what follows.

        Args:
            gradients: The results of the backward pass, None for a weight without one.
        """
        return contextlib.nullcontext()

    def reduced(self, sums: list[Any]) -> list[Any]:
        """Note the end of the all-reduce for the calling replica; return the sums, which are ready after it.

        Args:
            sums: The reduced gradients, None for a weight without one.
        """
        return sums

    def updated(self, variables: Sequence[keras.Variable]) -> None:
        """Note the end of the update on each replica.

        Args:
            variables: The updated weights.
        """


NO_CLOCK = NoClock()


class StepClock(NoClock):
    """Note the ends of phases in the graph of a train step; the next step overwrites them.

    Args:
        num_replicas: Replicas of this process.
        sums_early: Whether the all-reduce begins during the backward pass, whose operations would wait for each other
            in a cycle if it began after; then its phase is what remains of it.

    Example:
        >>> clock = StepClock(num_replicas=1)
        >>> with clock.began(batch=tf.ones([2])):
        ...     output = 2 * tf.ones([2])
        >>> with clock.forward_ended(output):
        ...     gradient = tf.identity(output)
        >>> clock.read().shape, bool(clock.read()[0, 1] >= clock.read()[0, 0] > 0)
        ((1, 5), True)
    """

    def __init__(self, num_replicas: int, *, sums_early: bool = False) -> None:
        self._sums_early = sums_early
        with tf.init_scope(), tf.device(HOST):
            self._moments = [
                [tf.Variable(0.0, trainable=False, dtype=tf.float64) for _ in range(1 + len(PHASES))]
                for _ in range(num_replicas)
            ]

    def began(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Note the begin of a step of the calling replica; return the context of what runs after it."""
        return self._after(0, batch)

    def forward_ended(self, results: Any) -> contextlib.AbstractContextManager[Any]:
        """Note the end of the forward pass of the calling replica; return the context of the backward pass."""
        return self._after(1, results)

    def backward_ended(self, gradients: Any) -> contextlib.AbstractContextManager[Any]:
        """Note the end of the backward pass of the calling replica; return the context of what follows."""
        after = self._after(2, gradients)
        return contextlib.nullcontext() if self._sums_early else after

    def reduced(self, sums: list[Any]) -> list[Any]:
        """Note the end of the all-reduce for the calling replica; return the sums, which are ready after it."""
        with self._after(3, sums):
            present = [
                None if one is None else tf.nest.map_structure(tf.identity, one, expand_composites=True) for one in sums
            ]
        return present

    def updated(self, variables: Sequence[keras.Variable]) -> None:
        """Note the end of the update on each replica."""
        for replica in range(len(self._moments)):
            self._note(4, [one.read_value() for one in _memories(variables, replica)], replica)

    def _after(self, number: int, results: Any) -> contextlib.AbstractContextManager[Any]:
        after: contextlib.AbstractContextManager[Any] = tf.control_dependencies([self._note(number, results)])
        return after

    def _note(self, number: int, results: Any, replica: int | None = None) -> tf.Operation:
        moments = self._moments[local_replica_id() if replica is None else replica]
        ready = [one for one in tf.nest.flatten(results, expand_composites=True) if tf.is_tensor(one)]
        with tf.device(HOST):
            with tf.control_dependencies(ready):
                moment = tf_function.unordered_timestamp()
            return moments[number].assign(moment, read_value=False)

    def read(self) -> np.ndarray:
        """Return the begin of the last step and the ends of its phases in seconds, `[replicas, 5]`.

        A phase that the strategy does not have is 0.
        """
        return np.array([[one.numpy() for one in row] for row in self._moments])


def _memories(variables: Sequence[keras.Variable], replica: int) -> list[tf.Variable]:
    """Return the memory of weights that a replica of this process holds."""
    found: list[tf.Variable] = []
    for variable in variables:
        if tf_divided_memory.is_divided(variable):
            found += tf_divided_memory.memories_of(variable)
        else:
            of_replicas = tf_replica_memory.memories(variable)
            found.append(of_replicas[min(replica, len(of_replicas) - 1)])
    return found


class HasClock:
    """A strategy whose train step has phases that a clock notes."""

    clock: NoClock = NO_CLOCK
    num_timed_replicas: int = 1  # of this process
    sums_early: bool = False  # during the backward pass

    def start_clock(self) -> StepClock:
        """Return the clock of all steps that are traced from now on.

        Example:
            >>> strategy = tfpar.SingleDevice("CPU:0")
            >>> clock = strategy.start_clock()
            >>> history = tfpar.Trainer(build_model, strategy).fit(dataset, verbose=0)
            >>> moments = clock.read()[0]
            >>> bool((moments[[1, 2, 4]] > moments[0]).all()), float(moments[3])  # no all-reduce
            (True, 0.0)
        """
        self.clock = clock = StepClock(self.num_timed_replicas, sums_early=self.sums_early)
        return clock
