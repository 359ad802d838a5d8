"""The trainer class that a run names by import path."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from typing import Any

from tfpar.trainer import Trainer


def trainer_class(path: str) -> Any:
    """Import the class of trainers that a run names.

    Args:
        path: Its import path, such as `trainers.regression.Regression`.

    Raises:
        ValueError: If there is none under that path.
    """
    module_name, _, name = path.rpartition(".")
    # The command may run from any folder; a trainer class of the user's own lies in the current one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(
            f"trainer must be the import path of a class, received {path!r}: {error}. "
            "trainers.image_classification.ImageClassification is one."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Trainer) and found is not Trainer):
        raise ValueError(
            f"trainer must name a subclass of tfpar.Trainer, and {path!r} is none. "
            "trainers.image_classification.ImageClassification is one."
        )
    return found


def trainer_source(path: str) -> str:
    """Return the source of the module that holds a trainer class; empty where there is none to read.

    The workers of a job compare it: one that trains other code would not fail, it would train something else.

    Args:
        path: The import path of the class.
    """
    with contextlib.suppress(ImportError, OSError, TypeError, ValueError):
        return inspect.getsource(inspect.getmodule(trainer_class(path)) or sys)
    return ""
