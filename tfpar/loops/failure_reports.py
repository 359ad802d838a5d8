"""Methods of a trainer that report the failure of one worker to all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tfpar.strategies import Strategy

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Trainer(Protocol):
    strategy: Strategy


Self = TypeVar("Self", bound=_Trainer)


def reported(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Return a method that runs in `Strategy.reported`.

    Args:
        method: A method of a trainer that all workers call.
    """

    @functools.wraps(method)
    def call(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.strategy.reported():
            return method(self, *args, **kwargs)

    return call
