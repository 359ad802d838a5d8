"""The updates of optimizers in code of the user's own, such as a `train_step`.

Written for Keras 3.15, where `apply_gradients` calls `apply` (keras/src/optimizers/base_optimizer.py), which some
optimizers override.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfpar._compat import versions
from tfpar._compat.variables import keras_variables

Update = Callable[[Any, list[Any], list[Any]], None]


class _OfThread(threading.local):
    applies = False


_of_thread = _OfThread()


def applies() -> bool:
    """Return whether this thread is inside of `applying`."""
    return _of_thread.applies


@contextlib.contextmanager
def applying() -> Iterator[None]:
    """Let optimizers apply gradients as usual in this thread, also inside of `updates_through`."""
    before, _of_thread.applies = _of_thread.applies, True
    try:
        yield
    finally:
        _of_thread.applies = before


@contextlib.contextmanager
def updates_through(update: Update) -> Iterator[None]:
    """Call a function in place of every update of an optimizer inside this context, in all threads.

    Args:
        update: Takes the optimizer, the gradients that the user's code gives it, None for none, and the variables.
    """

    def through(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
            if _of_thread.applies:
                original(optimizer, grads, trainable_variables)
                return
            variables = _known(optimizer) if trainable_variables is None else list(trainable_variables)
            update(optimizer, list(grads), variables)

        return apply

    with contextlib.ExitStack() as stack:
        for kind in [BaseOptimizer, *_subclasses(BaseOptimizer)]:
            if "apply" in vars(kind):
                stack.enter_context(mock.patch.object(kind, "apply", through(vars(kind)["apply"])))
        yield


def _known(optimizer: Any) -> list[Any]:
    return list(versions.private(keras_variables.innermost(optimizer), "_trainable_variables"))


def _subclasses(kind: Any) -> list[Any]:
    children: list[Any] = kind.__subclasses__()
    return children + [each for child in children for each in _subclasses(child)]
