"""A run from its configuration to its files: the part of the train command that needs TensorFlow."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import keras
import tensorflow as tf

from tfpar import callbacks, config, data, strategies
from tfpar.checkpoint import Checkpoints, Position
from tfpar.config import settings_read
from tfpar.interruption import interruptible
from tfpar.loops.agreement.deferred_errors import DeferredErrors
from tfpar.messages.number_format import line
from tfpar.reports import events
from tfpar.reports.timelines import PipelineRecord
from tfpar.runs import resume, run_data
from tfpar.runs.callback_settings import callbacks_from_settings, check_monitor, early_stop, restored_epoch
from tfpar.runs.directory import RunDirectory
from tfpar.runs.folder_watch import FolderWatch
from tfpar.runs.planning import chosen_layout
from tfpar.runs.reporting import header, pipeline_report, summary
from tfpar.runs.reporting.epoch_table import EpochTable
from tfpar.runs.reporting.model_flops import ModelFlops
from tfpar.runs.reporting.run_reporter import RunReporter
from tfpar.runs.reporting.step_profile import StepProfile
from tfpar.runs.run_trainer import RunTrainer, final_report, sharding
from tfpar.runs.user_trainer import check_trainer, make_trainer, trainer_reads, trainer_source


def train(run: config.Run, directory: RunDirectory, *, trace: bool = False, profile_steps: int = 0) -> bool:
    """Train a run in its directory, from the latest checkpoint if there is one, and print the results.

    In a job, every worker calls this; only the chief accesses the directory and prints.

    Args:
        run: The resolved run.
        directory: The run directory, claimed by the chief.
        trace: Whether to measure when each action of a pipeline runs.
        profile_steps: Number of steps to record with TensorFlow's profiler.

    Returns:
        True if training is complete; False if it was interrupted, with a checkpoint to resume from.

    Raises:
        ValueError: If the configuration, the data and the model do not fit together.
        FloatingPointError: If the loss is not finite.
        OSError: If data cannot be read, or files cannot be written.
        MemoryError: If a device runs out of memory.
    """
    reporter = RunReporter(run, directory)
    profile = StepProfile(directory.tensorboard, profile_steps) if profile_steps else None
    with reporter.recording_failures():
        return _with_explained_errors(run, directory, trace, reporter, profile)


def _with_explained_errors(
    run: config.Run, directory: RunDirectory, trace: bool, reporter: RunReporter, profile: StepProfile | None
) -> bool:
    """Train a run, and convert TensorFlow's errors into those that `train` raises."""
    try:
        return _train(run, directory, trace, reporter, profile)
    except tf.errors.OpError as error:
        if full := re.search(r"(\S+); No space left on device", error.message):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), full[1]) from error
        sentence = data.user_message(error, run.data)
        if sentence is not None:
            raise ValueError(sentence) from error
        if lost := strategies.lost_worker(error):
            raise lost from error
        if isinstance(error.__cause__, tf.errors.ResourceExhaustedError):  # the trainer has explained it
            raise MemoryError(error.message) from error
        raise
    finally:
        if sys.stdout.isatty() and sys.exc_info()[0] is not None:
            print()  # end the line of the progress bar


def _train(
    run: config.Run, directory: RunDirectory, trace: bool, reporter: RunReporter, profile: StepProfile | None
) -> bool:
    choice = chosen_layout.choose(run, directory)
    strategy = strategies.from_settings(choice.run.strategy)
    if trace and strategy.engine.scheduled is None:
        raise ValueError(
            f"--trace times the actions of a pipeline, received {strategy.describe()}: record its steps with "
            "--profile 5, or leave it out."
        )
    strategy.job.user_message = functools.partial(data.user_message, settings=run.data)
    check_trainer(run)  # only now, because a user's module may start TensorFlow
    strategy.job.require_equal({"configuration": config.dump(run), "trainer's code": trainer_source(run.trainer)})
    if _is_finished(run, directory, strategy):
        return True
    checkpoints = Checkpoints(
        directory.checkpoints,
        run.training.checkpoint_seconds,
        run.training.keep_checkpoints,
        run=directory.identity,
    )
    broken = directory.broken() if strategy.is_chief else []
    position = checkpoints.position() if strategy.is_chief else None
    _check_batch_size(choice.run, strategy)
    with strategy.job.vote(f"The constructor of {run.trainer}"):
        trainer = make_trainer(choice.run, strategy)
    _check_model(run, trainer)
    if strategy.is_chief:
        _record(run, directory, trainer, position, choice.note)
    pipeline = _show_schedule(run, directory, trainer, trace) if strategy.engine.scheduled else {}
    if strategy.is_chief:
        _print_repetition(run, directory, position, broken)
        reporter.begin(trainer, "" if position is None else resume.describe(run, directory, position), pipeline)
    return _fit_and_save(run, directory, trainer, checkpoints, reporter, profile)


