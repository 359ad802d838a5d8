"""The output of the train command during training: a line per epoch, and a progress bar on a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import keras
import numpy as np

from tfpar.callbacks import FIGURES
from tfpar.messages.number_format import figure

SPEED = "examples/s"
_SECONDS_BETWEEN = 0.05
_BAR_COLUMNS = 20
_FIGURE_COLUMNS = len("1.23e-05")
_GAP = "  "


class EpochTable(keras.callbacks.Callback):
    """Print a table of the logs with a row per epoch, and on a terminal a progress bar below.

        epoch      loss  accuracy  val_loss  val_accuracy  examples/s
         1/10     1.975    0.4816     1.227        0.7833       8,720
         2/10 ━━━━━━━━━━────────── 13/24  loss 0.8313, 2 s left

    On a terminal, columns that do not fit are omitted with a note. The speed comes from `tfpar.Throughput`, which must
    precede this callback.

    Args:
        validates: Whether there are validation data, so that validation metrics get columns from the start.
        metrics_file: The file with all metrics, for the note.

    Example:
        >>> trainer.fit(dataset, verbose=0, callbacks=[tfpar.Throughput(), EpochTable(True, "metrics.jsonl")])
    """

    chief_only = True
    single_batches = False
    forgets = True

    def __init__(self, validates: bool, metrics_file: Any) -> None:
        super().__init__()
        self._validates = validates
        self._metrics_file = metrics_file
        self._bar = sys.stdout.isatty()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a table."""
        self._columns: list[tuple[str, int]] = []
        self._epoch = 0
        self._drawn_at = 0.0
        self._is_drawn = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Start the clock of the epoch."""
        self._epoch = epoch
        self._began: tuple[int, float] | None = None
        self._state = ""

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Draw the progress. The first call includes compilation, so it does not count for the time left."""
        now, done, steps = time.monotonic(), batch + 1, self.params["steps"]
        self._state = f"{done}/{steps}{_GAP}" if steps else f"{done:,} steps{_GAP}"
        if steps:
            full = min(_BAR_COLUMNS, _BAR_COLUMNS * done // steps)
            self._state = f"{'━' * full}{'─' * (_BAR_COLUMNS - full)} {self._state}"
        words = []
        if np.ndim((logs or {}).get("loss", [])) == 0:
            words.append(f"loss {figure(float((logs or {})['loss']))}")
        if steps and self._began is not None and done > self._began[0]:
            seconds = (now - self._began[1]) * (steps - done) / (done - self._began[0])
            words += [f"{_duration(seconds)} left"] if seconds >= 1 else []
        self._began = self._began or (done, now)
        if now - self._drawn_at > _SECONDS_BETWEEN or done == steps:
            self._draw(self._state + ", ".join(words))

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Show that validation runs."""
        self._draw(f"{self._state}validating")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Print the row of the epoch."""
        logs = dict(logs or {})
        if not self._columns:
            self._columns = self._choose(logs)
            self._print(_row("epoch", self._columns, {name: name for name, _ in self._columns}))
        values = {name: figure(float(value)) for name, value in logs.items() if np.ndim(value) == 0}
        values[SPEED] = figure(round(logs[FIGURES[0]])) if FIGURES[0] in logs else ""
        self._print(_row(self._number(epoch), self._columns, values))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Erase the progress bar."""
        self._erase()

    def _choose(self, logs: dict[str, Any]) -> list[tuple[str, int]]:
        """Return the names and widths of the columns: loss, training metrics, validation metrics, speed."""
        names = [name for name, value in logs.items() if np.ndim(value) == 0 and name not in FIGURES]
        trained = sorted((name for name in names if not name.startswith("val_")), key=lambda name: name != "loss")
        validated = [f"val_{name}" for name in trained if f"val_{name}" in names or self._expects(name)]
        others = [name for name in names if name not in (*trained, *validated)]
        columns = [(name, max(len(name), _FIGURE_COLUMNS)) for name in (*trained, *validated, *others)]
        room = _terminal_columns() if self._bar else sys.maxsize
        shown, used = [], len(self._number(0)) + len(_GAP) + len(SPEED)
        for name, width in columns:
            used += len(_GAP) + width
            if used < room:
                shown.append((name, width))
        if len(shown) < len(columns):
            self._print(f"More metrics than fit here are in {self._metrics_file}.")
        return [*shown, (SPEED, len(SPEED))]

    def _expects(self, name: str) -> bool:
        """Return whether a log will have a validation value in later epochs; the learning rate is no metric."""
        return self._validates and name != "learning_rate"

    def _number(self, epoch: int) -> str:
        epochs = str(self.params["epochs"])
        return f"{epoch + 1:>{len(epochs)}}/{epochs}".rjust(len("epoch"))

    def _print(self, text: str) -> None:
        self._erase()
        print(text, flush=True)

    def _draw(self, text: str) -> None:
        if self._bar:
            self._drawn_at, self._is_drawn = time.monotonic(), True
            columns = _terminal_columns() - 1  # a full line would wrap
            print(f"\r{self._number(self._epoch)} {text}"[: columns + 1].ljust(columns + 1), end="", flush=True)

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            print("\r" + " " * (_terminal_columns() - 1) + "\r", end="", flush=True)


def _row(first: str, columns: list[tuple[str, int]], values: dict[str, str]) -> str:
    return _GAP.join([first, *(f"{values.get(name, ''):>{width}}" for name, width in columns)])


def _terminal_columns() -> int:
    return shutil.get_terminal_size().columns


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
