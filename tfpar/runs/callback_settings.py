"""From the section `[callbacks]` of a run, and the warm-up of its optimizer, to callbacks."""

from __future__ import annotations

import keras

from tfpar import callbacks, config
from tfpar.runs.directory import RunDirectory
from tfpar.runs.log_names import log_names, may_have_direction
from tfpar.runs.run_trainer import RunTrainer
from tfpar.runs.tensorboard_steps import StepSummaries


def callbacks_from_settings(
    run: config.Run, directory: RunDirectory, throughput: callbacks.Throughput
) -> list[keras.callbacks.Callback]:
    """Build the callbacks that a run asks for.

    Args:
        run: The resolved run.
        directory: Its folder.
        throughput: That of the training; TensorBoard's curves by step show its figures.
    """
    return [
        *_tensorboard(run.callbacks, directory, throughput),
        *_warmup(run),
        *_on_plateaus(run.callbacks),
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
    found: list[keras.callbacks.Callback] = []
    stop, reduce = settings.early_stopping_patience, settings.reduce_learning_rate_patience
    monitor, mode = settings.monitor, settings.monitor_mode
    if stop is not None:
        found.append(keras.callbacks.EarlyStopping(monitor, patience=stop, mode=mode, restore_best_weights=True))
    if reduce is not None:
        found.append(keras.callbacks.ReduceLROnPlateau(monitor, patience=reduce, mode=mode))
    return found


def _replica_checks(settings: config.Callbacks) -> list[keras.callbacks.Callback]:
    steps = settings.check_replicas_every_steps
    return [] if steps is None else [callbacks.ReplicaCheck(steps)]


def check_monitor(settings: config.Callbacks, trainer: RunTrainer) -> None:
    """Refuse to monitor what Keras would certainly not find, or not compare, after the first epoch.

    Args:
        settings: The section of the run.
        trainer: The trainer of the run.

    Raises:
        ValueError: If the metric is not measured, or "auto" does not know whether a lower or a higher value is better.
    """
    if settings.early_stopping_patience is None and settings.reduce_learning_rate_patience is None:
        return
    names = log_names(trainer.model)
    if settings.monitor not in (names or ()):
        _check_name(settings.monitor, names, trainer.validation_data is not None)
    if settings.monitor_mode == "auto" and not may_have_direction(trainer.model, settings.monitor):
        raise ValueError(
            f'callbacks.monitor = "{settings.monitor}" is no metric of which Keras knows whether a lower or a higher '
            'value is better: set callbacks.monitor_mode = "min" or "max".'
        )


def _check_name(monitor: str, names: list[str] | None, is_validated: bool) -> None:
    name = monitor.removeprefix("val_")
    if name != monitor and not is_validated:
        raise ValueError(
            f'callbacks.monitor = "{monitor}" is not measured without validation data: monitor "{name}", or set a '
            "validation split."
        )
    if names is not None and name not in names:
        raise ValueError(
            f'callbacks.monitor = "{monitor}" is no metric of this model. There are: '
            f"{', '.join(f'{name}, val_{name}' for name in names)}."
        )
