"""A private network for the job, with the loopback interface only; Linux only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h


def enter_private() -> None:
    """Move this process, and all that it starts afterwards, into a new network namespace.

    No process outside, not even of another user of this machine, can connect to a server in it, and no process in it
    can reach another machine. Without root's rights this needs a user namespace too, with the same user and group. Only
    for a process with one thread.

    Raises:
        OSError: If the system refuses it.

    Example:
        >>> enter_private()
        >>> [name for _, name in socket.if_nameindex()]
        ['lo']
    """
    user, group = os.getuid(), os.getgid()
    try:
        try:
            _unshare(_CLONE_NEWNET)
        except PermissionError:
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
            Path("/proc/self/setgroups").write_text("deny")  # the kernel requires it before gid_map
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _start_loopback()
    except OSError as error:
        raise OSError(
            f"--network private needs a network namespace, and this system refuses it: {os.strerror(error.errno or 0)}."
            " Leave it out: TensorFlow's ports then accept connections of this machine only, also of its other users."
        ) from None


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sH14x", b"lo", 0)
        _, flags = struct.unpack("16sH14x", fcntl.ioctl(one, _SIOCGIFFLAGS, request))
        fcntl.ioctl(one, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
