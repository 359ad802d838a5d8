"""A shorter import of Keras and TensorFlow: no garbage collection meanwhile, and rare modules at their first use.

Keras 3.15 imports both packages where they are installed, for `keras.visualization` and `keras.wrappers`
(`keras/src/visualization/plot_image_gallery.py`, `keras/src/wrappers/fixes.py`), and tfpar needs both: for pictures of
schedules and for the digits. That is about a quarter of the time that every process takes to start.

An import creates objects that stay, half a million for TensorFlow 2.21. Python 3.11 looks through them for garbage 815
times during the import, 0.5 of the 3.1 seconds of processor time that `import tensorflow` takes, and several times at
the end of the process, which takes another second. So they are created without garbage collections and excluded from
later ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from tfpar._compat import keras_backend

LATE = ("keras.src.visualization", "keras.visualization", "keras.wrappers")
LARGE = ("keras", "tensorflow")
# With fewer, the objects of a process are modules. More may be a user's data, whose garbage must be found.
FEW_OBJECTS = 200_000


def install() -> None:
    """Prepare the imports of Keras and TensorFlow, unless Keras is imported already.

    The modules of `LATE` load when an attribute of theirs is first read; those of `LARGE` without garbage collection.

    Raises:
        ImportError: If Keras is imported already, with another backend than TensorFlow's; later the import itself.
    """
    keras_backend.require_tensorflow()
    if "keras" not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path[:0] = [_finder, _large]


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function right after the import of a module of `LARGE`, now if it is imported already.

    Args:
        name: Of the module.
        function: Takes nothing.
    """
    if name in sys.modules:
        function()
    else:
        _after.setdefault(name, []).append(function)


class _Late(importlib.abc.MetaPathFinder):
    """Finds the modules, and lets their loaders wait."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in LATE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module
            loader.exec_module = lambda module: _wait(module, execute)
        return spec


class _Large(importlib.abc.MetaPathFinder):
    """Finds the modules of `LARGE` as the other finders do, and keeps their objects out of garbage collections."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in LARGE:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                try:
                    with out_of_collections():
                        execute(module)
                finally:
                    keras_backend.require_tensorflow()
                for function in _after.pop(name, ()):
                    function()

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def out_of_collections() -> Iterator[None]:
    """Collect no garbage inside this context, and never look through the objects that it creates.

    The objects that were there before are excluded too, if they are few.
    """
    were_few, was_enabled = len(gc.get_objects()) < FEW_OBJECTS, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_few:
            gc.freeze()
        elif gc.get_freeze_count() == 0:  # no objects are frozen that must stay frozen
            # Moves all objects into the oldest generation. Otherwise the next collections would look through them.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _wait(module: Any, execute: Any) -> None:
    """Give a module the functions that load it (PEP 562)."""
    lock = threading.RLock()
    executed: list[bool] = []

    def load() -> dict[str, Any]:
        with lock:
            if not executed:
                executed.append(True)  # the module may import parts of itself
                try:
                    execute(module)
                except BaseException:
                    executed.clear()
                    raise
        names: dict[str, Any] = vars(module)
        return names

    def get(name: str) -> Any:
        # Python and TensorFlow ask every module for names such as `__wrapped__`.
        if name == "__all__" or not name.startswith("__"):
            found = load()
            if name in found:
                return found[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = get
    module.__dir__ = lambda: sorted(load())


_after: dict[str, list[Callable[[], None]]] = {}
_finder = _Late()
_large = _Large()
