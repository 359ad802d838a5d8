"""The callbacks of a run, built from the section `[callbacks]` and the warm-up of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from tfpar import callbacks, config
from tfpar.files import atomic_file
from tfpar.messages.number_format import counted
from tfpar.runs.directory import RunDirectory
from tfpar.runs.reporting.log_names import log_names, may_have_direction
from tfpar.runs.reporting.tensorboard_steps import StepSummaries
from tfpar.runs.run_trainer import RunTrainer


def callbacks_from_settings(
    run: config.Run, directory: RunDirectory, throughput: callbacks.Throughput
) -> list[keras.callbacks.Callback]:
    """Build the callbacks configured for a run.

    Args:
        run: The run.
        directory: The run directory.
        throughput: The speed measurement, which TensorBoard's curves by step show.
    """
    return [
        *_tensorboard(run.callbacks, directory, throughput),
        *_warmup(run),
        *_on_plateaus(run.callbacks),
        *_best_model(run.callbacks, directory),
        *_replica_checks(run.callbacks),
    ]


def _tensorboard(
    settings: config.Callbacks, directory: RunDirectory, throughput: callbacks.Throughput
) -> list[keras.callbacks.Callback]:
    if not settings.tensorboard:
        return []
    by_epoch = keras.callbacks.TensorBoard(str(directory.tensorboard), write_graph=False)
    return [by_epoch, StepSummaries(directory.tensorboard / "steps", throughput)]


def _warmup(run: config.Run) -> list[keras.callbacks.Callback]:
    steps, base_batch_size = run.optimizer.warmup_steps, run.optimizer.base_batch_size
    if not steps and not base_batch_size:
        return []
    return [callbacks.LearningRateWarmup(steps, run.training.global_batch_size, base_batch_size)]


def _on_plateaus(settings: config.Callbacks) -> list[keras.callbacks.Callback]:
    built: list[keras.callbacks.Callback] = []
    stop, reduce = settings.early_stopping_patience, settings.reduce_learning_rate_patience
    monitor, mode = settings.monitor, settings.monitor_mode
    if stop is not None:
        built.append(keras.callbacks.EarlyStopping(monitor, patience=stop, mode=mode, restore_best_weights=True))
    if reduce is not None:
        built.append(keras.callbacks.ReduceLROnPlateau(monitor, patience=reduce, mode=mode))
    return built


def _best_model(settings: config.Callbacks, directory: RunDirectory) -> list[keras.callbacks.Callback]:
    log = settings.save_best
    return [] if log is None else [BestModel(directory.best, log, settings.mode_of(log))]


def _replica_checks(settings: config.Callbacks) -> list[keras.callbacks.Callback]:
    steps = settings.check_replicas_every_steps
    return [] if steps is None else [callbacks.ReplicaCheck(steps)]


def check_monitor(settings: config.Callbacks, trainer: RunTrainer) -> None:
    """Refuse to monitor logs that Keras certainly will not find, or cannot compare, after the first epoch.

    Raises:
        ValueError: If a log is not measured, or the mode "auto" cannot tell whether lower or higher is better.
    """
    names = log_names(trainer.model)
    for key, log in settings.watched_logs().items():
        if log not in (names or ()):
            _check_name(key, log, names, trainer.validation_data is not None)
        if settings.mode_of(log) == "auto" and not may_have_direction(trainer.model, log):
            way_out = 'set callbacks.monitor_mode = "min" or "max"'
            if log != settings.monitor:
                way_out += f' with callbacks.monitor = "{log}"'
            raise ValueError(
                f'callbacks.{key} = "{log}" is no metric of which Keras knows whether a lower or a higher value is '
                f"better: {way_out}."
            )


def _check_name(key: str, monitor: str, names: list[str] | None, is_validated: bool) -> None:
    name = monitor.removeprefix("val_")
    if name != monitor and not is_validated:
        raise ValueError(
            f'callbacks.{key} = "{monitor}" is not measured without validation data: monitor "{name}", or set a '
            "validation split."
        )
    if names is not None and name not in names:
        raise ValueError(
            f'callbacks.{key} = "{monitor}" is no metric of this model. There are: '
            f"{', '.join(f'{name}, val_{name}' for name in names)}."
        )


def restored_epoch(callbacks: Sequence[keras.callbacks.Callback]) -> int | None:
    """Return the epoch, from 1, whose weights early stopping restored after training; None without it."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.best_weights is not None:
            return int(callback.best_epoch) + 1
    return None


def early_stop(callbacks: Sequence[keras.callbacks.Callback]) -> str:
    """Return when and why early stopping ended the training, in sentences; empty if it did not."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.EarlyStopping) and callback.stopped_epoch > 0:
            return (
                f"Stopped after epoch {callback.stopped_epoch + 1}: {callback.monitor} has not improved for "
                f"{counted(callback.wait, 'epoch')}. The model has the weights of epoch {restored_epoch(callbacks)}."
            )
    return ""


class BestModel(keras.callbacks.ModelCheckpoint):
    """Save the model after each epoch that improves a log, replacing the file atomically.

    Args:
        path: A `.keras` file in an existing folder.
        monitor: The name of the log. Epochs without it, such as those without validation, save nothing.
        mode: "min", "max", or "auto" to let Keras infer the direction.

    Example:
        >>> trainer.fit(dataset, validation_data=validation, callbacks=[BestModel("best.keras", "val_accuracy")])
    """

    single_batches = False  # Keras' batch hooks have no effect when saving at the end of epochs

    def __init__(self, path: str | Path, monitor: str, mode: str = "auto") -> None:
        self._path = Path(path)
        self._unfinished = self._path.with_name(f".unfinished.{self._path.name}")
        literal = str(self._unfinished).replace("{", "{{").replace("}", "}}")  # Keras formats the path
        super().__init__(literal, monitor, save_best_only=True, mode=mode)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save the model if it is the best so far."""
        if self.monitor not in (logs or {}) or not self._path.parent.is_dir():
            return
        self._unfinished.unlink(missing_ok=True)  # left by a killed process
        super().on_epoch_end(epoch, logs)
        if self._unfinished.exists():
            with atomic_file.new_by_path(self._path) as whole:
                self._unfinished.rename(whole)
