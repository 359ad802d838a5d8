"""Turns of the threads that train.

Keras' seed, its scopes, and the functions of Keras and TensorFlow that are replaced while a step is traced belong to
the whole process. Two threads that build or trace at once would mix them, so one waits until the other has returned.
"""

from __future__ import annotations

import os
import threading

from tfpar.messages import user_warnings

_SECONDS_UNTIL_WARNING = 10.0
_locks = [threading.RLock()]


class Turn:
    """A context that no two threads are in at once: one waits, and says so where it takes long.

    A thread may enter it again.
    """

    def __enter__(self) -> None:
        """Wait until no other thread is in the context."""
        self._lock = _locks[0]
        if not self._lock.acquire(timeout=_SECONDS_UNTIL_WARNING):
            user_warnings.warn(
                "A process trains, evaluates or predicts with one trainer at a time, and another thread does so now: "
                "this thread waits. To run both at once, use two processes."
            )
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Let the next thread enter."""
        self._lock.release()


def _renew() -> None:
    _locks[:] = [threading.RLock()]


os.register_at_fork(after_in_child=_renew)  # the thread that had the turn is not in the child
