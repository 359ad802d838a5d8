"""Sharded optimizer state: each weight has one owner, which holds its slots and updates it.

               weight 0 (owner 0)    weight 1 (owner 1)
    replica 0  gradient ──┐          gradient ──┐
    replica 1  gradient ──┤          gradient ──┤
                          ▼                     ▼
               sum and update        sum and update
               on replica 0          on replica 1
                          │                     │
               new weight to all     new weight to all

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stages 1 and 2.

- Data parallelism: the owners are the replicas of all workers.
- Pipelines: the owners are the workers, which share the weights of each stage among them. A single worker owns all.
- Tensor parallelism: each shard of a weight is updated on its own device.

In each process a single call of the optimizer updates all weights that the process owns, each on the device of its
owner, so that global clipping and custom optimizers see all gradients. Workers add up their norms. They all-reduce
gradients during the backward pass as without shards, and then send the new weights: 50 % more bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfpar._compat.optimizers import (
    keras_optimizer,
    keras_sharded_slots,
    keras_sharded_updates,
)
from tfpar._compat.variables import keras_variables, sharded_memory
from tfpar.engines.slot_gathering import gathered
from tfpar.job import Job
from tfpar.per_model import PerModel
from tfpar.placement.owners import choose_owners
from tfpar.placement.weight_devices import follow_data
from tfpar.reduction import objective


class Copies(NamedTuple):
    """The copies of a weight, or of a shard of one.

    Args:
        memories: The copy on each replica of this process.
        owner: The index of the owner among all replicas.
        after: For each replica of this process, a tensor that must be computed before its copy is overwritten. Empty if
            the copies can be overwritten at once.
    """

    memories: Sequence[tf.Variable]
    owner: int
    after: Sequence[tf.Tensor] = ()


class Communicator(Protocol):
    """Communication between the owners of weights, in a traced function."""

    def send(self, weights: Sequence[Copies]) -> None:
        """Overwrite all copies of the weights by those of their owners."""

    def add(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum a small tensor over all processes."""


