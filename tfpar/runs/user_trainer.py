"""The trainer class that a run names: imported, checked against the run, and made.

A trainer class may say two things of itself, both checked before data are read and before workers meet:

    class Perceptron(tfpar.Trainer):
        reads = ("seed", "data", "training.global_batch_size")  # of the run; the train command reads its own keys

        class Options(pydantic.BaseModel):                      # what [options] may hold
            hidden: int = 32

        def __init__(self, run, strategy):
            options = run.options_as(self.Options)
            ...

A key that the class does not read is refused where a run sets it. Options without a model are free: then `reads` names
"options", and `run.options` is a dictionary.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Collection
from typing import Any

import pydantic

from tfpar import config
from tfpar.config import settings_read
from tfpar.engines import model_checks
from tfpar.messages import received
from tfpar.messages.received import COLUMNS, excerpt, quoted
from tfpar.messages.suggestions import did_you_mean
from tfpar.runs import run_data
from tfpar.runs.run_trainer import RunTrainer
from tfpar.strategies import Strategy
from tfpar.trainer import Trainer

_EXAMPLE = "tfpar.trainers.image_classification.ImageClassification is one."


def make_trainer(run: config.Run, strategy: Strategy) -> RunTrainer:
    """Make the trainer of a run.

    Args:
        run: The run.
        strategy: Where and how a step runs.

    Returns:
        An object of the run's trainer class.

    Raises:
        ValueError: As `check_trainer`, as the class itself, where the trainer lacks one of these or has data that
            cannot be trained on, or where its model is not compiled.
    """
    trainer: RunTrainer = check_trainer(run)(run, strategy)
    if not hasattr(trainer, "model"):
        raise ValueError(
            f"The constructor of {run.trainer} must call that of tfpar.Trainer, and does not: end it with "
            "super().__init__(build_model, strategy, run.seed)."
        )
    for name in ("train_data", "validation_data", "num_train_examples"):
        if not hasattr(trainer, name):
            raise ValueError(
                f"trainer must have train_data, validation_data and num_train_examples, and {quoted(run.trainer)} "
                f"lacks {name}: set it in __init__, None where there is none."
            )
    run_data.check(run, trainer)
    model_checks.check_compiled(trainer.model, "fit")
    return trainer


def check_trainer(run: config.Run) -> Any:
    """Import the trainer class of a run, and refuse settings of the run that the class does not read.

    Args:
        run: The run.

    Returns:
        The class.

    Raises:
        ValueError: If there is no such class, its `reads` or `Options` is wrong, or the run has an unread setting.
    """
    found = trainer_class(run.trainer)
    problems = settings_read.unread_problems(run, trainer_reads(run), run.trainer)
    if problems:
        raise ValueError("\n".join(problems))
    if (options := _options(found)) is not None:
        run.options_as(options)
    return found


def trainer_reads(run: config.Run) -> Collection[str]:
    """Return the sections and keys that the trainer class of a run reads, with "options" where it has a model of them.

    Args:
        run: The run.

    Raises:
        ValueError: If the class says it in another way than as a tuple of names.
    """
    found = trainer_class(run.trainer)
    named = getattr(found, "reads", ())
    if isinstance(named, str) or not isinstance(named, Collection) or not all(isinstance(key, str) for key in named):
        raise ValueError(
            f"The `reads` of {run.trainer} must be a tuple of names of sections or keys, received {quoted(named)}: "
            'write reads = ("data", "training.precision").'
        )
    return (*named, "options") if _options(found) is not None else tuple(named)


def trainer_options(run: config.Run) -> dict[str, Any]:
    """Return the options of a run, with the defaults of the trainer class's model where it has one.

    Args:
        run: The run.

    Raises:
        ValueError: As `check_trainer`.
    """
    model = _options(trainer_class(run.trainer))
    return dict(run.options) if model is None else run.options_as(model).model_dump()


def _options(found: Any) -> type[pydantic.BaseModel] | None:
    options = getattr(found, "Options", None)
    if options is not None and not (isinstance(options, type) and issubclass(options, pydantic.BaseModel)):
        raise ValueError(
            f"The `Options` of {found.__module__}.{found.__name__} must be a subclass of pydantic.BaseModel, received "
            f'{options!r:.60}: derive it from that, or leave it out and name "options" in `reads`.'
        )
    return options


def trainer_class(path: str) -> Any:
    """Import the class of trainers that a run names.

    Args:
        path: Its import path, such as `tfpar.trainers.regression.Regression`.

    Raises:
        ValueError: If there is none under that path.
    """
    module_name, _, name = path.rpartition(".")
    # The command may run from any folder; a user's trainer class is in the current one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(_no_class(path, str(error), _way_to_module(module_name, error.name or ""))) from error
    found = getattr(module, name, None)
    if found is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Trainer)]
        way_out = did_you_mean(name, classes).strip() or _EXAMPLE
        raise ValueError(_no_class(path, f"module {quoted(module_name)} has no {quoted(name)}", way_out))
    if not (isinstance(found, type) and issubclass(found, Trainer) and found is not Trainer):
        raise ValueError(f"trainer must name a subclass of tfpar.Trainer, and {quoted(path)} is not. {_EXAMPLE}")
    return found


def _way_to_module(module: str, missing: str) -> str:
    """Return the way out where a module, or one that it imports, is missing."""
    if f"{module}.".startswith(f"{missing}."):
        return (
            f"Modules are sought in the current folder, {received.path(os.getcwd(), COLUMNS)}, and on PYTHONPATH, not "
            f"beside the configuration. {_EXAMPLE}"
        )
    return f"{quoted(module)} imports it, or a module that it imports does: install it, or correct the import."


def _no_class(path: str, reason: str, way_out: str) -> str:
    return f"trainer must be the import path of a class, received {quoted(path)}: {excerpt(reason)}. {way_out}"


def trainer_source(path: str) -> str:
    """Return the source of the module that holds a trainer class; empty where there is none to read.

    The workers of a job compare it: one that trains other code would not fail, it would train something else.

    Args:
        path: The import path of the class.
    """
    with contextlib.suppress(ImportError, OSError, TypeError, ValueError):
        return inspect.getsource(inspect.getmodule(trainer_class(path)) or sys)
    return ""
