"""How training spends its time, and its speed over the steps, for the report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfpar.callbacks import Throughput

MOST_POINTS = 400


class PhaseClock(keras.callbacks.Callback):
    """Measure the time of steps, of waiting for data and of validation, and the speed over the steps.

    Args:
        throughput: The speed measurement, which must precede this callback.
        on_nonfinite: Called with the number of steps at the first non-finite loss.

    Attributes:
        seconds: The time of each phase: "first_call", "steps", "data", "validation", and "fit", the total.
        points: At most `MOST_POINTS` samples of the speed.
        step: Number of weight updates, if known.

    Example:
        >>> throughput = tfpar.Throughput()
        >>> clock = PhaseClock(throughput, print)
        >>> trainer.fit(dataset, verbose=0, callbacks=[throughput, clock])
        >>> clock.seconds["fit"] > clock.seconds["first_call"] > 0
        True
    """

    chief_only = True
    single_batches = False
    forgets = True

    def __init__(self, throughput: Throughput, on_nonfinite: Callable[[int | None], None]) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self.points: list[dict[str, float]] = []
        self.step: int | None = None
        self._throughput, self._on_nonfinite = throughput, on_nonfinite
        self._began = self._call_began = self._test_began = 0.0
        self._epoch_began: tuple[int, int] | None = None
        self._stride = 1
        self._num_calls = 0
        self._is_finite = True

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self.seconds = dict.fromkeys(("first_call", "steps", "data", "validation"), 0.0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reset the step count of the epoch."""
        self._epoch_began = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock of a call."""
        if self._epoch_began is None:
            self._epoch_began = int(self.model.optimizer.iterations.numpy()), batch
        self._call_began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add a call to its phase."""
        seconds = time.perf_counter() - self._call_began
        if self._epoch_began is not None:
            accumulated = getattr(self.model.optimizer, "gradient_accumulation_steps", None) or 1
            updates, first = self._epoch_began
            self.step = updates + (batch + 1 - first) // accumulated
        figures = self._throughput.call
        waited = seconds * figures.get("data_wait_share", 0.0)
        if figures:
            self.seconds["steps"] += seconds - waited
            self.seconds["data"] += waited
            self._add_point(figures)
        else:
            self.seconds["first_call"] += seconds
        self.seconds["fit"] = time.perf_counter() - self._began
        self._check((logs or {}).get("loss"))

    def _add_point(self, figures: dict[str, float]) -> None:
        self._num_calls += 1
        if self.step is not None and self._num_calls % self._stride == 0:
            self.points.append({"step": self.step, **figures})
        if len(self.points) > MOST_POINTS:
            self.points = self.points[1::2]
            self._stride *= 2

    def _check(self, loss: Any) -> None:
        if self._is_finite and loss is not None and not np.all(np.isfinite(loss)):
            self._is_finite = False
            self._on_nonfinite(self.step)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Start the clock of a validation."""
        self._test_began = time.perf_counter()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Add a validation."""
        self.seconds["validation"] += time.perf_counter() - self._test_began

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stop the clock."""
        self.seconds["fit"] = time.perf_counter() - self._began
