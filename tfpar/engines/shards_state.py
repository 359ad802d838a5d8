"""The base class of engines that can shard optimizer state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras

from tfpar._compat.variables import sharded_memory
from tfpar.engines.engine import Engine
from tfpar.engines.optimizer_shards import OptimizerShards


class ShardsState(Engine):
    """The base class of engines that can shard optimizer state."""

    # None where each replica updates all weights.
    _shards: OptimizerShards | None = None

    def _holds(self, variable: keras.Variable) -> bool:
        """Return whether a variable is on the devices of this engine, or a slot on the owner of its weight."""
        return super()._holds(variable) or (self._shards is not None and self._shards.holds(variable))

    def place(self, model: keras.Model, batch: Any, training: bool) -> None:
        """Place the weights, and move the slots of an optimizer that was built outside to their owners."""
        super().place(model, batch, training)
        if self._shards is not None and training and model.built:
            self._shards.place_slots(model)

    @contextlib.contextmanager
    def creating_slots(self, model: keras.Model) -> Iterator[None]:
        """Return the context in which optimizers create their slots, sharded ones on the owners of their weights."""
        of_shards = contextlib.nullcontext() if self._shards is None else self._shards.creating_slots(model)
        with super().creating_slots(model), of_shards:
            yield

    def _slots_on(self, model: keras.Model, device: int) -> list[keras.Variable]:
        """Return the optimizer variables on a device, by the index of the device."""
        return super()._slots_on(model, device) if self._shards is None else self._shards.slots_on(model, device)

    def study(self, model: keras.Model, batch: Any, kind: str) -> None:
        """Compare the owners of the workers, then study how results of parts of a batch are combined."""
        if self._shards is not None and kind == "train":
            self._shards.prepare(model)
        super().study(model, batch, kind)

    def whole_state(self, model: keras.Model, folder: Path | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the chief can read the slots of all workers. All workers must enter it."""
        return super().whole_state(model, folder) if self._shards is None else self._shards.whole_state(model, folder)

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Set a variable so that it reads as `value`. The slot of another worker is set there."""
        if not sharded_memory.is_remote(variable):
            super().assign(variable, value)
