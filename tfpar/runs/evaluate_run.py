"""The evaluator of a job: a process besides the workers that evaluates each checkpoint of the chief."""

from __future__ import annotations

import signal
import threading

import tensorflow as tf

from tfpar import config, strategies
from tfpar.checkpoint import Checkpoints, Position
from tfpar.files import json_lines
from tfpar.runs import run_data
from tfpar.runs.directory import RunDirectory
from tfpar.runs.run_trainer import RunTrainer
from tfpar.runs.user_trainer import make_trainer

POLL_SECONDS = 1.0


def evaluate_checkpoints(run: config.Run, directory: RunDirectory) -> bool:
    """Evaluate each new checkpoint of a run on its validation data, until the run ends.

    The evaluator does not communicate with the workers; it reads the chief's checkpoints from the shared folder. It
    writes each evaluation to standard output, `evaluations.jsonl` and TensorBoard.

    Args:
        run: The run.
        directory: The chief's run directory.

    Returns:
        True when the run has ended; False if a signal stopped the evaluator before.

    Raises:
        ValueError: If the run has no validation data, or a checkpoint belongs to another model.
    """
    trainer = make_trainer(run, strategies.SingleDevice())
    if trainer.validation_data is None:
        raise ValueError(
            "An evaluator needs validation data, and data.validation_split is none. Set it, or start no evaluator."
        )
    # Build the model.
    trainer.evaluate(run_data.validation_batches(run, trainer), steps=1, verbose=0)
    print(f"Evaluating each new checkpoint in {directory.checkpoints}.", flush=True)
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _follow(run, directory, trainer, stopped)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(run: config.Run, directory: RunDirectory, trainer: RunTrainer, stopped: threading.Event) -> bool:
    checkpoints, seen = Checkpoints(directory.checkpoints), None
    while not stopped.is_set():
        position = checkpoints.position() if directory.checkpoints.is_dir() else None
        if position is not None and position != seen:
            seen = _evaluate(run, checkpoints, directory, trainer)
        if seen is not None and (seen.stopped or seen.epoch >= run.training.epochs):
            return True
        stopped.wait(POLL_SECONDS)
    return False


def _evaluate(
    run: config.Run, checkpoints: Checkpoints, directory: RunDirectory, trainer: RunTrainer
) -> Position | None:
    blob = checkpoints.read()
    if blob is None:
        return None
    position, _ = checkpoints.load(trainer.model, blob)
    step = int(trainer.model.optimizer.iterations.numpy())
    logs = trainer.evaluate(run_data.validation_batches(run, trainer), verbose=0, return_dict=True)
    figures = {f"val_{name}": float(value) for name, value in logs.items()}
    print(f"step {step}: {', '.join(f'{name} {value:.4f}' for name, value in figures.items())}", flush=True)
    path = directory.path / "evaluations.jsonl"
    json_lines.write(path, [*json_lines.read_or_warn(path), {"epoch": position.epoch, "step": step, **figures}])
    writer = tf.summary.create_file_writer(str(directory.tensorboard / "evaluator"))
    with writer.as_default():
        for name, value in figures.items():
            tf.summary.scalar(name, value, step=step)
    writer.close()
    return position