def _is_finished(run: config.Run, directory: RunDirectory, strategy: strategies.Strategy) -> bool:
    """Return, on every worker, whether the run directory holds the finished run."""
    results = directory.finished(run) if strategy.is_chief else None
    (is_finished,) = strategy.job.sum([results is not None])
    if results is not None:
        print(summary.already_trained(directory, results))
    return bool(is_finished)


def _check_batch_size(run: config.Run, strategy: strategies.Strategy) -> None:
    batch, (number, part) = run.training.global_batch_size, strategy.engine.batch_parts
    if batch >= number or settings_read.BATCH not in settings_read.read_keys(trainer_reads(run)):
        return
    if part == "replica":
        parts, way_out = "replicas", "name fewer devices in strategy.devices"
    else:
        parts, way_out = f"micro-batches of all {strategy.num_workers} workers", "use fewer micro-batches"
    raise ValueError(
        f"training.global_batch_size = {batch} is less than the number of {parts}, {number}: set it to at least "
        f"{number}, or {way_out}."
    )


def _check_model(run: config.Run, trainer: RunTrainer) -> None:
    resume.optimizer_settings(trainer.model)  # refuses an optimizer that cannot be saved
    check_monitor(run.callbacks, trainer)


def _record(
    run: config.Run, directory: RunDirectory, trainer: RunTrainer, position: Position | None, note: str
) -> None:
    """Record the configuration and print the header, if the run may start or resume."""
    resume.check(run, directory, position, trainer.model)
    directory.reopen()
    directory.record(settings_read.dump_read(run, trainer_reads(run), run.trainer))
    header.print_header(run, directory, trainer, note)


def _show_schedule(
    run: config.Run, directory: RunDirectory, trainer: RunTrainer, trace: bool
) -> dict[str, str | PipelineRecord]:
    """Print the stages, draw the trace if requested, and return both for the report."""
    batch = trainer.build(run_data.training_batches(run, trainer))
    preview = pipeline_report.measured_stages(trainer, batch)
    record = pipeline_report.predicted(preview)
    if trace:
        tensorboard = directory.tensorboard if run.callbacks.tensorboard else None
        record = pipeline_report.draw_trace(trainer, preview, batch, directory.trace, tensorboard) or record
    return {"table": str(preview), "record": record}


def _print_repetition(
    run: config.Run, directory: RunDirectory, position: Position | None, broken: Sequence[str]
) -> None:
    """Print from where the run resumes, and which files it writes again."""
    if position is not None:
        print(line("", resume.describe(run, directory, position), 0), end="\n\n", flush=True)
    if broken:
        print(line("", summary.written_again(broken), 0), end="\n\n", flush=True)


def _fit_and_save(
    run: config.Run,
    directory: RunDirectory,
    trainer: RunTrainer,
    checkpoints: Checkpoints,
    reporter: RunReporter,
    profile: StepProfile | None,
) -> bool:
    """Train and write the results; return False if training was interrupted."""
    throughput, metrics_file = callbacks.Throughput(), callbacks.MetricsFile(directory.metrics)
    watch = FolderWatch(directory, checkpoints, metrics_file, trainer.interrupt)
    table = EpochTable(trainer.validation_data is not None, directory.metrics)
    tensorboard = directory.tensorboard / "flops" if run.callbacks.tensorboard else None
    flops = ModelFlops(trainer.strategy, throughput, run.training.global_batch_size, tensorboard)
    configured = [*callbacks_from_settings(run, directory, throughput), *([] if profile is None else [profile])]
    try:
        _fit(
            run,
            trainer,
            checkpoints,
            [watch, throughput, flops, reporter.clock(throughput), metrics_file, *configured, table],
        )
    except OSError:
        # The missing folder is the likely cause. A chief without all of the state cannot save any more, because the
        # other workers have stopped.
        if trainer.strategy.is_chief and not trainer.strategy.engine.divides_state:
            _require_folder(directory, trainer)
        raise
    if trainer.interrupted:
        trainer.strategy.job.barrier()
        _print_interruption(directory, trainer, watch.kept_in)
        reporter.end(events.INTERRUPTED)
        return False
    results = _results(run, trainer, throughput, metrics_file, restored_epoch(configured))
    results |= flops.figures(results)
    if trainer.strategy.is_chief and (stop := early_stop(configured)):
        print(f"\n{line('', stop, 0)}")
        reporter.note_early_stop(stop)
    with trainer.strategy.engine.whole_state(trainer.model):
        if trainer.strategy.is_chief:
            _save(directory, trainer, results, reporter, profile)
    trainer.strategy.job.barrier()  # a worker that exits before the chief has written its files counts as lost
    _print_report(run, directory, trainer, results)
    return True


