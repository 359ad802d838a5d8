"""From the section `[callbacks]` of a run, and the warm-up of its optimizer, to callbacks."""

from __future__ import annotations

import keras

from tfpar import callbacks, config
from tfpar.runs.directory import RunDirectory
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
    if stop is not None:
        found.append(keras.callbacks.EarlyStopping(settings.monitor, patience=stop, restore_best_weights=True))
    if reduce is not None:
        found.append(keras.callbacks.ReduceLROnPlateau(settings.monitor, patience=reduce))
    return found


def _replica_checks(settings: config.Callbacks) -> list[keras.callbacks.Callback]:
    steps = settings.check_replicas_every_steps
    return [] if steps is None else [callbacks.ReplicaCheck(steps)]


def check_monitor(settings: config.Callbacks, trainer: RunTrainer) -> None:
    """Refuse to monitor a metric that the model does not have; Keras would warn after the first epoch.

    Args:
        settings: The section of the run.
        trainer: The trainer of the run.

    Raises:
        ValueError: If the metric is not measured.
    """
    metrics = trainer.model.get_compile_config().get("metrics") or []
    watches = settings.early_stopping_patience is not None or settings.reduce_learning_rate_patience is not None
    if not watches or not all(isinstance(metric, str | dict) for metric in metrics) or isinstance(metrics, dict):
        return  # the metrics of several outputs have other names
    names = ["loss", *(metric if isinstance(metric, str) else metric["config"]["name"] for metric in metrics)]
    if settings.monitor.startswith("val_") and trainer.validation_data is None:
        raise ValueError(
            f'callbacks.monitor = "{settings.monitor}" is not measured without validation data: monitor '
            f'"{settings.monitor.removeprefix("val_")}", or set a validation split.'
        )
    if settings.monitor.removeprefix("val_") not in names:
        raise ValueError(
            f'callbacks.monitor = "{settings.monitor}" is no metric of this model. There are: '
            f"{', '.join(f'{name}, val_{name}' for name in names)}."
        )
