"""Import, check and construct the trainer class of a run.

A trainer class may declare two things, which are checked before data are read and workers connect:

    class Perceptron(tfpar.Trainer):
        reads = ("seed", "data", "training.global_batch_size")  # settings it reads, besides those of the train command

        class Options(pydantic.BaseModel):                      # the schema of [options]
            hidden: int = 32

        def __init__(self, run, strategy):
            options = run.options_as(self.Options)
            ...

A run that sets a key which the class does not read is refused. Without `Options`, the class may add "options" to
`reads` and use the dictionary `run.options`.
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
    """Construct the trainer of a run.

    Args:
        run: The run.
        strategy: The strategy to train with.

    Raises:
        ValueError: If the class is refused by `check_trainer`, its instance lacks an attribute, its data are invalid,
            or its model is not compiled.
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
    """Import the trainer class of a run, and check that it reads all settings of the run.

    Args:
        run: The run.

    Returns:
        The class.

    Raises:
        ValueError: If there is no such class, its `reads` or `Options` is invalid, or the run has an unread setting.
    """
    imported = trainer_class(run.trainer)
    problems = settings_read.unread_problems(run, trainer_reads(run), run.trainer)
    if problems:
        raise ValueError("\n".join(problems))
    if (options := _options(imported)) is not None:
        run.options_as(options)
    return imported


def trainer_reads(run: config.Run) -> Collection[str]:
    """Return the sections and keys that the trainer class of a run reads, with "options" if it declares `Options`.

    Args:
        run: The run.

    Raises:
        ValueError: If `reads` is not a tuple of names.
    """
    imported = trainer_class(run.trainer)
    keys = getattr(imported, "reads", ())
    if isinstance(keys, str) or not isinstance(keys, Collection) or not all(isinstance(key, str) for key in keys):
        raise ValueError(
            f"The `reads` of {run.trainer} must be a tuple of names of sections or keys, received {quoted(keys)}: "
            'write reads = ("data", "training.precision").'
        )
    return (*keys, "options") if _options(imported) is not None else tuple(keys)


def trainer_options(run: config.Run) -> dict[str, Any]:
    """Return the options of a run, with the defaults that the trainer class declares.

    Args:
        run: The run.

    Raises:
        ValueError: If the class or an option is invalid.
    """
    schema = _options(trainer_class(run.trainer))
    return dict(run.options) if schema is None else run.options_as(schema).model_dump()


def _options(imported: Any) -> type[pydantic.BaseModel] | None:
    options = getattr(imported, "Options", None)
    if options is not None and not (isinstance(options, type) and issubclass(options, pydantic.BaseModel)):
        raise ValueError(
            f"The `Options` of {imported.__module__}.{imported.__name__} must be a subclass of pydantic.BaseModel, "
            f'received {options!r:.60}: derive it from that, or leave it out and name "options" in `reads`.'
        )
    return options


def trainer_class(path: str) -> Any:
    """Import a trainer class.

    Args:
        path: The import path, such as `tfpar.trainers.regression.Regression`.

    Raises:
        ValueError: If there is no trainer class at that path.
    """
    module_name, _, name = path.rpartition(".")
    # An installed command does not have the current folder on its path, but users' modules are there.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(_no_class(path, str(error), _way_to_module(module_name, error.name or ""))) from error
    imported = getattr(module, name, None)
    if imported is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Trainer)]
        way_out = did_you_mean(name, classes).strip() or _EXAMPLE
        raise ValueError(_no_class(path, f"module {quoted(module_name)} has no {quoted(name)}", way_out))
    if not (isinstance(imported, type) and issubclass(imported, Trainer) and imported is not Trainer):
        raise ValueError(f"trainer must name a subclass of tfpar.Trainer, and {quoted(path)} is not. {_EXAMPLE}")
    return imported


def _way_to_module(module: str, missing: str) -> str:
    """Return what to do about a missing module, or a missing import of it."""
    if f"{module}.".startswith(f"{missing}."):
        return (
            f"Modules are sought in the current folder, {received.path(os.getcwd(), COLUMNS)}, and on PYTHONPATH, not "
            f"beside the configuration. {_EXAMPLE}"
        )
    return f"{quoted(module)} imports it, or a module that it imports does: install it, or correct the import."


def _no_class(path: str, reason: str, way_out: str) -> str:
    return f"trainer must be the import path of a class, received {quoted(path)}: {excerpt(reason)}. {way_out}"


def trainer_source(path: str) -> str:
    """Return the source of a trainer class's module, or an empty text if it cannot be read.

    The workers of a job compare it, because workers with different code would silently train something else.

    Args:
        path: The import path of the class.
    """
    with contextlib.suppress(ImportError, OSError, TypeError, ValueError):
        return inspect.getsource(inspect.getmodule(trainer_class(path)) or sys)
    return ""
