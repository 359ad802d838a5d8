"""Resuming a run with changed settings, such as more epochs."""

from __future__ import annotations

import json
from typing import Any

import keras

from tfpar import config
from tfpar.checkpoint import Position
from tfpar.config import toml
from tfpar.files import atomic_file, json_file
from tfpar.loops.resuming.resumption import place
from tfpar.reduction import objective
from tfpar.runs.directory import RunDirectory

EPOCHS = "training.epochs"


def check(run: config.Run, directory: RunDirectory, position: Position | None, model: keras.Model) -> None:
    """Refuse a number of epochs with which the resumed run would differ from an uninterrupted one.

    Args:
        run: The run as configured now.
        directory: The claimed run directory.
        position: The position of the latest checkpoint, if any.
        model: The model before the checkpoint is loaded.

    Raises:
        ValueError: If more epochs are trained already, or the optimizer depends on the number of epochs.
    """
    built = optimizer_settings(model)
    if directory.resumed is None or position is None:
        atomic_file.write(directory.optimizer, built)
        return
    old, new = directory.resumed.training.epochs, run.training.epochs
    recorded = json_file.read_text(directory.optimizer)
    if old == new:
        if recorded is None:
            atomic_file.write(directory.optimizer, built)
        return
    if (num_begun := position.epoch + bool(position.step)) > new:
        raise ValueError(
            f"{EPOCHS} = {new} is less than the epochs already trained in {directory.path}: {place(position)}. Set it "
            f"to at least {num_begun}, or choose another --directory."
        )
    if recorded is None:
        raise ValueError(
            f"{directory.optimizer} is missing or damaged, and {EPOCHS} is {old} in {directory.path} and {new} now: "
            f"repeat the command with {old} first, which writes it again."
        )
    if recorded != built:
        raise ValueError(
            f"{EPOCHS} is {old} in {directory.path} and {new} now, and the optimizer depends on it, for example in a "
            f"learning-rate schedule, so that the trained steps would differ in a run of {new} epochs. Leave it at "
            f"{old}, or choose another --directory."
        )


def describe(run: config.Run, directory: RunDirectory, position: Position) -> str:
    """Describe in a sentence from where a run resumes, and its changed settings.

    Args:
        run: The run as configured now.
        directory: The claimed run directory.
        position: The position of the latest checkpoint.
    """
    where = f"Resuming after {place(position)}"
    changed = [] if directory.resumed is None else config.changes(directory.resumed, run)
    if changed:
        where += ", with " + ", ".join(f"{key} = {_shown(new)} instead of {_shown(old)}" for key, old, new in changed)
    if position.stopped:
        where += "; a callback has ended the training there, so more epochs change nothing"
    return f"{where}."


def _shown(value: Any) -> str:
    return config.NOT_SET if value == config.NOT_SET else toml.show(value)


def optimizer_settings(model: keras.Model) -> str:
    """Return the configurations of a model's optimizers, including their learning-rate schedules, as JSON.

    Raises:
        ValueError: If an optimizer has no configuration, so that the trained model could not be saved.
    """
    by_objective = [objective.optimizer_of(model, target) for target in objective.objectives_of(model)]
    optimizers = dict.fromkeys(by_objective or [model.optimizer])
    try:
        settings = [optimizer.get_config() for optimizer in optimizers]
    except NotImplementedError as error:
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"The optimizer and its learning-rate schedule must have a configuration to be saved with the model, "
            f"received {names} without one{f' ({error})' if str(error) else ''}; implement get_config() to return the "
            "constructor's arguments as a dictionary."
        ) from error
    return json.dumps([_without_names(table) for table in settings], indent=2, sort_keys=True, default=str) + "\n"


def _without_names(settings: Any) -> Any:
    """Remove the automatic names of Keras objects, which differ between processes."""
    if isinstance(settings, dict):
        return {key: _without_names(value) for key, value in settings.items() if key != "name"}
    return settings
