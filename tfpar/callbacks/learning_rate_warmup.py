"""Linear warm-up of the learning rate for large global batches."""

from __future__ import annotations

from typing import Any

import keras


class LearningRateWarmup(keras.callbacks.Callback):
    """Scale the learning rate by the global batch size, and reach it linearly over the first steps.

    The peak rate is the optimizer's rate times `global_batch_size / base_batch_size`. Training at the peak from the
    first step can diverge, so the rate rises from `peak / warmup_steps` to the peak (Goyal et al. 2017, "Accurate,
    Large Minibatch SGD", arXiv 1706.02677, section 2).

        rate      peak      ┌──────────
                        ┌───┘
                    ┌───┘
                ────┘
                0        warmup_steps

    Args:
        warmup_steps: Number of warm-up steps; 0 scales only.
        global_batch_size: Examples per step over all replicas.
        base_batch_size: The global batch size for which the optimizer's rate was tuned. None: no scaling.

    Raises:
        ValueError: If a number is out of range, or, as training begins, if the optimizer's rate is a schedule.

    Example:
        >>> tfpar.LearningRateWarmup(warmup_steps=500, global_batch_size=1024, base_batch_size=256)
    """

    def __init__(self, warmup_steps: int, global_batch_size: int, base_batch_size: int | None = None) -> None:
        super().__init__()
        if warmup_steps < 0 or global_batch_size < 1 or (base_batch_size is not None and base_batch_size < 1):
            raise ValueError(
                f"warmup_steps must be at least 0 and batch sizes at least 1, received warmup_steps={warmup_steps}, "
                f"global_batch_size={global_batch_size}, base_batch_size={base_batch_size}."
            )
        self.warmup_steps = warmup_steps
        self.scale = 1.0 if base_batch_size is None else global_batch_size / base_batch_size
        self.single_batches = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise an error if the optimizer's rate is a schedule."""
        if not isinstance(self.model.optimizer.learning_rate, keras.Variable):
            raise ValueError(
                "LearningRateWarmup sets the learning rate at every step, and this optimizer's rate is a schedule. "
                "Give the optimizer a number, or put the warm-up into the schedule."
            )
        self._peak: float | None = None
        self.single_batches = True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of the next step; after the warm-up, leave it to other callbacks."""
        if not self.single_batches:
            return
        if self._peak is None:  # not restored from a checkpoint: the optimizer's rate is not scaled yet
            self._peak = float(self.model.optimizer.learning_rate.numpy()) * self.scale
        step = int(self.model.optimizer.iterations.numpy())
        if step <= self.warmup_steps:
            self.model.optimizer.learning_rate = self._peak * min(1.0, (step + 1) / max(1, self.warmup_steps))
        self.single_batches = step < self.warmup_steps
