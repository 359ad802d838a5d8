"""A lock of the process for threads that build, trace and train.

Keras' seed and scopes, and the functions that are patched while a step is traced, belong to the whole process, so only
one thread may build or trace at a time:

    thread 0   build, trace │ steps run …          │ callbacks │ steps run …
    thread 1         waits  │ build, trace │ waits …           │ steps run …

No thread holds the lock while steps run and data are read: data may come from a thread that predicts with another
model.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator


class _Lock:
    """A reentrant lock; releasing it does nothing in a thread that was interrupted while waiting for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._depth = self._num_kept = 0

    @property
    def _is_mine(self) -> bool:
        return self._thread == threading.get_ident()

    def acquire(self, kept: bool) -> None:
        if not self._is_mine:
            self._acquire_at(0)
        self._depth += 1
        self._num_kept += kept

    def release(self, kept: bool) -> None:
        if self._is_mine:
            self._depth -= 1
            self._num_kept -= kept
            if self._depth == 0:
                self._release_all()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if not self._is_mine or self._num_kept:
            yield
            return
        depth = self._depth
        self._release_all()
        try:
            yield
        finally:
            self._acquire_at(depth)

    def _acquire_at(self, depth: int) -> None:
        self._lock.acquire()
        self._thread, self._depth, self._num_kept = threading.get_ident(), depth, 0

    def _release_all(self) -> None:
        self._thread, self._depth = None, 0
        self._lock.release()


_locks = [_Lock()]


class ProcessLock:
    """A context that only one thread at a time can be in; that thread may enter it again.

    Args:
        kept: Whether the thread keeps the lock in `paused` too, as it must while it builds a model.
    """

    def __init__(self, kept: bool = False) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        """Wait until no other thread is in the context."""
        self._lock = _locks[0]
        self._lock.acquire(self._kept)

    def __exit__(self, *error: object) -> None:
        """Let the next thread enter."""
        self._lock.release(self._kept)


def paused() -> contextlib.AbstractContextManager[None]:
    """Return a context in which other threads may hold the lock, for example to wait for data."""
    return _locks[0].paused()


def _renew() -> None:
    _locks[:] = [_Lock()]


os.register_at_fork(after_in_child=_renew)  # the thread that held the lock is not in the child
