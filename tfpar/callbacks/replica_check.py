"""A check that the weights of all replicas are equal."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tfpar._compat.variables.sharded_memory import is_remote


class ReplicaCheck(keras.callbacks.Callback):
    """Raise an error once the weights or optimizer states of replicas differ in any bit.

    Data parallelism requires equal replicas; a custom layer or a faulty device can make them differ silently.

    Args:
        every_steps: Check about every this many steps, and at the end of each epoch. None: at the end of epochs only.

    Raises:
        ValueError: If `every_steps` is below 1.

    Example:
        >>> trainer.fit(dataset, callbacks=[tfpar.ReplicaCheck()])
    """

    single_batches = False

    def __init__(self, every_steps: int | None = None) -> None:
        super().__init__()
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, received {every_steps}.")
        self.every_steps = every_steps
        self._checked_at = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check if `every_steps` steps have run since the last check."""
        if self.every_steps is not None:
            step = int(self.model.optimizer.iterations.numpy())
            if step - self._checked_at >= self.every_steps:
                self._checked_at = step
                self._check()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Check at the end of the epoch."""
        self._check()

    def _check(self) -> None:
        strategy = self.model.distribute_strategy
        for variable in [*self.model.weights, *self.model.optimizer.variables]:
            if is_remote(variable):
                continue
            first, *others = (np.asarray(copy) for copy in strategy.experimental_local_results(variable.value))
            for replica, other in enumerate(others, start=1):
                if not np.array_equal(first, other, equal_nan=True):
                    difference = np.nanmax(np.abs(first.astype("float64") - other.astype("float64")))
                    raise RuntimeError(
                        f"All replicas must hold equal weights, and {variable.path!r} differs by {difference:.3g} "
                        f"between replicas 0 and {replica}. A layer that updates one of its weights, or a faulty "
                        f"device, is the usual cause."
                    )
