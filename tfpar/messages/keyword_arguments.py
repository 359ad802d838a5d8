"""Suggestions for unknown keyword arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from tfpar.messages.suggestions import did_you_mean

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def named(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that suggests an argument for a mistyped one.

    Python's own message names the mistyped one only. The signature, for `help` and for editors, is unchanged.

    Args:
        function: A function or method.

    Raises:
        TypeError: From the returned function, if it is called with an unknown argument.

    Example:
        >>> @named
        ... def fit(epochs=1): ...
        >>> fit(epoch=2)
        Traceback (most recent call last):
        TypeError: fit() has no argument 'epoch'. Did you mean epochs?
    """
    called = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__").rpartition(".<locals>.")[2]

    @functools.wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        check(function, called, kwargs)
        return function(*args, **kwargs)

    return call


def check(function: Callable[..., Any], called: str, names: Iterable[str]) -> None:
    """Refuse an unknown keyword argument with a suggestion.

    Args:
        function: The function or method that takes the arguments.
        called: The name under which the user called it.
        names: The names of the given arguments.

    Raises:
        TypeError: If the function does not take one of them.

    Example:
        >>> check(lambda epochs=1: None, "fit", ["epochs"])
    """
    kinds = inspect.signature(function).parameters
    takes = [name for name, one in kinds.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes = [name for name in takes if name not in ("self", "cls")]
    for name in names:
        if name not in takes:
            near = sorted(takes, key=lambda one: difflib.SequenceMatcher(None, name, one).ratio(), reverse=True)
            way_out = did_you_mean(name, near) or f" It takes {', '.join(takes)}."
            raise TypeError(f"{called}() has no argument {name!r}.{way_out}")
