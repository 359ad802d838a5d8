"""Functions that run one at a time in a background thread, with errors raised in the caller later.

training ── start(write) ── steps ── steps ── wait()    raises the writer's error, if there was one
                └─ thread: write() ────────┘
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Run functions one at a time in a thread, and raise their errors in the caller.

    Python waits for the thread before it exits, so a checkpoint is written even if an error ends the training.

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
        """Start a function in a thread once the previous one has ended.

        Raises:
            Exception: The error of the previous function; the new one is then not started.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=[function], name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the running function.

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
            del error  # breaks a reference cycle with this frame, which would keep objects of the callers alive

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._error = error
