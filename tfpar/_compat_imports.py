"""Modules of Keras that import Matplotlib and scikit-learn, loaded at their first use.

Keras 3.15 imports both packages where they are installed, for `keras.visualization` and `keras.wrappers`
(`keras/src/visualization/plot_image_gallery.py`, `keras/src/wrappers/fixes.py`), and tfpar needs both: for pictures of
schedules and for the digits. That is about a quarter of the time that every process takes to start.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

LATE = ("keras.src.visualization", "keras.visualization", "keras.wrappers")


def install() -> None:
    """Load the modules of `LATE` when an attribute of theirs is first read, unless Keras is imported already."""
    if "keras" not in sys.modules and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


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


_finder = _Late()
