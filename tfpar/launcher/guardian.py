"""A process beside the launcher that ends what is left of the workers when the launcher itself was killed.

Nobody can catch `kill -9`. The kernel then ends the workers (`worker`), but not what they started themselves,
such as the processes of a data loader. This process reads which process groups live, and when its input ends, the
launcher is gone. It runs as a plain script without site packages, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator


@contextlib.contextmanager
def started() -> Iterator[int]:
    """Start the guardian and end it afterwards, when it kills what is left.

    Returns:
        The file descriptor for `tell`.

    Example:
        >>> with guardian.started() as guarded:
        ...     guardian.tell(guarded, group)
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        yield process.stdin.fileno()
    finally:
        process.stdin.close()
        process.wait()


def tell(guarded: int, number: int) -> None:
    """Tell the guardian that a process group begins, or that nothing of it is left.

    Args:
        guarded: File descriptor that `started` gave.
        number: The process group; negative when it is over, as its number may then be reused.
    """
    with contextlib.suppress(BrokenPipeError):  # the guardian was killed; the workers still die with the launcher
        os.write(guarded, b"%d\n" % number)


def guard(lines: Iterable[bytes]) -> None:
    """Wait until the input ends, then kill every process group that still lives.

    Args:
        lines: What `tell` wrote.

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
