"""Sharded optimizer state of pipelines in several workers: the state of each stage is divided over the workers.

worker 0   stage 0: weights a b, slots of a    stage 1: weights c d, slots of d
worker 1   stage 0: weights a b, slots of b    stage 1: weights c d, slots of c

A weight that is divided over the shards of its stage has one owner too, with the slots of all its pieces.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_divided_optimizer, keras_divided_state, tf_divided_memory, tf_replica_memory
from tfpar.placement.owners import choose_owners
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
        tf_replica_memory.swap_owned_averages()

    def _choose(self, weights: Iterable[keras.Variable], known: Mapping[int, int]) -> dict[int, int]:
        # Those of each device separately, divided weights with their first piece.
        return choose_owners(
            weights,
            self._worker.num_workers,
            known,
            lambda weight: place_of(tf_divided_memory.memories_of(weight)[0].device),
        )

    def _rank_of(self, owner: int) -> int:
        return owner

    @contextlib.contextmanager
    def creating_slots(self, model: keras.Model) -> Iterator[None]:
        """Return the context in which each slot is created on the worker of its owner alone, in pieces if divided."""
        owners = self.owners(model)
        of_pieces = keras_divided_optimizer.creating_divided_slots(lambda weight: self._is_here(owners[id(weight)]))
        with of_pieces, super().creating_slots(model):
            yield

    def apply(
        self, model: keras.Model, optimizer: Any, gradients: Sequence[Any], weights: Sequence[keras.Variable]
    ) -> None:
        """Update each weight on its owner, and send it to the other workers; in a step, after all reads of weights.

        Args:
            model: The model.
            optimizer: Its optimizer.
            gradients: The gradients over all workers, right where this worker owns the weight; None for a weight or
                piece without one.
            weights: The weights, divided ones in pieces.
        """
        if all(gradient is None for gradient in gradients):
            optimizer.apply(list(gradients), list(weights))  # raises
        owners, pairs = self.owners(model), list(zip(weights, gradients, strict=True))
        wholes = [tf_divided_memory.whole_of(weight)[0] for weight in weights]
        own = [place for place, whole in enumerate(wholes) if self._is_here(owners[id(whole)])]
        with_gradient = [id(wholes[place]) for place in own if gradients[place] is not None]
        with _in_pieces(optimizer, with_gradient):
            present = [weight for weight, gradient in pairs if gradient is not None]
            self._update(model, optimizer, [pairs[place] for place in own], present)
        self._exchange(model, optimizer)

    def finalize(self, model: keras.Model, optimizer: Any) -> None:
        """Overwrite weights with their moving averages where the optimizer has them."""

        def finalize() -> None:
            with _in_pieces(optimizer, []):
                self._finalize_own(model, optimizer)
            self._exchange(model, optimizer)

        if keras_divided_state.has_averages(optimizer):
            tf.function(finalize, autograph=False)()

    def send_weights(self, model: keras.Model) -> None:
        """Send all trained weights from their owners to the other workers; outside of a step."""
        tf.function(lambda: self._exchange(model, model.optimizer), autograph=False)()

    def _exchange(self, model: keras.Model, optimizer: Any) -> None:
        owners = self.owners(model)
        pieces: dict[tuple[str, int], list[tuple[tf.Variable, int]]] = collections.defaultdict(list)
        for weight in keras_divided_state.weights_of(optimizer):
            for memory in tf_divided_memory.memories_of(weight):
                pieces[place_of(memory.device)].append((memory, owners[id(weight)]))
        for place, of_place in pieces.items():
            exchange(
                [(memory,) for memory, _ in of_place],
                [owner for _, owner in of_place],
                self._sums.group(place),
                self._worker.rank,
                [()] * len(of_place),
                PACK_BYTES,
            )


def _in_pieces(optimizer: Any, owners: Sequence[int]) -> contextlib.AbstractContextManager[None]:
    """Return the context in which an optimizer knows the pieces of divided weights, if there are any."""
    if any(map(tf_divided_memory.is_divided, keras_divided_state.weights_of(optimizer))):
        return keras_divided_optimizer.of_pieces(optimizer, owners)
    return contextlib.nullcontext()
