"""One run from its configuration to its files: what the train command does once TensorFlow may start."""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfpar import callbacks, config, data, strategies
from tfpar.checkpoint import Checkpoints
from tfpar.commands import standard_streams
from tfpar.config import keys_read
from tfpar.interruption import interruptible
from tfpar.messages.number_format import line
from tfpar.runs import header, pipeline_report, resume, summary
from tfpar.runs.directory import RunDirectory
from tfpar.runs.epoch_table import EpochTable
from tfpar.runs.folder_watch import FolderWatch
from tfpar.runs.tensorboard_steps import StepSummaries
from tfpar.runs.user_trainer import check_trainer, make_trainer, trainer_reads, trainer_source
from tfpar.trainer import Trainer


def train(run: config.Run, directory: RunDirectory, *, trace: bool = False) -> bool:
    """Train a run in its directory, from its newest checkpoint if there is one, and say what came of it.

    In a job of several workers every worker calls this; only the chief reads and writes the folder, and speaks.

    Args:
        run: The resolved run.
        directory: Its folder, claimed by the chief.
        trace: Whether to draw when each action of a pipeline runs.

    Returns:
        Whether the run is trained to its end; False if it was interrupted, with a checkpoint to resume from.

    Raises:
        ValueError: If run, data and model do not fit together.
        FloatingPointError: If the loss is no longer finite.
        OSError: If data cannot be had or files not be written.
    """
    try:
        return _train(run, directory, trace)
    except tf.errors.OpError as error:
        if full := re.search(r"(\S+); No space left on device", error.message):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), full[1]) from error
        sentence = data.user_message(error, run.data)
        if sentence is not None:
            raise ValueError(sentence) from error
        if lost := strategies.lost_worker(error):
            raise ConnectionError(lost) from error
        raise
    finally:
        if sys.stdout.isatty() and sys.exc_info()[0] is not None:
            print()  # leave the line of the progress bar


def _train(run: config.Run, directory: RunDirectory, trace: bool) -> bool:
    strategy = strategies.from_settings(run.strategy)
    check_trainer(run)  # not before: a module of a user's own may start TensorFlow
    strategy.require_equal({"configuration": config.dump(run), "trainer's code": trainer_source(run.trainer)})
    settings = run.training
    checkpoints = Checkpoints(
        directory.checkpoints, settings.checkpoint_seconds, settings.keep_checkpoints, run=directory.identity
    )
    results = directory.finished(run) if strategy.is_chief else None
    broken = directory.broken() if strategy.is_chief else []
    (ends_here,) = strategy.all_reduce_sum([results is not None])
    if ends_here:
        if results is not None:
            print(summary.already_trained(directory, results))
        return True
    position = checkpoints.position() if strategy.is_chief else None
    batch = run.training.global_batch_size
    if batch < strategy.num_replicas and keys_read.BATCH in keys_read.read_keys(trainer_reads(run)):
        raise ValueError(
            f"training.global_batch_size = {batch} does not reach every one of {strategy.num_replicas} replicas: "
            f"set it to at least {strategy.num_replicas}, or name fewer devices in strategy.devices."
        )
    trainer = make_trainer(run, strategy)
    resume.optimizer_settings(trainer.model)  # refuses one that cannot be saved
    _check_monitor(run.callbacks, trainer)
    if strategy.is_chief:
        resume.check(run, directory, position, trainer.model)
        directory.reopen()
        directory.record(keys_read.dump_read(run, trainer_reads(run), run.trainer))
        header.print_header(run, directory, trainer)
    if strategy.has_schedule:
        batch = trainer.build(trainer.train_data)
        preview = pipeline_report.show_stages(trainer, batch)
        if trace:
            tensorboard = directory.tensorboard if run.callbacks.tensorboard else None
            pipeline_report.draw_trace(trainer, preview, batch, directory.trace, tensorboard)
    if position is not None:
        print(line("", resume.describe(run, directory, position), 0), end="\n\n", flush=True)
    if broken:
        print(line("", summary.written_again(broken), 0), end="\n\n", flush=True)
    with standard_streams.outlived(trainer.interrupt):
        return _fit_and_save(run, directory, trainer, checkpoints)


def _fit_and_save(run: config.Run, directory: RunDirectory, trainer: Any, checkpoints: Checkpoints) -> bool:
    """Train to the end or to an interruption, and write the results; return whether it came to its end."""
    strategy = trainer.strategy
    throughput = callbacks.Throughput()
    metrics_file = callbacks.MetricsFile(directory.metrics)
    table = EpochTable(trainer.validation_data is not None, directory.metrics)
    watch = FolderWatch(directory, checkpoints, metrics_file, trainer.interrupt)
    try:
        with interruptible(trainer):
            trainer.fit(
                trainer.train_data,
                epochs=run.training.epochs,
                verbose=0,
                callbacks=[watch, throughput, metrics_file, *_callbacks(run, directory, throughput), table],
                validation_data=trainer.validation_data,
                validation_freq=run.training.validation_freq,
                steps_per_call=None if run.training.steps_per_call == "auto" else run.training.steps_per_call,
                checkpoints=checkpoints,
                nonfinite_loss=run.training.nonfinite_loss,
            )
    except OSError:
        if strategy.is_chief:
            _require_folder(directory, trainer)  # its loss is the reason
        raise
    if trainer.interrupted:
        strategy.barrier()
        if watch.kept_in is not None:
            raise _gone(directory, "its last checkpoint", watch.kept_in)
        if strategy.is_chief:
            print(f"\nStopped after step {_num_updates(trainer)}; a checkpoint is written.")
        return False
    results = _results(trainer, throughput, metrics_file)
    if strategy.is_chief:
        _require_folder(directory, trainer)
        trainer.save(directory.model)
        directory.finish(results)
        print(f"\n{summary.summary(directory, results)}")
        if hasattr(trainer, "report"):
            print(f"\n{trainer.report(results)}")
    strategy.barrier()  # a worker that leaves before the chief has written its files counts as lost
    return True


