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
    """Wrap a function so that its error about an unknown keyword argument suggests the right one.

    Raises:
        TypeError: From the wrapped function, if it is called with an unknown argument.

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
    """Raise an error with a suggestion if a function does not take a keyword argument.

    Args:
        function: The function or method.
        called: The name under which the user called it.
        names: The names of the passed keyword arguments.

    Raises:
        TypeError: If the function does not take one of them.

    Example:
        >>> check(lambda epochs=1: None, "fit", ["epochs"])
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    known = [name for name in known if name not in ("self", "cls")]
    for name in names:
        if name not in known:
            near = sorted(known, key=lambda other: difflib.SequenceMatcher(None, name, other).ratio(), reverse=True)
            way_out = did_you_mean(name, near) or f" It takes {', '.join(known)}."
            raise TypeError(f"{called}() has no argument {name!r}.{way_out}")
