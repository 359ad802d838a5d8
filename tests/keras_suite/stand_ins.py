"""Replacements for objects that Keras' tests need and this project lacks or has in another form."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
from keras.src.backend.tensorflow import trainer as keras_trainer

# Its models are layers mixed in with Keras' trainer, without keras.Model.
TRAINER_TEST = "keras.src.trainers.trainer_test"
# Imported by Keras' tests under every backend, and used under others, or where a test asks for such data.
OPTIONAL = ("grain", "jax", "pandas", "torch")


class MissingPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds empty modules for optional packages that are not installed, while tests are collected."""

    def __init__(self) -> None:
        self._missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
        sys.modules["conftest"] = _conftest()
        sys.meta_path.append(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find what belongs to a missing package."""
        is_missing = name.split(".")[0] in self._missing
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_missing else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Forget the empty modules: Keras asks at run time which packages there are."""
        sys.meta_path.remove(self)
        for name in [name for name in sys.modules if name.split(".")[0] in self._missing]:
            del sys.modules[name]


def _conftest() -> types.ModuleType:
    """What some tests import from the configuration of Keras' repository, which is not in the wheel."""

    def skip_if_backend(backend: str, reason: str) -> Callable[[Any], Any]:
        return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)

    module = types.ModuleType("conftest")
    module.skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    return module


class _TrainerOfModels:
    """Stands for Keras' trainer among the bases of a class, and makes the class a `keras.Model`."""

    def __init__(self, model: keras.Model | None = None) -> None:
        if model is not None:  # TensorFlowTrainer.__init__(model), as the tests call it
            _ORIGINAL.__init__(model)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        layers = tuple(base for base in bases if base not in (self, keras.layers.Layer))
        # The layer's own call and build come first, then those of a model.
        return (type("Model", (*layers, keras.Model), {"layers": _Layers()}),)


class _Layers:
    """The layers of a model, which may also set an attribute of this name, as a mixture may."""

    def __get__(self, model: keras.Model | None, owner: type) -> Any:
        return self if model is None else keras.Model.layers.fget(model)


_ORIGINAL = keras_trainer.TensorFlowTrainer


def import_trainer_test_with_models() -> None:
    """Import the tests of Keras' trainer with models in place of its mixtures."""
    keras_trainer.TensorFlowTrainer = _TrainerOfModels()
    try:
        importlib.import_module(TRAINER_TEST)
    finally:
        keras_trainer.TensorFlowTrainer = _ORIGINAL
