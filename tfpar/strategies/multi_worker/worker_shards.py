"""Sharded optimizer state over workers: each weight has one owner among the replicas of all workers.

    worker 0   sum of gradients ──► update of its weights ──┐            ┌─► all new weights
    worker 1   sum of gradients ──► update of its weights ──┴─ all-gather ┴─► all new weights

The sums are those of the all-reduce without shards, with the same bits. TensorFlow has no collective that sums each
gradient on its owner alone; its all-to-all, which could, took longer than the whole all-reduce.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat import keras_divided_state, keras_optimizer, tf_replica_memory
from tfpar.per_model import PerModel
from tfpar.pipeline.partition.placement import follow_data
from tfpar.reduction import objective
from tfpar.strategies.multi_worker.collectives import Group
from tfpar.strategies.multi_worker.slot_gathering import gathered
from tfpar.strategies.multi_worker.weight_exchange import exchange
from tfpar.strategies.multi_worker.worker import Worker
from tfpar.strategies.optimizer_shards import OptimizerShards, trained


class WorkerShards(OptimizerShards):
    """The owners of weights among the replicas of all workers.

    Args:
        worker: The strategy of this worker.
        strategy: The `tf.distribute` strategy of the weights.
        replicas: All replicas.
        hosts: One device of each worker.
        pack_bytes: The most bytes of a message with new weights.
    """

    def __init__(
        self, worker: Worker, strategy: tf.distribute.Strategy, replicas: Group, hosts: Group, pack_bytes: int
    ) -> None:
        super().__init__(strategy)
        keras_divided_state.refuse_changes_of_others()
        self._worker, self._replicas, self._hosts, self._pack_bytes = worker, replicas, hosts, pack_bytes
        self._first = worker.rank * len(self._devices)
        self._tables: PerModel[dict[int, int]] = PerModel()
        self._is_lent = False

    def owners(self, model: keras.Model) -> dict[int, int]:
        """Return the replica of all workers that owns each trained weight, by the weight's `id`.

        The owners stay the same while layers are frozen, because state cannot move to another worker.
        """
        known = self._tables.get(model)
        if known is None or not {id(weight) for weight in trained(model)} <= known.keys():
            known = self._tables[model] = super().owners(model)
        return known

    def table(self, model: keras.Model) -> str:
        """Return a line for each weight with its owner, equal on all workers."""
        owners = self.owners(model)
        return "".join(f"{weight.path} on replica {owners[id(weight)]}\n" for weight in trained(model))

    def _is_here(self, owner: int) -> bool:
        return self._first <= owner < self._first + len(self._devices)

    def holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is a slot on a device of a replica, of this worker or another."""
        return keras_divided_state.is_elsewhere(variable) or super().holds(variable)

    @contextlib.contextmanager
    def creating_slots(self, model: keras.Model) -> Iterator[None]:
        """Return the context in which each slot is created on the owner of its weight, on its worker alone."""
        owners = self.owners(model)
        devices = {id(weight.value): self._device(owners[id(weight)]) for weight in trained(model)}

        def is_here(weight: Any) -> bool:
            return self._is_here(owners.get(id(weight), self._first))

        on_devices = tf_replica_memory.slots_on(lambda memory: devices.get(id(memory), self._devices[0]))
        with on_devices, keras_divided_state.creating_slots(is_here):
            yield
        for optimizer, _ in objective.updates_of(model):
            if optimizer.built:
                self._divide(model, optimizer)

    def _device(self, owner: int) -> str:
        return str(self._devices[owner - self._first if self._is_here(owner) else 0])

    def _divide(self, model: keras.Model, optimizer: Any) -> None:
        """Note the holder of each slot, and release the memory of the slots of other workers."""
        keras_divided_state.check(optimizer)
        if self._worker.num_workers == 1:
            return
        owners = self.owners(model)
        for slot, weight in keras_divided_state.slots_of_weights(optimizer):
            owner = owners[id(weight)]
            keras_divided_state.divide(slot, owner // len(self._devices), self._is_here(owner))

    def place_slots(self, model: keras.Model) -> None:
        """Move the slots of optimizers that were built elsewhere to the owners of their weights.

        The chief's state counts. All workers must call this.
        """
        owners = self.owners(model)
        updates = objective.updates_of(model)
        with self._worker.raising_on_all_workers():
            for optimizer, _ in updates:
                keras_divided_state.check(optimizer)
        self._worker.require_equal({"built optimizers": str([optimizer.built for optimizer, _ in updates])})
        for optimizer, _ in updates:
            slots = keras_divided_state.slots_of_weights(optimizer) if optimizer.built else []
            for slot, weight in slots:
                if not keras_divided_state.is_divided(slot) and id(weight) in owners:
                    self._place(slot, owners[id(weight)])
            if slots:
                self._divide(model, optimizer)

    def _place(self, slot: keras.Variable, owner: int) -> None:
        value = tf_replica_memory.memories(slot)[0].numpy()
        message = self._worker.broadcast(value.tobytes() if self._worker.is_chief else None)
        if self._is_here(owner):
            tf_replica_memory.place_slot(slot, self._device(owner))
            slot.assign(np.frombuffer(message, value.dtype).reshape(value.shape))

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
        here = [number for number, weight in enumerate(weights) if self._is_here(owners[id(weight)])]
        own = [weights[number] for number in here]
        sums = [parts[number][owners[id(weights[number])] - self._first] if parts[number] else None for number in here]
        everywhere = [weight for weight, part in zip(weights, parts, strict=True) if part]
        if all(total is None for total in sums):
            own, sums = own[:0], []
        with (
            keras_optimizer.one_device_optimizer(),
            self._of_owners(model, optimizer),
            follow_data(),
            keras_divided_state.updating(optimizer, self._own(model, optimizer), everywhere, self._hosts.all_reduce),
        ):
            optimizer.apply(sums, own)
        self._exchange(model, optimizer, {id(weight): part for weight, part in zip(weights, parts, strict=True)})

    def finalize(self, model: keras.Model, optimizer: Any, weights: Sequence[keras.Variable]) -> None:
        """Overwrite weights with their moving averages where the optimizer has them."""
        if keras_divided_state.has_averages(optimizer):
            tf.function(lambda: self._finalize(model, optimizer), autograph=False)()

    def _finalize(self, model: keras.Model, optimizer: Any) -> None:
        own = self._own(model, optimizer)
        with (
            keras_optimizer.one_device_optimizer(),
            self._of_owners(model, optimizer),
            keras_divided_state.only_own(optimizer, own),
        ):
            optimizer.finalize_variable_values(own)
        self._exchange(model, optimizer, {})

    def send_weights(self, model: keras.Model) -> None:
        """Send all trained weights from their owners to the other replicas; outside of a step."""
        for optimizer, _ in objective.updates_of(model):
            tf.function(lambda of=optimizer: self._exchange(model, of, {}), autograph=False)()

    def _own(self, model: keras.Model, optimizer: Any) -> list[keras.Variable]:
        """Return the weights of an optimizer whose owner is a replica of this worker."""
        owners = self.owners(model)
        known = keras_divided_state.weights_of(optimizer)
        return [weight for weight in known if self._is_here(owners[id(weight)])]

    def _of_owners(self, model: keras.Model, optimizer: Any) -> contextlib.AbstractContextManager[None]:
        local = {weight: owner - self._first for weight, owner in self.owners(model).items()}
        return tf_replica_memory.of_owners(local, self._own(model, optimizer))

    def _exchange(self, model: keras.Model, optimizer: Any, before: Mapping[int, Sequence[tf.Tensor]]) -> None:
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

    @contextlib.contextmanager
    def whole_state(self, model: keras.Model, folder: Path | None) -> Iterator[None]:
        """Return a context in which the chief reads the slots of all workers, which must all enter it.

        Args:
            model: The model.
            folder: An existing folder of the chief for a temporary file of their size; None for that of the system.
        """
        variables = [] if self._is_lent else [one for optimizer, _ in objective.updates_of(model)
                                              for one in getattr(optimizer, "variables", ())]  # fmt: skip
        divided = list(filter(keras_divided_state.is_divided, variables))
        if not divided:
            yield
            return
        with gathered(divided, self._worker, self._hosts, folder) as arrays, keras_divided_state.lent(arrays):
            self._is_lent = True
            try:
                yield
            finally:
                self._is_lent = False
