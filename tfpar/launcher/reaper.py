"""A separate process that kills the remaining process groups of the workers after the launcher was killed.

A process cannot catch `kill -9`. The kernel then ends the workers (`worker`), but not their child processes, such as
those of a data loader. The reaper reads the process groups from its input, which ends when the launcher is gone. It
runs as a plain script without site packages, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType

_LONG_SECONDS = 1.0  # a reaper that ran this long did not fail at its start
_MAX_SHORT_LIVES = 5
_END_SECONDS = 2.0


class Reaper:
    """The launcher's handle of the reaper process: started on entry, ended on exit, replaced after a failure.

    Raises:
        OSError: If the process cannot be started.

    Example:
        >>> with Reaper() as reaper:
        ...     reaper.register(group)
        ...     reaper.unregister(group)
    """

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._short_lives = 0

    def __enter__(self) -> Reaper:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # the reaper kills the remaining groups and ends
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # stopped by a signal
            self._process.kill()
            self._process.wait()
        os.close(self._end)

    @property
    def pid(self) -> int:
        """The process id of the reaper."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when the reaper has ended."""
        return self._end

    def register_from_child(self, group: int) -> None:
        """Register a process group from the new process itself, before it runs its command.

        Args:
            group: The new process group.
        """
        self._send(group)

    def register(self, group: int) -> None:
        """Register a process group, to be killed with the launcher.

        Args:
            group: The process group.
        """
        self._groups.add(group)
        self._send(group)

    def unregister(self, group: int) -> None:
        """Unregister a process group without processes; its number may be reused.

        Args:
            group: The process group.
        """
        self._groups.discard(group)
        self._send(-group)

    def replace(self) -> str:
        """Start another reaper after this one has ended.

        Returns:
            A sentence for the user.

        Raises:
            OSError: If the process cannot be started, or repeatedly ends right after its start.
        """
        code, pipe, end = self._process.wait(), self._pipe, self._end
        is_short = time.monotonic() < self._started_seconds + _LONG_SECONDS
        self._short_lives = self._short_lives + 1 if is_short else 0
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._short_lives == _MAX_SHORT_LIVES:
            raise OSError(
                f"The reaper process, which ends the workers if the launcher is killed, {ending} right after its "
                f"start, {_MAX_SHORT_LIVES} times in a row. Find out why it ends, and start the job again."
            )
        self._start()
        pipe.close()
        os.close(end)
        for group in self._groups:
            self._send(group)
        return f"The reaper process {ending} and was replaced; the workers keep running."

    def _start(self) -> None:
        pipe, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._pipe, self._process, self._end = pipe, process, os.pidfd_open(process.pid)
        self._started_seconds = time.monotonic()

    def _send(self, number: int) -> None:
        # A new process calls this too, and there SIGPIPE would kill it: `subprocess` resets it before preexec_fn.
        with contextlib.suppress(OSError):  # the reaper has ended: `replace` sends all groups again
            self._pipe.send(b"%d\n" % number, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def kill_when_input_ends(lines: Iterable[bytes]) -> None:
    r"""Wait until the input ends, then kill every process group that is still registered.

    Args:
        lines: Numbers of registered process groups, and negative ones of unregistered groups.

    Example:
        >>> kill_when_input_ends([b"123\n", b"-123\n"])  # registered and unregistered: nothing to kill
    """
    groups: set[int] = set()
    for number in map(int, lines):
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    kill_when_input_ends(sys.stdin.buffer)
