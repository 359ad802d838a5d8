"""Callbacks of our own, each a plain `keras.callbacks.Callback`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfpar.files import json_lines

FIGURES = ("examples_per_second", "step_milliseconds", "data_wait_share")


class Throughput(keras.callbacks.Callback):
    """Measure examples per second, milliseconds a step and the share of time spent waiting for data.

    The first call of every training is left out: it compiles. The figures of an epoch are added to its logs, so
    History, CSVLogger and TensorBoard have them too. Those of the whole training are in `summary`, those of the last
    call in `call`.

    Example:
        >>> throughput = tfpar.Throughput()
        >>> trainer.fit(dataset, epochs=2, callbacks=[throughput])
        >>> sorted(throughput.summary)
        ['data_wait_share', 'examples_per_second', 'step_milliseconds']
    """

    single_batches = False
    forgets = True  # another process, another machine perhaps: its speed is measured anew

    def __init__(self) -> None:
        super().__init__()
        self.summary: dict[str, float] = {}
        self.call: dict[str, float] = {}
        self._total = np.zeros(4)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin anew; the next call compiles and is left out."""
        self._warm = False
        self.call = {}
        self._total = np.zeros(4)
        self._call: tuple[int, float, float] | None = None

    def measure_call(self, num_steps: int, num_examples: int, data_wait_seconds: float) -> None:
        """Take what the loop counted in the call that ends; plain Keras tells nothing."""
        self._call = (num_steps, num_examples, data_wait_seconds)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin the sums of an epoch: seconds, steps, examples, seconds of waiting."""
        self._epoch = np.zeros(4)
        self._next_step: int | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock."""
        self._began = time.perf_counter()
        self._next_step = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Add one call to the sums."""
        seconds = time.perf_counter() - self._began
        if self._warm and self._next_step is not None:
            unknown = (batch + 1 - self._next_step, float("nan"), float("nan"))
            sums = np.array((seconds, *(self._call or unknown)))
            self.call = _figures(sums)
            self._epoch += sums
        self._warm = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the epoch's figures to its logs."""
        self._total += self._epoch
        self.summary = _figures(self._total)
        if logs is not None:
            logs.update(_figures(self._epoch))


def _figures(sums: np.ndarray) -> dict[str, float]:
    seconds, steps, examples, wait_seconds = (float(value) for value in sums)
    if steps == 0:
        return {}
    values = (round(examples / seconds, 1), round(1e3 * seconds / steps, 4), round(wait_seconds / seconds, 4))
    return {name: value for name, value in zip(FIGURES, values, strict=True) if np.isfinite(value)}


class LearningRateWarmup(keras.callbacks.Callback):
    """Raise the learning rate linearly over the first steps, to a peak scaled by the global batch.

    Large batches take larger steps, and larger steps need a gentle start: the rate of the optimizer is multiplied by
    `global_batch_size / base_batch_size`, and reached after `warmup_steps` steps, from rate / warmup_steps on.
    (Goyal et al. 2017, "Accurate, Large Minibatch SGD", arXiv 1706.02677, section 2.)

        rate      peak      ┌──────────
                        ┌───┘
                    ┌───┘
                ────┘
                0        warmup_steps

    Args:
        warmup_steps: Number of steps, at least 0; 0 only scales.
        global_batch_size: Examples a step over all replicas.
        base_batch_size: The global batch for which the optimizer's rate was chosen; None does not scale.

    Raises:
        ValueError: If a number is out of range, or the optimizer's rate is a schedule, which a callback cannot set.

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
        """Refuse an optimizer whose rate cannot be set."""
        optimizer = self.model.optimizer
        if isinstance(optimizer.get_config().get("learning_rate"), dict):
            raise ValueError(
                "LearningRateWarmup sets the learning rate at every step, and this optimizer's rate is a schedule. "
                "Give the optimizer a number, or put the warm-up into the schedule."
            )
        self._peak: float | None = None
        self.single_batches = True

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of the next step; after the warm-up, leave it to others."""
        if not self.single_batches:
            return
        if self._peak is None:  # not known from a checkpoint: the optimizer's rate is the one for the base batch
            self._peak = float(self.model.optimizer.learning_rate.numpy()) * self.scale
        step = int(self.model.optimizer.iterations.numpy())
        if step <= self.warmup_steps:
            self.model.optimizer.learning_rate = self._peak * min(1.0, (step + 1) / max(1, self.warmup_steps))
        self.single_batches = step < self.warmup_steps


class ReplicaCheck(keras.callbacks.Callback):
    """Stop with an error when the replicas' weights are no longer equal, bit for bit.

    Equal replicas are what data parallelism rests on; a custom layer or a faulty device can part them unseen.

    Args:
        every_steps: Check after about this many steps; None checks at the end of each epoch.

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
        """Check when the steps since the last check are enough."""
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
            first, *others = (np.asarray(copy) for copy in strategy.experimental_local_results(variable.value))
            for replica, other in enumerate(others, start=1):
                if not np.array_equal(first, other, equal_nan=True):
                    difference = np.nanmax(np.abs(first.astype("float64") - other.astype("float64")))
                    raise RuntimeError(
                        f"All replicas must hold equal weights, and {variable.path!r} differs by {difference:.3g} "
                        f"between replicas 0 and {replica}. A layer that updates a weight by itself, or a faulty "
                        f"device, is the usual cause."
                    )


class MetricsFile(keras.callbacks.Callback):
    """Append each epoch's logs to a file, one JSON object a line.

    A resumed training drops the lines of the epochs that it repeats. Checkpoints hold the lines too, so that a file
    which was lost or damaged meanwhile is written again.

    Args:
        path: The file, `metrics.jsonl` by custom; its folder must exist.

    Example:
        >>> trainer.fit(dataset, callbacks=[tfpar.MetricsFile("metrics.jsonl")])
    """

    chief_only = True

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.entries: list[dict[str, Any]] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget another training's lines; a checkpoint, or else the file, has those of this one."""
        self.entries = []

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Write the epoch's line."""
        step = int(self.model.optimizer.iterations.numpy())
        line = {
            "epoch": epoch + 1,
            "step": step,
            **{name: np.asarray(value).tolist() for name, value in (logs or {}).items()},
        }
        entries = self.entries or self._known()
        self.entries = [*(entry for entry in entries if entry["epoch"] <= epoch), line]
        json_lines.write(self.path, self.entries)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Write the file again if it is not as it was written, or lost."""
        if not self.entries:
            self.entries = self._known()
        if self.entries and json_lines.read(self.path) != (self.entries, []):
            json_lines.write(self.path, self.entries)

    def _known(self) -> list[dict[str, Any]]:
        """Return what the file and the history say of earlier epochs, where no checkpoint has the lines."""
        entries = {entry["epoch"]: entry for entry in [*self._of_history(), *json_lines.read_or_warn(self.path)]}
        return [entries[epoch] for epoch in sorted(entries)]

    def _of_history(self) -> list[dict[str, Any]]:
        """Return what the history says of each epoch: a checkpoint of an older version has that."""
        history = getattr(self.model, "history", None)
        epochs = getattr(history, "epoch", None) or []
        logs = {name: values for name, values in getattr(history, "history", {}).items() if len(values) == len(epochs)}
        return [
            {"epoch": epoch + 1, **{name: np.asarray(values[place]).tolist() for name, values in logs.items()}}
            for place, epoch in enumerate(epochs)
        ]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl` that are whole; say on standard error which are not."""
    return json_lines.read_or_warn(path)
