"""Sharded optimizer state of pipelines in several workers: the state of each stage is divided over the workers.

worker 0   stage 0: weights a b, slots of a    stage 1: weights c d, slots of d
worker 1   stage 0: weights a b, slots of b    stage 1: weights c d, slots of c
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_divided_state, tf_distribute, tf_replica_memory
from tfpar.reduction.weight_owners import largest_first, num_bytes
from tfpar.strategies.multi_worker.collectives import PACK_BYTES, Group
from tfpar.strategies.multi_worker.divided_state import DividedState
from tfpar.strategies.multi_worker.stage_sums import StageSums, place_of
from tfpar.strategies.multi_worker.weight_exchange import exchange
from tfpar.strategies.multi_worker.worker import Worker


class StageShards(DividedState):
    """The worker that owns each weight.

    Args:
        worker: The strategy of this worker.
        sums: The communication of the stages.
        hosts: One device of each worker.
    """

    def __init__(self, worker: Worker, sums: StageSums, hosts: Group) -> None:
        super().__init__(worker, hosts)
        self._sums = sums

    def _choose(self, weights: Sequence[keras.Variable]) -> list[int]:
        owners = [0] * len(weights)
        for numbers in _by_home(weights).values():
            sizes = [num_bytes(weights[number]) for number in numbers]
            for number, owner in zip(numbers, largest_first(sizes, self._worker.num_workers), strict=True):
                owners[number] = owner
        return owners

    def _rank_of(self, owner: int) -> int:
        return owner

    def apply(
        self, model: keras.Model, optimizer: Any, gradients: Sequence[Any], weights: Sequence[keras.Variable]
    ) -> None:
        """Update each weight on its owner, and send it to the other workers; in a step, after all reads of weights.

        Args:
            model: The model.
            optimizer: Its optimizer.
            gradients: The gradients over all workers, None for a weight without one.
            weights: The weights.
        """
        if all(gradient is None for gradient in gradients):
            optimizer.apply(list(gradients), list(weights))  # raises
        owners, pairs = self.owners(model), list(zip(weights, gradients, strict=True))
        own = [pair for pair in pairs if self._is_here(owners[id(pair[0])])]
        self._update(model, optimizer, own, [weight for weight, gradient in pairs if gradient is not None])
        self._exchange(model, optimizer)

    def finalize(self, model: keras.Model, optimizer: Any) -> None:
        """Overwrite weights with their moving averages where the optimizer has them."""

        def finalize() -> None:
            self._finalize_own(model, optimizer)
            self._exchange(model, optimizer)

        if keras_divided_state.has_averages(optimizer):
            tf.function(finalize, autograph=False)()

    def _exchange(self, model: keras.Model, optimizer: Any) -> None:
        owners, weights = self.owners(model), keras_divided_state.weights_of(optimizer)
        for home, numbers in _by_home(weights).items():
            of_home = [weights[number] for number in numbers]
            exchange(
                list(map(tf_replica_memory.memories, of_home)),
                [owners[id(weight)] for weight in of_home],
                self._sums.group(home),
                self._worker.rank,
                [()] * len(of_home),
                PACK_BYTES,
            )


def _by_home(weights: Sequence[keras.Variable]) -> Mapping[tuple[str, int], list[int]]:
    """Return the numbers of the weights of each device; the devices are the same on all workers."""
    found: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
    for number, weight in enumerate(weights):
        memory = tf_distribute.local_memory(weight)
        assert memory is not None, weight.path
        found[place_of(memory.device)].append(number)
    return found