def _fit(
    run: config.Run, trainer: RunTrainer, checkpoints: Checkpoints, all_callbacks: Sequence[keras.callbacks.Callback]
) -> None:
    settings = run.training
    with interruptible(trainer):
        trainer.fit(
            run_data.training_batches(run, trainer),
            epochs=settings.epochs,
            verbose=0,
            callbacks=all_callbacks,
            validation_data=run_data.validation_batches(run, trainer),
            validation_freq=settings.validation_freq,
            steps_per_call=None if settings.steps_per_call == "auto" else settings.steps_per_call,
            checkpoints=checkpoints,
            nonfinite_loss=settings.nonfinite_loss,
        )


def _print_interruption(directory: RunDirectory, trainer: RunTrainer, kept_in: Path | None) -> None:
    if kept_in is not None:
        raise _gone(directory, "its last checkpoint", kept_in)
    if trainer.strategy.is_chief:
        print(f"\nStopped after step {_num_updates(trainer)}; a checkpoint is written.")


def _save(
    directory: RunDirectory,
    trainer: RunTrainer,
    results: dict[str, float],
    reporter: RunReporter,
    profile: StepProfile | None,
) -> None:
    """Write the model and the results, and print a summary."""
    _require_folder(directory, trainer)
    trainer.save(directory.model)
    directory.finish(results)
    reporter.end(events.TRAINED)
    print(f"\n{summary.summary(directory, results)}")
    if profile is not None:
        print(profile.describe())


def _print_report(run: config.Run, directory: RunDirectory, trainer: RunTrainer, results: dict[str, float]) -> None:
    """Call the trainer's own report on all workers, since it may call `predict`, and print it on the chief."""
    strategy = trainer.strategy
    shared = json.loads(strategy.job.broadcast(json.dumps(results).encode() if strategy.is_chief else None))
    errors, report = DeferredErrors(strategy.job), None
    try:
        with errors.deferring(f"The method report of {run.trainer}"):
            report = final_report(trainer, shared)
        errors.vote()
    except Exception as error:
        error.add_note(f"The run is trained and saved in {directory.path}; its trainer's method `report` failed.")
        raise
    if report is not None and strategy.is_chief:
        print(f"\n{report}")


def _require_folder(directory: RunDirectory, trainer: RunTrainer) -> None:
    """Check that the folder still exists; if not, save the model elsewhere.

    Raises:
        FileNotFoundError: If the folder is gone, with the place of the model.
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
    """Print how many training examples each worker of a job would read in an epoch, and any mistakes.

    Args:
        run: The run.
        num_workers: Number of workers.

    Returns:
        Whether the workers together read exactly the examples that a single worker reads.
    """
    trainer = make_trainer(run, strategies.SingleDevice())
    batches = data.as_dataset(run_data.training_batches(run, trainer))
    result = data.audit(batches if isinstance(batches, data.Sharded) else data.global_batches(batches), num_workers)
    print(line("sharding", sharding(trainer)), result, sep="\n\n")
    return result.ok


def _num_updates(trainer: RunTrainer) -> int:
    return int(trainer.model.optimizer.iterations.numpy())


def _results(
    run: config.Run,
    trainer: RunTrainer,
    throughput: callbacks.Throughput,
    metrics_file: callbacks.MetricsFile,
    restored: int | None,
) -> dict[str, float]:
    """Return the metrics of the saved model: those of the epoch whose weights were restored, if any."""
    logs = {}
    if trainer.validation_data is not None:  # on all workers
        logs = trainer.evaluate(run_data.validation_batches(run, trainer), verbose=0, return_dict=True)
    if not trainer.strategy.is_chief:
        return {}
    last = metrics_file.entries[-1]
    results = {"epochs": last["epoch"], "steps": _num_updates(trainer)}
    saved = next((entry for entry in metrics_file.entries if entry["epoch"] == restored), last)
    if saved is not last:
        results["weights_of_epoch"] = saved["epoch"]
    others = ("epoch", "step", *callbacks.FIGURES)
    results |= {name: value for name, value in saved.items() if name not in others and not name.startswith("val_")}
    results |= {f"val_{name}": value for name, value in logs.items()}
    return results | {name: last[name] for name in callbacks.FIGURES if name in last} | throughput.summary
