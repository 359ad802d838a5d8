"""Optimizer state that is divided over the workers of a job: owners, creation, updates, and all of it at the chief."""

from __future__ import annotations

import abc
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfpar._compat import keras_divided_state, keras_optimizer, tf_divided_memory, tf_replica_memory
from tfpar.per_model import PerModel
from tfpar.reduction import objective
from tfpar.strategies.multi_worker.collectives import Group
from tfpar.strategies.multi_worker.slot_gathering import gathered
from tfpar.strategies.multi_worker.worker import Worker
from tfpar.strategies.optimizer_shards import trained


class DividedState(abc.ABC):
    """The owners of weights, each on one worker.

    Args:
        worker: The strategy of this worker.
        hosts: One device of each worker.
    """

    def __init__(self, worker: Worker, hosts: Group) -> None:
        keras_divided_state.refuse_changes_of_others()
        self._worker, self._hosts = worker, hosts
        self._tables: PerModel[dict[int, int]] = PerModel()
        self._begins_with_weights: PerModel[bool] = PerModel()
        self._is_lent = False

    @abc.abstractmethod
    def _choose(self, weights: Iterable[keras.Variable], known: Mapping[int, int]) -> dict[int, int]:
        """Return the owner of each weight by the weight's `id`, equal on all workers; the known ones stay."""

    @abc.abstractmethod
    def _rank_of(self, owner: int) -> int:
        """Return the worker of an owner."""

    def owners(self, model: keras.Model) -> dict[int, int]:
        """Return the owner of each trained weight, by the weight's `id`.

        The owners stay the same while layers are frozen or thawed, because state cannot move to another worker.
        """
        built = [optimizer for optimizer, _ in objective.updates_of(model) if optimizer is not None and optimizer.built]
        weights = [*trained(model), *(weight for one in built for weight in keras_divided_state.weights_of(one))]
        # In an update an optimizer has pieces of divided weights.
        found = {id(whole): whole for whole, _ in map(tf_divided_memory.whole_of, weights)}
        known = self._tables.get(model)
        if known is None or not found.keys() <= known.keys():
            kept = known if known is not None and built else {}
            known = self._tables[model] = kept | self._choose(found.values(), kept)
        return known

    @abc.abstractmethod
    def send_weights(self, model: keras.Model) -> None:
        """Send all trained weights from their owners to the other workers; outside of a step."""

    def prepare(self, model: keras.Model) -> None:
        """Refuse workers that differ in the owners, or in weights with which state begins; all must call this.

        Without shards the chief's initial state is broadcast, which it does not have here. From now on, weights that
        Keras' `SwapEMAWeights` swaps at their owners are sent to the other workers.

        Raises:
            ValueError: If a worker differs from the chief.
        """
        owners, weights = self.owners(model), trained(model)
        # By number: automatic names count the models of a process.
        rows = (f"weight {number} {tuple(one.shape)} of owner {owners[id(one)]}" for number, one in enumerate(weights))
        table = "\n".join(rows)
        self._worker.job.require_equal({"owners of the optimizer's state": table})
        if self._begins_with_weights.get(model):
            arrays = (np.ascontiguousarray(weight.numpy()).data for weight in weights)
            digests = (hashlib.sha256(array).hexdigest()[:12] for array in arrays)
            found = "\n".join(f"weight {number}: {digest}" for number, digest in enumerate(digests))
            self._worker.job.require_equal({"the initial weights, with which the optimizer's state begins": found})
            self._begins_with_weights[model] = False
        tf_replica_memory.send_swapped_weights(model, self.send_weights)

    def _is_here(self, owner: int) -> bool:
        return self._rank_of(owner) == self._worker.rank

    @contextlib.contextmanager
    def creating_slots(self, model: keras.Model) -> Iterator[None]:
        """Return the context in which each slot is created on the worker of its owner alone, within the scope."""
        owners = self.owners(model)
        with keras_divided_state.creating_slots(lambda weight: self._is_here(owners[id(weight)])) as assigned:
            yield
        self._begins_with_weights[model] = bool(assigned)
        for optimizer, _ in objective.updates_of(model):
            if optimizer.built:
                self._divide(model, optimizer)

    def _divide(self, model: keras.Model, optimizer: Any) -> None:
        """Note the holder of each slot, and release the memory of the slots of other workers."""
        keras_divided_state.check(optimizer)
        if self._worker.num_workers == 1:
            return
        owners = self.owners(model)
        for slot, weight in keras_divided_state.slots_of_weights(optimizer):
            owner = owners[id(weight)]
            keras_divided_state.divide(slot, self._rank_of(owner), self._is_here(owner))

    def place_slots(self, model: keras.Model) -> None:
        """Divide the slots of optimizers that were built elsewhere; the chief's state counts.

        All workers must call this.
        """
        owners, updates = self.owners(model), objective.updates_of(model)
        with self._worker.job.vote():
            for optimizer, _ in updates:
                keras_divided_state.check(optimizer)
        self._worker.job.require_equal({"built optimizers": str([optimizer.built for optimizer, _ in updates])})
        for optimizer, _ in updates:
            slots = keras_divided_state.slots_of_weights(optimizer) if optimizer.built else []
            for slot, weight in slots:
                if not keras_divided_state.is_divided(slot):
                    self._place(slot, owners[id(weight)])
            if slots:
                self._divide(model, optimizer)

    def _place(self, slot: keras.Variable, owner: int) -> None:
        value = tf_replica_memory.memories(slot)[0].numpy()
        message = self._worker.job.broadcast(value.tobytes() if self._worker.is_chief else None)
        if self._is_here(owner):
            self._move(slot, owner)
            slot.assign(np.frombuffer(message, value.dtype).reshape(value.shape))

    def _move(self, slot: keras.Variable, owner: int) -> None:
        """Move a slot to the device of its owner on this worker."""
        return  # it is there

    def _own(self, model: keras.Model, optimizer: Any) -> list[keras.Variable]:
        """Return the weights of an optimizer whose owner is on this worker."""
        owners, known = self.owners(model), keras_divided_state.weights_of(optimizer)
        return [weight for weight in known if self._is_here(owners[id(tf_divided_memory.whole_of(weight)[0])])]

    def _update(
        self, model: keras.Model, optimizer: Any, sums: Sequence[tuple[keras.Variable, Any]], present: Sequence[Any]
    ) -> None:
        """Run an optimizer on the weights of this worker.

        Args:
            model: The model.
            optimizer: The optimizer.
            sums: The weights of this worker, or their pieces, each with its gradient, None for none.
            present: The weights, or pieces, with a gradient, those of all workers.
        """
        if all(total is None for _, total in sums):
            sums = []
        own = self._own(model, optimizer)
        with (
            keras_optimizer.one_device_optimizer(),
            keras_divided_state.updating(optimizer, own, present, self._hosts.all_reduce),
        ):
            optimizer.apply([total for _, total in sums], [weight for weight, _ in sums])

    def _finalize_own(self, model: keras.Model, optimizer: Any) -> None:
        """Overwrite the weights of this worker with their moving averages."""
        own = self._own(model, optimizer)
        with keras_optimizer.one_device_optimizer(), keras_divided_state.only_own(optimizer, own):
            optimizer.finalize_variable_values(own)

    @contextlib.contextmanager
    def whole_state(self, model: keras.Model, folder: Path | None) -> Iterator[None]:
        """Return a context in which the chief reads the slots of all workers, which must all enter it.

        Args:
            model: The model.
            folder: An existing folder of the chief for a temporary file of their size; None for that of the system.
        """
        optimizers = [] if self._is_lent else [one for one, _ in objective.updates_of(model) if one is not None]
        variables = [variable for optimizer in optimizers for variable in optimizer.variables]
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
