"""The phases of the steps of a training, measured as it runs (`--trace` without a pipeline)."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np

from tfpar.messages.number_format import line
from tfpar.planning.quantities import duration
from tfpar.reduction import objective
from tfpar.reports.step_phases import StepPhases
from tfpar.strategies import Strategy
from tfpar.strategies.step_clock import PHASES, HasClock

_MOST_STEPS = 50


class PhaseTimes(keras.callbacks.Callback):
    """Time the last step of each call of the inner loop, on all workers.

    Args:
        strategy: The strategy of the training; none of its steps is traced yet.
        model: The compiled model.

    Attributes:
        found: After the training, the medians of the last 50 timed steps; None if none was timed.

    Raises:
        ValueError: If the steps of the strategy or of the model have no such phases.

    Example:
        >>> strategy = tfpar.SingleDevice("CPU:0")
        >>> trainer = tfpar.Trainer(build_model, strategy)
        >>> times = PhaseTimes(strategy, trainer.model)
        >>> history = trainer.fit(dataset, epochs=2, verbose=0, callbacks=[times])
        >>> times.found.names
        ('forward', 'backward', 'update')
    """

    single_batches = False
    forgets = True

    def __init__(self, strategy: Strategy, model: keras.Model) -> None:
        super().__init__()
        self.found: StepPhases | None = None
        self._strategy, self._steps = strategy, collections.deque[np.ndarray](maxlen=_MOST_STEPS)
        if not isinstance(strategy, HasClock):
            raise ValueError(f"--trace times no steps of {strategy.describe()}: leave it out.")
        if objective.has_objectives(model):
            raise ValueError(
                f"--trace times no steps with several objectives, as those of {model.name!r}: leave it out."
            )
        if model.jit_compile and strategy.num_replicas == 1 and strategy.compiles_with_xla:
            raise ValueError(
                f"--trace times no step that XLA compiles as one program, as that of {model.name!r}: leave it out, or "
                "compile the model with jit_compile=False."
            )
        self._clock = strategy.start_clock()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Read the clock."""
        self._steps.append(self._clock.read())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Take the medians, and those of the other workers."""
        steps = list(self._steps)[1:] or list(self._steps)  # without the first call, which traces
        is_noted: np.ndarray = np.all(steps[-1] > 0, axis=0) if steps else np.zeros(1, bool)
        (num_timed,) = self._strategy.all_reduce_sum([float(is_noted[0])])
        if num_timed < self._strategy.num_workers:
            return
        own = np.median([_ordered(step[:, is_noted]) for step in steps], 0)
        rows = np.zeros([self._strategy.num_workers, *own.shape])
        rows[self._strategy.rank] = own
        moments = np.reshape(self._strategy.all_reduce_sum(rows.ravel().tolist()), [-1, own.shape[1]])
        names = tuple(name for name, noted in zip(PHASES, is_noted[1:], strict=True) if noted)
        self.found = StepPhases(names, tuple(map(tuple, moments.tolist())))

    def describe(self) -> str:
        """Return the line for the terminal; empty if no step was timed."""
        if self.found is None:
            return ""
        words = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.found.seconds.items())
        return line("phases", words)


def _ordered(moments: np.ndarray) -> np.ndarray:
    """Return moments relative to the first begin; parts of a phase may end before the phase that it follows."""
    return np.maximum.accumulate(moments - moments[:, 0].min(), axis=1)
