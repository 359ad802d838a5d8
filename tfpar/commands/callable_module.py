"""Modules that are functions too: `tfpar.doctor` is the command's module once anyone has imported it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any


def make_callable(name: str, load: Callable[[], Callable[..., Any]]) -> None:
    """Let a module be called as the function for users of the same name.

    Args:
        name: The name of the module, which is imported.
        load: Returns the function; called at each call, so that it may import what the command does not need.

    Example:
        >>> sys.modules["numbers_of"] = types.ModuleType("numbers_of")
        >>> make_callable("numbers_of", lambda: len)
        >>> sys.modules.pop("numbers_of")("four")
        4
    """

    class CallableModule(types.ModuleType):
        def __call__(self, *arguments: Any, **settings: Any) -> Any:
            return load()(*arguments, **settings)

    sys.modules[name].__class__ = CallableModule
