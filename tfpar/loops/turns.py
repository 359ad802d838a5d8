"""Turns of the threads that train.

Keras' seed, its scopes, and the functions of Keras and TensorFlow that are replaced while a step is traced belong to
the whole process. Two threads that build or trace at once would mix them. So one waits until the other has returned, or
lets it in between two calls of its loop:

    thread 0   build │ call of steps, callbacks │            │ call of steps, callbacks │ …
    thread 1         │ waits                    │ prediction │
"""

from __future__ import annotations

import collections
import os
import threading

from tfpar.messages import user_warnings

_SECONDS_UNTIL_WARNING = 10.0


class _Queue:
    """The thread that has the turn, and those that wait for it, in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[object] = collections.deque()
        self._thread: int | None = None
        self._depth = 0

    def take(self, depth: int = 1) -> None:
        """Wait for the turn; a thread that has it takes it again at once."""
        thread, ticket = threading.get_ident(), object()
        with self._changed:
            if self._thread == thread:
                self._depth += depth
                return
            self._waiting.append(ticket)
            try:
                self._wait(ticket)
                self._thread, self._depth = thread, depth
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()  # after Ctrl-C, the next one waits no longer

    def _wait(self, ticket: object) -> None:
        def is_next() -> bool:
            return self._thread is None and self._waiting[0] is ticket

        if not self._changed.wait_for(is_next, _SECONDS_UNTIL_WARNING):
            user_warnings.warn(
                "The threads of a process train, evaluate and predict in turns, and another thread has not ended its "
                "own: this thread waits. To run both at once, use two processes."
            )
            self._changed.wait_for(is_next)

    def give(self, depth: int = 1) -> None:
        """End as many turns of this thread."""
        with self._changed:
            self._depth -= depth
            if self._depth == 0:
                self._thread = None
                self._changed.notify_all()

    def give_way(self) -> None:
        """Let a thread that waits take its turn, and wait for the next one."""
        if self._waiting and self._thread == threading.get_ident():
            depth = self._depth
            self.give(depth)
            self.take(depth)


_queues = [_Queue()]


class Turn:
    """A context that no two threads are in at once: one waits, and says so where it takes long.

    A thread may enter it again.
    """

    def __enter__(self) -> None:
        """Wait until no other thread is in the context."""
        self._queue = _queues[0]
        self._queue.take()

    def __exit__(self, *error: object) -> None:
        """Let the next thread enter."""
        self._queue.give()


def give_way() -> None:
    """Let a thread that waits have a turn, between two calls of the loop of this one."""
    _queues[0].give_way()


def _renew() -> None:
    _queues[:] = [_Queue()]


os.register_at_fork(after_in_child=_renew)  # the thread that had the turn is not in the child
