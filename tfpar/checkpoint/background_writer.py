"""Work that the training does not wait for: one function at a time in a thread of its own, its error kept.

training ── start(write) ── steps ── steps ── wait()    raises the writer's error, if there was one
                └─ thread: write() ────────┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Run functions one after another beside the caller, and give their errors back to it.

    Each function has a thread of its own, so no thread is left when nothing is to do. A Python process that ends lets
    the last function finish: a checkpoint that has begun is written even where an error ends the training.

    Args:
        name: The name of the threads, for debuggers.

    Example:
        >>> background = Background("writer")
        >>> background.start(lambda: path.write_bytes(content))
        >>> background.wait()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def busy(self) -> bool:
        """Say whether a function still runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, function: Callable[[], None]) -> None:
        """Run a function beside the caller, after the one before has ended.

        Args:
            function: What to do; it must touch nothing that the caller changes meanwhile.

        Raises:
            Exception: The error of the function before, as `wait` raises it; this one is then not begun.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=[function], name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing runs.

        Raises:
            Exception: The error of the last function, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it holds this frame; a circle would keep what the callers hold, such as locked files, alive

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._error = error
