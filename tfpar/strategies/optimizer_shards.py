"""Sharded optimizer state: each weight has one owner among the replicas, which holds its slots and updates it.

               weight 0 (owner 0)    weight 1 (owner 1)
    replica 0  gradient ──┐          gradient ──┐
    replica 1  gradient ──┤          gradient ──┤
                          ▼                     ▼
               sum and update        sum and update
               on replica 0          on replica 1
                          │                     │
               new weight to all     new weight to all

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stages 1 and 2. One
call of the optimizer updates all weights, each on the device of its owner, so that clipping by the global norm, or an
optimizer of a user's own, sees all gradients.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfpar._compat import keras_model, keras_optimizer, keras_variables, tf_replica_memory
from tfpar.per_model import PerModel
from tfpar.placement.devices import follow_data
from tfpar.placement.owners import choose_owners
from tfpar.reduction import objective
from tfpar.reduction.replicas import replica_id
from tfpar.strategies.base import Strategy


class OptimizerShards:
    """The owners of weights among the replicas of one process.

    Args:
        strategy: The `tf.distribute` strategy of the weights.

    Attributes:
        sums_on_owners: Whether each gradient is summed on the device of its weight's owner alone, not all-reduced.
    """

    sums_on_owners = True

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy, self._devices = strategy, strategy.extended.worker_devices
        self._compiled: PerModel[tuple[Any, dict[int, int]]] = PerModel()
        tf_replica_memory.swap_owned_averages()
        tf_replica_memory.refuse_updates_by_replicas()

    def owners(self, model: keras.Model) -> dict[int, int]:
        """Return the replica that owns each trained weight by the weight's `id`, the same until the next `compile`.

        A change of `trainable` waits for `compile`, as in Keras: the owners of the other weights stay.

        Args:
            model: A compiled model with built layers.
        """
        compiled, known = self._compiled.get(model) or (None, {})
        if compiled is not keras_model.compilation(model):
            known = {}
        owners = known | choose_owners(trained(model), self._strategy.num_replicas_in_sync, known)
        self._compiled[model] = keras_model.compilation(model), owners
        return owners

    def holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is a slot on a device of a replica."""
        on = (keras_variables.is_on(variable, device) for device in self._devices)
        return keras_variables.is_allocated(variable) and tf_replica_memory.is_owned(variable) and any(on)

    def creating_slots(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return the context in which each slot is created on the owner of its weight, within the scope."""
        owners = self.owners(model)
        devices = {id(weight.value): self._devices[owners[id(weight)]] for weight in trained(model)}
        return tf_replica_memory.slots_on(lambda memory: devices.get(id(memory), self._devices[0]))

    def place_slots(self, model: keras.Model) -> None:
        """Move the slots of optimizers that were built elsewhere to the owners of their weights."""
        owners = self.owners(model)
        for optimizer, weights in objective.updates_of(model):
            if optimizer.built:
                for slot, weight in keras_optimizer.slots_of(optimizer, weights):
                    tf_replica_memory.place_slot(slot, self._devices[owners[id(weight)]])

    def apply(self, model: keras.Model, optimizer: Any, weights: Sequence[keras.Variable], gradients: Any) -> None:
        """Update each weight on its owner, and copy it to the other replicas.

        Args:
            model: The model.
            optimizer: The optimizer of the weights.
            weights: Weights of the model.
            gradients: The results of `only_owned` on all replicas for the gradients of the weights.
        """
        owners = self.owners(model)
        parts = [
            None if gradient is None else self._strategy.experimental_local_results(gradient) for gradient in gradients
        ]
        sums = [None if part is None else part[owners[id(weight)]] for part, weight in zip(parts, weights, strict=True)]
        with keras_optimizer.one_device_optimizer(), tf_replica_memory.of_owners(owners, weights), follow_data():
            keras_optimizer.apply(optimizer, sums, weights)
        _copy(weights, owners, parts)

    def finalize(self, model: keras.Model, optimizer: Any, weights: Sequence[keras.Variable]) -> None:
        """Overwrite weights with their moving averages where the optimizer has them."""
        owners = self.owners(model)
        with keras_optimizer.one_device_optimizer(), tf_replica_memory.of_owners(owners, weights):
            optimizer.finalize_variable_values(weights)
        _copy(weights, owners, [None] * len(weights))

    def slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the variables of the optimizer in the memory of a device, by its number."""
        return [
            variable
            for variable in model.optimizer.variables
            if not tf_replica_memory.is_owned(variable) or keras_variables.is_on(variable, self._devices[device])
        ]


def trained(model: keras.Model) -> list[keras.Variable]:
    """Return the weights of all optimizers of a model, without duplicates."""
    groups = (weights for _, weights in objective.updates_of(model))
    return list({id(weight): weight for weights in groups for weight in weights}.values())


def only_owned(sums: Sequence[Any], owners: Sequence[int]) -> list[Any]:
    """Return the sums of the calling replica's own weights; for each other weight a scalar, for what must come before.

    Args:
        sums: The sums of gradients, those of weights first; None for a weight without one.
        owners: The owner of each weight, its number among the replicas of all workers.
    """
    own = replica_id()
    others = [total is not None and owner != own for total, owner in zip(sums, owners, strict=False)]
    return [tf.zeros([]) if is_other else total for total, is_other in itertools.zip_longest(sums, others)]


def _copy(weights: Sequence[keras.Variable], owners: dict[int, int], parts: Sequence[Any]) -> None:
    """Copy each weight from its owner to the other replicas.

    Args:
        weights: Weights.
        owners: Their owners, by the `id` of the weight.
        parts: For each weight a tensor of each replica, which its copy waits for; None for none.
    """
    for weight, before in zip(weights, parts, strict=True):
        memories, owner = tf_replica_memory.memories(weight), owners[id(weight)]
        with tf.device(memories[owner].device):
            value = memories[owner].read_value()
        for replica, memory in enumerate(memories):
            if replica != owner:
                with tf.device(memory.device), tf.control_dependencies([before[replica]] if before else []):
                    memory.assign(tf.identity(value))


class DividesState(Strategy):
    """The base of strategies that divide the optimizer's state over their replicas, if they are asked to."""

    # The owners of weights with `shard="optimizer"`.
    _shards: OptimizerShards | None = None

    def holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is mirrored by this strategy, or a slot on the owner of its weight."""
        return super().holds(variable) or (self._shards is not None and self._shards.holds(variable))

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Move the slots of an optimizer that was built elsewhere to the owners of their weights."""
        if self._shards is not None and training and model.built:
            self._shards.place_slots(model)

    def creating_slots(self, model: keras.Model) -> contextlib.AbstractContextManager[None]:
        """Return the context in which optimizers create their slots: with shards, each on the owner of its weight."""
        return contextlib.nullcontext() if self._shards is None else self._shards.creating_slots(model)

    def slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the variables of the optimizer in the memory of a device, by its number."""
        return super().slots_on(model, device) if self._shards is None else self._shards.slots_on(model, device)
