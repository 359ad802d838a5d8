"""Sharded optimizer state over workers: each weight has one owner among the replicas of all workers.

    worker 0   all-reduced gradients ──► update of its weights ──┐            ┌─► all new weights
    worker 1   all-reduced gradients ──► update of its weights ──┴─ all-gather ┴─► all new weights

Gradients are all-reduced as without shards, during the backward pass; the new weights are half as many bytes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_divided_state, tf_replica_memory
from tfpar.placement.devices import follow_data
from tfpar.placement.owners import choose_owners
from tfpar.reduction import objective
from tfpar.strategies.multi_worker.collectives import Group
from tfpar.strategies.multi_worker.divided_state import DividedState
from tfpar.strategies.multi_worker.weight_exchange import exchange
from tfpar.strategies.multi_worker.worker import Worker
from tfpar.strategies.optimizer_shards import OptimizerShards, trained


class WorkerShards(DividedState, OptimizerShards):
    """The owners of weights among the replicas of all workers.

    Args:
        worker: The strategy of this worker.
        strategy: The `tf.distribute` strategy of the weights.
        replicas: All replicas.
        hosts: One device of each worker.
        pack_bytes: The most bytes of a message with new weights.
    """

    sums_on_owners = False

    def __init__(
        self, worker: Worker, strategy: tf.distribute.Strategy, replicas: Group, hosts: Group, pack_bytes: int
    ) -> None:
        DividedState.__init__(self, worker, hosts)
        OptimizerShards.__init__(self, strategy)
        self._replicas, self._pack_bytes = replicas, pack_bytes
        self._first = worker.rank * len(self._devices)

    def _choose(self, weights: Iterable[keras.Variable], known: Mapping[int, int]) -> dict[int, int]:
        return choose_owners(weights, self._replicas.num_members, known)

    def _rank_of(self, owner: int) -> int:
        return owner // len(self._devices)

    def holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is a slot on a device of a replica, of this worker or another."""
        return keras_divided_state.is_elsewhere(variable) or super().holds(variable)

    @contextlib.contextmanager
    def creating_slots(self, model: keras.Model) -> Iterator[None]:
        """Return the context in which each slot is created on the owner of its weight, within the scope."""
        owners = self.owners(model)
        devices = {id(weight.value): self._device(owners[id(weight)]) for weight in trained(model)}
        on_devices = tf_replica_memory.slots_on(lambda memory: devices.get(id(memory), self._devices[0]))
        with super().creating_slots(model), on_devices:
            yield

    def _device(self, owner: int) -> str:
        return str(self._devices[owner - self._first if self._is_here(owner) else 0])

    def _move(self, slot: keras.Variable, owner: int) -> None:
        tf_replica_memory.place_slot(slot, self._device(owner))

    def apply(self, model: keras.Model, optimizer: Any, weights: Sequence[keras.Variable], gradients: Any) -> None:
        """Update each weight on its owner, and send it to all other replicas.

        Args:
            model: The model.
            optimizer: The optimizer of the weights.
            weights: Weights of the model.
            gradients: The results of `only_owned` on the local replicas for the gradients of the weights.
        """
        if all(gradient is None for gradient in gradients):
            optimizer.apply(list(gradients), list(weights))  # raises
        owners = self.owners(model)
        parts = [() if one is None else self._strategy.experimental_local_results(one) for one in gradients]
        pairs = list(zip(weights, parts, strict=True))
        sums = [
            (weight, part[owners[id(weight)] - self._first] if part else None)
            for weight, part in pairs
            if self._is_here(owners[id(weight)])
        ]
        with self._of_owners(model, optimizer), follow_data():
            self._update(model, optimizer, sums, [weight for weight, part in pairs if part])
        self._exchange(model, optimizer, {id(weight): part for weight, part in pairs})

    def finalize(self, model: keras.Model, optimizer: Any, weights: Sequence[keras.Variable]) -> None:
        """Overwrite weights with their moving averages where the optimizer has them."""

        def finalize() -> None:
            with self._of_owners(model, optimizer):
                self._finalize_own(model, optimizer)
            self._exchange(model, optimizer, {})

        if keras_divided_state.has_averages(optimizer):
            tf.function(finalize, autograph=False)()

    def send_weights(self, model: keras.Model) -> None:
        """Send all trained weights from their owners to the other replicas; outside of a step."""
        for optimizer, _ in objective.updates_of(model):
            self._exchange(model, optimizer, {})

    def _of_owners(self, model: keras.Model, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        local = {weight: owner - self._first for weight, owner in self.owners(model).items()}
        return tf_replica_memory.of_owners(local, self._own(model, optimizer))

    def _exchange(self, model: keras.Model, optimizer: Any, before: Mapping[int, Sequence[tf.Tensor]]) -> None:
        if tf.executing_eagerly():  # the messages of the first local replica would wait for those of the second
            tf.function(lambda: self._exchange(model, optimizer, {}), autograph=False)()
            return
        owners, weights = self.owners(model), keras_divided_state.weights_of(optimizer)
        exchange(
            list(map(tf_replica_memory.memories, weights)),
            [owners[id(weight)] for weight in weights],
            self._replicas,
            self._first,
            [before.get(id(weight), ()) for weight in weights],
            self._pack_bytes,
        )

    def slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the variables of the optimizer in the memory of a local device, by its number."""
        return [one for one in super().slots_on(model, device) if not keras_divided_state.is_elsewhere(one)]
