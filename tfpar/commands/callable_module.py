"""Callable modules: `tfpar.doctor` is both a function and, once imported, the module of a command."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def make_callable(name: str, load: Callable[[], Callable[..., Any]]) -> None:
    """Make an imported module callable, as the public function of the same name.

    Args:
        name: The name of the module.
        load: Returns the function. It runs on each call, so that its imports do not slow the command down.

    Example:
        >>> sys.modules["length"] = types.ModuleType("length")
        >>> make_callable("length", lambda: len)
        >>> sys.modules.pop("length")("four")
        4
    """

    class CallableModule(types.ModuleType):
        def __call__(self, *arguments: Any, **settings: Any) -> Any:
            return load()(*arguments, **settings)

    sys.modules[name].__class__ = CallableModule
