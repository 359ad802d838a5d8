"""Recording of the layer and op calls in a run of a model.

In Keras 3.15, `Layer.__call__` and Functional models call `Operation.__call__` (keras/src/ops/operation.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import keras


class LayerCall(NamedTuple):
    """A call of a layer or operation.

    Args:
        operation: The layer or operation.
        path: The names of the enclosing layers, without the model, and its own, such as `"block/attention"`.
        args: The positional arguments.
        kwargs: The keyword arguments.
        outputs: The results.
    """

    operation: keras.Operation
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


class Calls:
    """The calls of layers and operations within `noted`.

    Args:
        model: The running model.
        keeps: Whether to keep the calls, with their tensors.
    """

    def __init__(self, model: keras.Model, keeps: bool = False) -> None:
        self._model, self._keeps = model, keeps
        self._around: list[keras.Operation] = []
        self.ended: list[LayerCall] = []  # in the order of completion
        self.failed = ""  # the path of the innermost call that raised an error

    @property
    def path(self) -> str:
        """The path of the innermost running layer, or the model's name outside all layers."""
        names = [operation.name for operation in self._around if operation is not self._model]
        return "/".join(names) or self._model.name

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Record calls in this context."""
        original = keras.Operation.__call__

        def call(operation: keras.Operation, *args: Any, **kwargs: Any) -> Any:
            self._around.append(operation)
            try:
                outputs = original(operation, *args, **kwargs)
                if self._keeps:
                    self.ended.append(LayerCall(operation, self.path, args, kwargs, outputs))
            except Exception:
                self.failed = self.failed or self.path
                raise
            finally:
                self._around.pop()
            return outputs

        with mock.patch.object(keras.Operation, "__call__", call):
            yield


def is_called_in_training(layer: keras.Layer) -> bool:
    """Return whether a Functional model calls a layer with `training=True`, as recorded in its nodes."""
    return any(node.arguments.kwargs.get("training") for node in layer._inbound_nodes)