class LocalCommunicator:
    """Communication between the devices of a single process."""

    def send(self, weights: Sequence[Copies]) -> None:
        """Copy each weight from its owner to the other replicas."""
        for memories, owner, after in weights:
            if len(memories) == 1:
                continue
            with tf.device(memories[owner].device):
                value = memories[owner].read_value()
            for replica, memory in enumerate(memories):
                if replica != owner:
                    with tf.device(memory.device), tf.control_dependencies(after[replica : replica + 1]):
                        memory.assign(tf.identity(value))

    def add(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor itself."""
        return tensor


class OptimizerShards:
    """Assigns the weights of models to owners, and updates them there.

    Args:
        job: The workers that share the weights.
        communicator: Communicates between the copies of a weight.
        devices: The devices of the replicas of this process. Empty for pipelines and tensor parallelism, which have one
            copy of each weight per process.
        num_copies: The number of copies of each weight on each worker; None for as many as here.
    """

    def __init__(
        self,
        job: Job,
        communicator: Communicator,
        devices: Sequence[str] = (),
        num_copies: Sequence[int] | None = None,
    ) -> None:
        self._job, self._communicator, self._devices = job, communicator, devices
        self._workers = [  # by the owner
            rank
            for rank, copies in enumerate(num_copies or [max(1, len(devices))] * job.num_workers)
            for _ in range(copies)
        ]
        self._tables: PerModel[dict[int, int]] = PerModel()
        self._new: PerModel[bool] = PerModel()
        self._is_lent = False
        if devices:
            keras_sharded_updates.refuse_updates_by_replicas()

    def owners(self, model: keras.Model) -> dict[int, int]:
        """Return the owner of each weight that is trained or that an optimizer was built for, by the weight's `id`.

        Owners do not change when layers are frozen or unfrozen, since slots cannot move to another worker.

        Args:
            model: A compiled model with built layers.
        """
        built = [optimizer for optimizer, _ in objective.updates_of(model) if optimizer is not None and optimizer.built]
        known_weights = [weight for optimizer in built for weight in keras_optimizer.weights_of(optimizer)]
        # During an update, the weights of an optimizer are shards.
        wholes = [sharded_memory.whole_of(weight)[0] for weight in (*_trained(model), *known_weights)]
        weights, known = {id(weight): weight for weight in wholes}, self._tables.get(model) or {}
        if weights.keys() != known.keys():
            known = choose_owners(weights.values(), len(self._workers), known, _first_device)
            self._tables[model] = known
        return known

    def _here(self, model: keras.Model) -> dict[int, int]:
        """Return the local replica that owns each weight of this process, by the weight's `id`."""
        rank, first = self._job.rank, self._workers.index(self._job.rank)
        return {key: owner - first for key, owner in self.owners(model).items() if self._workers[owner] == rank}

    def prepare(self, model: keras.Model) -> None:
        """Refuse workers that differ in the owners, or in the initial weights if slots start as copies of them.

        All workers must call this. Without shards, the chief broadcasts its initial state; here it has only its part.

        Raises:
            ValueError: If a worker differs from the chief.
        """
        keras_sharded_updates.swap_on_owners(model, self._change)
        if self._job.num_workers == 1:
            return
        owners, weights = self.owners(model), _trained(model)
        # By index, since automatic names count the models of a process.
        rows = [f"weight {number} {tuple(w.shape)} of owner {owners[id(w)]}" for number, w in enumerate(weights)]
        self._job.require_equal({"owners of the optimizer's state": "\n".join(rows)})
        optimizers = [optimizer for optimizer, _ in objective.updates_of(model)]
        if self._new.get(model) and any(map(keras_optimizer.begins_with_weights, optimizers)):
            digest = hashlib.sha256()
            for weight in weights:
                digest.update(weight.numpy().tobytes())
            initial = "the initial weights, with which the optimizer's state begins"
            self._job.require_equal({initial: digest.hexdigest()[:12]})
        self._new[model] = False

    def holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is a slot on its owner, in this process or another."""
        on = (keras_variables.is_on(variable, device) for device in self._devices)
        return sharded_memory.is_remote(variable) or (keras_sharded_slots.is_owned(variable) and any(on))

    def slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the optimizer variables on a device of this process, by the index of the device."""

        def is_there(variable: keras.Variable) -> bool:
            is_mirrored = keras_variables.home_of(variable) is not None
            return is_mirrored or keras_variables.is_on(variable, self._devices[device])

        return list(filter(is_there, model.optimizer.variables))

    @contextlib.contextmanager
    def creating_slots(self, model: keras.Model) -> Iterator[None]:
        """Return the context in which optimizers create each slot on the owner of its weight, within the scope."""
        here, contexts = self._here(model), contextlib.ExitStack()
        if self._devices:
            first, *_ = self._devices
            devices = {id(weight.value): self._devices[here.get(id(weight), 0)] for weight in _trained(model)}
            contexts.enter_context(keras_sharded_slots.slots_on(lambda memory: devices.get(id(memory), first)))
        with contexts, keras_sharded_slots.creating_slots(lambda weight: id(weight) in here):
            yield
        self._new[model] = True
        for optimizer, _ in objective.updates_of(model):
            if optimizer.built:
                self._hold(model, optimizer)

    def _hold(self, model: keras.Model, optimizer: Any) -> None:
        """Place the slots with their weights, record which worker holds them, and release those of other workers."""
        if not self._devices:
            keras_optimizer.move_slots(optimizer)
        if self._job.num_workers == 1:
            return
        keras_sharded_updates.check(optimizer)
        owners, here = self.owners(model), self._here(model)
        for slot, weight in keras_optimizer.slots_of_weights(optimizer):
            rank = self._workers[owners[id(weight)]]
            keras_sharded_slots.hold(slot, rank, is_held_here=id(weight) in here)

    def place_slots(self, model: keras.Model) -> None:
        """Move the slots of optimizers that were built outside to the owners of their weights.

        The values of the chief are used. All workers must call this.
        """
        here, optimizers = self._here(model), [optimizer for optimizer, _ in objective.updates_of(model)]
        if self._job.num_workers > 1:
            with self._job.vote():
                for optimizer in optimizers:
                    keras_sharded_updates.check(optimizer)
            self._job.require_equal({"built optimizers": str([optimizer.built for optimizer in optimizers])})
        for optimizer in (optimizer for optimizer in optimizers if optimizer.built):
            if self._devices or self._job.num_workers > 1:
                for slot, weight in keras_optimizer.slots_of_weights(optimizer):
                    if not keras_sharded_slots.is_owned(slot):
                        self._move(slot, here.get(id(weight)))
            self._hold(model, optimizer)

    def _move(self, slot: keras.Variable, replica: int | None) -> None:
        """Move a slot to a local replica, with the value of the chief; None for a slot of another process."""
        value = keras_sharded_slots.memories(slot)[0].read_value()
        if self._job.num_workers > 1:
            message = self._job.broadcast(value.numpy().tobytes())
            value = np.frombuffer(message, value.dtype.as_numpy_dtype).reshape(value.shape)
        if replica is not None and self._devices:
            keras_sharded_slots.place_slot(slot, value, self._devices[replica])
        elif replica is not None:
            slot.assign(value)

    def apply(self, model: keras.Model, optimizer: Any, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Update each weight on its owner and send it to all copies. A step calls this after all reads of weights.

        Args:
            model: The model.
            optimizer: The optimizer of the weights.
            weights: Weights of the model; shards in place of sharded weights.
            gradients: For each weight its summed gradient on each replica of this process, of which only that of the
                owner is used. None for a weight without a gradient.
        """
        here = self._here(model)
        wholes = [id(sharded_memory.whole_of(weight)[0]) for weight in weights]
        own = [number for number, whole in enumerate(wholes) if whole in here]
        totals = {number: gradients[number][here[wholes[number]]] for number in own if gradients[number] is not None}
        if all(sums is None for sums in gradients):
            own = list(range(len(weights)))  # the optimizer raises an error
        elif not totals:
            own = []
        updated = [wholes[number] for number in totals]
        norm_dtype = keras.backend.result_type(*(weight.dtype for weight in weights))
        of_all_gradients = keras_sharded_updates.of_all_gradients(self._communicator.add, norm_dtype)
        with self._owning(model, optimizer, updated), follow_data(), of_all_gradients:
            keras_optimizer.apply(optimizer, list(map(totals.get, own)), [weights[number] for number in own])
        self._send(model, optimizer, {id(weight): sums or () for weight, sums in zip(weights, gradients, strict=True)})

    @contextlib.contextmanager
    def _owning(self, model: keras.Model, optimizer: Any, updated: Sequence[int] = ()) -> Iterator[None]:
        """Let an optimizer see the shards that this process owns, each as a weight on the device of its owner.

        Args:
            model: The model.
            optimizer: A built optimizer.
            updated: The `id` of the whole weight for each weight or shard with a gradient.
        """
        here, weights = self._here(model), keras_optimizer.weights_of(optimizer)
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(keras_optimizer.one_device_optimizer())
            contexts.enter_context(keras_sharded_slots.of_owners(weights, here))
            contexts.enter_context(keras_sharded_updates.own_shards(optimizer, updated))
            yield

    def finalize(self, model: keras.Model, optimizer: Any) -> None:
        """Overwrite weights with their moving averages, if the optimizer has any."""
        if keras_sharded_updates.finalizes(optimizer):
            weights_of = keras_optimizer.weights_of
            self._change(model, optimizer, lambda: optimizer.finalize_variable_values(weights_of(optimizer)))

    def _change(self, model: keras.Model, optimizer: Any, change: Callable[[], None]) -> None:
        """Change weights on their owners outside of a step, and send them to all copies.

        Args:
            model: The model.
            optimizer: The optimizer of the weights.
            change: Changes the weights of the optimizer, which are those that this process owns.
        """

        def change_and_send() -> None:
            with self._owning(model, optimizer):
                change()
            self._send(model, optimizer, {})

        tf.function(change_and_send, autograph=False)()

    def _send(self, model: keras.Model, optimizer: Any, after: Mapping[int, Sequence[tf.Tensor]]) -> None:
        """Send the weights of an optimizer from their owners to all copies.

        Args:
            model: The model.
            optimizer: The optimizer.
            after: For some weights, by `id`, the tensors that must be computed before the copies are overwritten.
        """
        owners, weights = self.owners(model), keras_optimizer.weights_of(optimizer)
        self._communicator.send(
            [
                Copies(memories, owners[id(weight)], after.get(id(weight), ()))
                for weight in weights
                for memories in keras_sharded_slots.copies(weight)
            ]
        )

    @contextlib.contextmanager
    def whole_state(self, model: keras.Model, folder: Path | None) -> Iterator[None]:
        """Return a context in which the chief can read the slots of all workers. All workers must enter it.

        Args:
            model: The model.
            folder: An existing folder of the chief for a temporary file of the size of the slots. Defaults to the
                system's temporary folder.
        """
        updates = [] if self._is_lent else objective.updates_of(model)
        variables = [variable for optimizer, _ in updates if optimizer is not None for variable in optimizer.variables]
        slots = [variable for variable in variables if keras_sharded_slots.holder_of(variable) is not None]
        if not slots:
            yield
            return
        with gathered(slots, self._job, folder) as arrays, sharded_memory.lent(arrays):
            self._is_lent = True
            try:
                yield
            finally:
                self._is_lent = False


def _trained(model: keras.Model) -> list[keras.Variable]:
    """Return the weights that the optimizers of a model train, without duplicates."""
    groups = (weights for _, weights in objective.updates_of(model))
    return list({id(weight): weight for weights in groups for weight in weights}.values())


def _first_device(weight: keras.Variable) -> str:
    """Return the device of the first copy of a weight; empty for one that is placed later, with its slots."""
    return str(getattr(keras_sharded_slots.copies(weight)[0][0], "device", ""))