def _require_folder(directory: RunDirectory, trainer: Trainer) -> None:
    """Refuse to end a run in a folder that is gone; save the model where it can be.

    Raises:
        FileNotFoundError: If it is gone; it says where the model is.
    """
    if not directory.is_there():
        kept_in = directory.rescue()
        trainer.save(kept_in / directory.model.name)
        raise _gone(directory, "the model", kept_in)


def _gone(directory: RunDirectory, what: str, kept_in: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{directory.path} was removed or renamed while this run trained in it, so the run has stopped, and {what} is "
        f"in {kept_in}. Resume with --directory {kept_in}."
    )


def audit(run: config.Run, num_workers: int) -> bool:
    """Print how many training examples each worker of a job would read in an epoch, and what goes wrong.

    Args:
        run: The resolved run.
        num_workers: How many workers.

    Returns:
        Whether together they read what one worker alone reads.
    """
    trainer = make_trainer(run, strategies.SingleDevice())
    found = data.audit(trainer.train_data, num_workers)
    print(f"division  {getattr(trainer, 'division', header.BY_BATCH)}\n\n{found}")
    return found.ok


def _callbacks(
    run: config.Run, directory: RunDirectory, throughput: callbacks.Throughput
) -> list[keras.callbacks.Callback]:
    wanted: list[keras.callbacks.Callback] = []
    settings, optimizer = run.callbacks, run.optimizer
    if settings.tensorboard:
        wanted.append(keras.callbacks.TensorBoard(str(directory.tensorboard), write_graph=False))
        wanted.append(StepSummaries(directory.tensorboard / "steps", throughput))
    if optimizer.warmup_steps or optimizer.base_batch_size:
        wanted.append(
            callbacks.LearningRateWarmup(
                optimizer.warmup_steps, run.training.global_batch_size, optimizer.base_batch_size
            )
        )
    if settings.early_stopping_patience is not None:
        wanted.append(
            keras.callbacks.EarlyStopping(
                settings.monitor, patience=settings.early_stopping_patience, restore_best_weights=True
            )
        )
    if settings.reduce_learning_rate_patience is not None:
        wanted.append(
            keras.callbacks.ReduceLROnPlateau(settings.monitor, patience=settings.reduce_learning_rate_patience)
        )
    if settings.check_replicas_every_steps is not None:
        wanted.append(callbacks.ReplicaCheck(settings.check_replicas_every_steps))
    return wanted


def _check_monitor(settings: config.Callbacks, trainer: Any) -> None:
    """Refuse to watch a metric that the model does not have; Keras would notice after the first epoch."""
    metrics = trainer.model.get_compile_config().get("metrics") or []
    watches = settings.early_stopping_patience is not None or settings.reduce_learning_rate_patience is not None
    if not watches or not all(isinstance(metric, str | dict) for metric in metrics) or isinstance(metrics, dict):
        return  # several outputs have names of their own
    names = ["loss", *(metric if isinstance(metric, str) else metric["config"]["name"] for metric in metrics)]
    if settings.monitor.startswith("val_") and trainer.validation_data is None:
        raise ValueError(
            f'callbacks.monitor = "{settings.monitor}" is not measured, as there are no validation data: monitor '
            f'"{settings.monitor.removeprefix("val_")}", or validate.'
        )
    if settings.monitor.removeprefix("val_") not in names:
        raise ValueError(
            f'callbacks.monitor = "{settings.monitor}" is no metric of this model. There are: '
            f"{', '.join(f'{name}, val_{name}' for name in names)}."
        )


def _num_updates(trainer: Trainer) -> int:
    return int(trainer.model.optimizer.iterations.numpy())


def _results(trainer: Any, throughput: callbacks.Throughput, metrics_file: callbacks.MetricsFile) -> dict[str, float]:
    """Return the metrics of the model as it is saved: the last epoch's are of other weights after an early stop."""
    logs = {}
    if trainer.validation_data is not None:  # on all workers
        logs = trainer.evaluate(trainer.validation_data, verbose=0, return_dict=True)
    if not trainer.strategy.is_chief:
        return {}
    last = dict(metrics_file.entries[-1])
    speed = {name: last.pop(name) for name in callbacks.FIGURES if name in last}
    results = {"epochs": last.pop("epoch"), "steps": _num_updates(trainer)}
    results |= {name: value for name, value in last.items() if name != "step" and not name.startswith("val_")}
    results |= {f"val_{name}": value for name, value in logs.items()}
    return results | speed | throughput.summary
