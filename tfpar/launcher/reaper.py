"""A process next to the launcher that ends what is left of the workers when the launcher itself was killed.

Nobody can catch `kill -9`. The kernel then ends the workers (`worker`), but not what they started themselves,
such as the processes of a data loader. This process reads which process groups live, and when its input ends, the
launcher is gone. It runs as a plain script without site packages, so that it starts in milliseconds.
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

_LONG_SECONDS = 1.0  # a reaper that lives this long was not broken from the start
_MAX_SHORT_LIVES = 5
_END_SECONDS = 2.0


class Reaper:
    """The reaper process, as the launcher sees it: started on entry, ended on exit, replaced when it dies.

    Raises:
        OSError: If the process cannot be started.

    Example:
        >>> with Reaper() as reaper:
        ...     reaper.begin(group)
        ...     reaper.end(group)
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
        self._pipe.close()  # the reaper kills what is left and ends
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
        """Return the file descriptor that can be read when the reaper has died."""
        return self._end

    def announce(self, group: int) -> None:
        """Report a process group from the new process itself, before it runs its command.

        Args:
            group: The process group that begins.
        """
        self._tell(group)

    def begin(self, group: int) -> None:
        """Report that a process group begins.

        Args:
            group: The process group.
        """
        self._groups.add(group)
        self._tell(group)

    def end(self, group: int) -> None:
        """Report that nothing is left of a process group; its number may be reused.

        Args:
            group: The process group.
        """
        self._groups.discard(group)
        self._tell(-group)

    def replace(self) -> str:
        """Start another reaper after this one has died.

        Returns:
            What happened, in one sentence.

        Raises:
            OSError: If the process cannot be started, or dies again and again right after its start.
        """
        code, pipe, end = self._process.wait(), self._pipe, self._end
        is_short = time.monotonic() < self._started_seconds + _LONG_SECONDS
        self._short_lives = self._short_lives + 1 if is_short else 0
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._short_lives == _MAX_SHORT_LIVES:
            raise OSError(
                f"The reaper process, which ends the workers should the launcher be killed, {ending}, for the "
                f"{_MAX_SHORT_LIVES}th time right after its start. Find out what ends it, and start the job again."
            )
        self._start()
        pipe.close()
        os.close(end)
        for group in self._groups:
            self._tell(group)
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

    def _tell(self, number: int) -> None:
        # In a new process, which also calls this, SIGPIPE would be deadly: `subprocess` restores it before preexec_fn.
        with contextlib.suppress(OSError):  # died: `replace` repeats it
            self._pipe.send(b"%d\n" % number, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def guard(lines: Iterable[bytes]) -> None:
    """Wait until the input ends, then kill every process group that still lives.

    Args:
        lines: Process groups that begin, and negative ones that have ended.

    Example:
        >>> guard([b"123\\n", b"-123\\n"])  # begun and ended: nothing to kill
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
    guard(sys.stdin.buffer)
