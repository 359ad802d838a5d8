"""Checkpoints: all that a run needs to resume, in files that are written atomically."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfpar.checkpoint.checkpoints import Checkpoints
    from tfpar.checkpoint.metadata import Checkpoint, Position

__all__ = ["Checkpoint", "Checkpoints", "Position"]

# Loaded on first use: the file format needs no Keras.
_MODULES = {"Checkpoint": "metadata", "Checkpoints": "checkpoints", "Position": "metadata"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tfpar.checkpoint' has no attribute {name!r}. It has: {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"tfpar.checkpoint.{_MODULES[name]}"), name)
