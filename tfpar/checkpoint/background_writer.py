"""Background execution: one function at a time in a thread, with its error raised later.

training ── start(write) ── steps ── steps ── wait()    raises the writer's error, if there was one
                └─ thread: write() ────────┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Run functions one after another in the background, and raise their errors in the caller.

    Each function runs in a new thread, so an idle object has no thread. A Python process waits for the last function
    before it ends: a checkpoint is written even if an error ends the training.

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
        """Return whether a function is still running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, function: Callable[[], None]) -> None:
        """Start a function in the background, after the previous one has ended.

        Args:
            function: The function; it must not share state with the caller.

        Raises:
            Exception: The error of the previous function, as `wait` raises it; the new one is then not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=[function], name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Wait until no function is running.

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
            del error  # it refers to this frame: a reference cycle would keep objects of the callers alive

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._error = error
