"""Methods of a trainer that report the failure of one worker to all workers, and explain that of a device's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import tensorflow as tf

from tfpar.loops import memory_errors
from tfpar.strategies import Strategy

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Trainer(Protocol):
    strategy: Strategy


Self = TypeVar("Self", bound=_Trainer)


def reported(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Return a method that runs in `Strategy.reported`, with one sentence where the memory of a device is too small.

    Args:
        method: A method of a trainer that all workers call.
    """

    @functools.wraps(method)
    def call(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            with self.strategy.reported():
                return method(self, *args, **kwargs)
        except tf.errors.ResourceExhaustedError as error:
            sentence = memory_errors.sentence_of(error)
            if sentence is None:
                raise
            raise type(error)(error.node_def, error.op, sentence) from error

    return call
