"""TensorFlow's profile of a few training steps, for TensorBoard (`--profile`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfpar.messages.number_format import counted, line
from tfpar.reports.recorded_run import PROFILE

FIRST_STEPS = 5  # not recorded: they trace functions and fill buffers


class StepProfile(keras.callbacks.Callback):
    """Record training steps with TensorFlow's profiler, on the chief. Until then, each call runs a single step.

    Args:
        folder: The TensorBoard folder; the profile goes to its subfolder `plugins/profile`.
        num_steps: Number of steps to record.

    Attributes:
        num_recorded: Number of steps recorded so far.

    Example:
        >>> profile = StepProfile("logs", num_steps=2)
        >>> history = trainer.fit(dataset, epochs=5, verbose=0, callbacks=[profile])
        >>> profile.num_recorded
        2
    """

    chief_only = True
    forgets = True

    def __init__(self, folder: str | Path, num_steps: int) -> None:
        super().__init__()
        self.single_batches = True
        self.num_recorded = 0
        self._folder, self._num_steps = str(folder), num_steps
        self._num_seen = 0
        self._step: Any = None  # the step being recorded

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the profiler before the first step to record, and mark each step."""
        if not self.single_batches or self._num_seen < FIRST_STEPS:
            return
        if self._num_seen == FIRST_STEPS:
            tf.profiler.experimental.start(self._folder)
        self._step = tf.profiler.experimental.Trace("train", step_num=self._num_seen, _r=1)
        self._step.__enter__()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """End the step, and the profile after the last one."""
        self._num_seen += 1
        if self._step is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        self.num_recorded += 1
        if self.num_recorded == self._num_steps:
            self._stop()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stop the profiler if training had fewer steps."""
        if self.num_recorded and self.single_batches:
            self._stop()

    def _stop(self) -> None:
        tf.profiler.experimental.stop()
        self.single_batches = False

    def describe(self) -> str:
        """Return a line that says where the profile is, or why there is none."""
        if not self.num_recorded:
            return line("profile", f"none: the training had at most {FIRST_STEPS} steps, which are not recorded")
        path = Path(self._folder).parent / PROFILE
        return line(
            "profile", f"{counted(self.num_recorded, 'step')} in {path}, for tensorboard --logdir {self._folder}"
        )
