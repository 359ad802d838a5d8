"""Faster imports of Keras and TensorFlow: without garbage collection, and with rare modules loaded on first use.

Keras 3.15 imports Matplotlib and scikit-learn, if installed, for `keras.visualization` and `keras.wrappers`
(`keras/src/visualization/plot_image_gallery.py`, `keras/src/wrappers/fixes.py`). tfpar depends on both, and importing
them takes about a quarter of the startup time of a process.

Importing TensorFlow 2.21 creates half a million permanent objects. Python 3.11 scans them for garbage 815 times, which
takes 0.5 of 3.1 CPU seconds, and again at exit, which takes another second. So garbage collection is disabled during
the import, and the objects are excluded from later collections.
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

LATE = ("keras.src.visualization", "keras.visualization", "keras.wrappers")
LARGE = ("keras", "tensorflow")
# Fewer objects are just modules. More may be user data, which must stay subject to garbage collection.
FEW_OBJECTS = 200_000


def install() -> None:
    """Install import hooks, unless Keras is already imported.

    Modules in `LATE` load when one of their attributes is first read, those in `LARGE` without garbage collection.

    Raises:
        ImportError: If Keras is already imported with another backend than TensorFlow. If it is imported later, the
            import raises the error.
    """
    _require_tensorflow()
    if "keras" not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path[:0] = [_finder, _large]


def after_import(name: str, function: Callable[[], None]) -> None:
    """Call a function right after a module in `LARGE` is imported, or now if it is already imported."""
    if name in sys.modules:
        function()
    else:
        _after.setdefault(name, []).append(function)


class _Late(importlib.abc.MetaPathFinder):
    """Find modules in `LATE`, and defer their execution."""

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
    """Find modules in `LARGE` with the other finders, and exclude their objects from garbage collection."""

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
                    _require_tensorflow()
                for function in _after.pop(name, ()):
                    function()

            loader.exec_module = exec_module
        return spec


@contextlib.contextmanager
def out_of_collections() -> Iterator[None]:
    """Disable garbage collection in this context, and exclude the objects created in it from later collections.

    Earlier objects are excluded too, if they are few.
    """
    were_few, was_enabled = len(gc.get_objects()) < FEW_OBJECTS, gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_few:
            gc.freeze()
        elif gc.get_freeze_count() == 0:  # no objects that must stay frozen
            # Moves all objects to the oldest generation; otherwise the next collections would scan them.
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _wait(module: Any, execute: Any) -> None:
    """Execute a module on first access to its attributes (PEP 562)."""
    lock = threading.RLock()
    executed: list[bool] = []

    def load() -> dict[str, Any]:
        with lock:
            if not executed:
                executed.append(True)  # first: the module may import its own submodules
                try:
                    execute(module)
                except BaseException:
                    executed.clear()
                    raise
        names: dict[str, Any] = vars(module)
        return names

    def get(name: str) -> Any:
        # Python and TensorFlow look up names such as `__wrapped__` in every module.
        if name == "__all__" or not name.startswith("__"):
            names = load()
            if name in names:
                return names[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = get
    module.__dir__ = lambda: sorted(load())


def _require_tensorflow() -> None:
    """Refuse a Keras backend other than TensorFlow, if Keras has chosen its backend.

    Keras 3.15 chooses it in `keras/src/backend/config.py`, before it imports the backend. So the check also works when
    the import fails because JAX or PyTorch is not installed.
    """
    settings = sys.modules.get("keras.src.backend.config")
    backend = "tensorflow" if settings is None else settings.backend()
    if backend != "tensorflow":
        raise ImportError(
            f'The backend of Keras must be "tensorflow", received {backend!r}: set KERAS_BACKEND=tensorflow before '
            "Keras is imported, or unset it and correct the file ~/.keras/keras.json."
        )


_after: dict[str, list[Callable[[], None]]] = {}
_finder = _Late()
_large = _Large()
