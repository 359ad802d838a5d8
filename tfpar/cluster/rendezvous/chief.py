"""The chief at the rendezvous: one poll over all connections, each with a deadline, and a bound on their number."""

from __future__ import annotations

import collections
import contextlib
import errno
import selectors
import socket
import time

from tfpar.cluster import job_secret
from tfpar.cluster.rendezvous import messages
from tfpar.cluster.tf_config import Job, split_address

_HELLO_SECONDS = 5.0  # from the connection to the worker's line
_MOST_STRANGERS = 128  # connections that have not yet proved to be a worker's
_PAUSE_SECONDS = 0.1  # without file descriptors for another connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Caller:
    """A connection to the chief, at first a stranger's.

    Args:
        connection: The socket, which does not block.
        host: The address that it comes from.
    """

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection, self.host = connection, host
        self.challenge = messages.new_challenge()
        self.ends_seconds = time.monotonic() + _HELLO_SECONDS
        self.line = b""
        self.rank: int | None = None  # once it has proved to be a worker
        self.challenges: messages.Challenges | None = None


class Gathering:
    """All who call the chief until the workers are complete.

    Args:
        job: The job, of which this process is the chief.
        secret: The job's.
        listeners: Sockets that listen.
    """

    def __init__(self, job: Job, secret: bytes, listeners: list[socket.socket]) -> None:
        self._job, self._secret, self._listeners = job, secret, listeners
        self._strangers: list[Caller] = []  # the oldest first
        self._workers: dict[int, Caller] = {}
        self._num_refused, self._last_refused = 0, ""
        self._accepts_from_seconds = 0.0
        self._selector = selectors.PollSelector()

    def run(self, seconds: float) -> tuple[list[str], str]:
        """Wait for all workers, answer those that came, and close every connection.

        Returns:
            The addresses that are missing, and a remark for the error.
        """
        ends_seconds = time.monotonic() + seconds
        try:
            while len(self._workers) < self._job.num_workers - 1 and time.monotonic() < ends_seconds:
                self._listen()
                for key, _ in self._selector.select(self._next_deadline(ends_seconds) - time.monotonic()):
                    self._accept(key.fileobj) if key.data is None else self._read(key.data)
                for caller in [caller for caller in self._strangers if caller.ends_seconds <= time.monotonic()]:
                    self._drop(caller)
            missing = [
                address for rank, address in enumerate(self._job.addresses) if rank and rank not in self._workers
            ]
            for worker in self._workers.values():
                assert worker.challenges is not None
                with contextlib.suppress(OSError):
                    worker.connection.send(messages.answer(missing, worker.challenges, self._secret))
            return missing, self._remark()
        finally:
            for caller in [*self._strangers, *self._workers.values()]:
                caller.connection.close()

    def _listen(self) -> None:
        """Listen, except for a moment after the file descriptors were exhausted."""
        is_time = time.monotonic() >= self._accepts_from_seconds
        for listener in self._listeners:
            is_registered = listener in self._selector.get_map()
            if is_time and not is_registered:
                self._selector.register(listener, selectors.EVENT_READ)
            elif is_registered and not is_time:
                self._selector.unregister(listener)

    def _next_deadline(self, ends_seconds: float) -> float:
        deadlines = [ends_seconds, *(caller.ends_seconds for caller in self._strangers[:1])]
        if self._accepts_from_seconds > time.monotonic():
            deadlines.append(self._accepts_from_seconds)
        return min(deadlines)

    def _accept(self, listener: object) -> None:
        assert isinstance(listener, socket.socket)
        try:
            connection, address = listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM and not self._drop_a_stranger():
                self._accepts_from_seconds = time.monotonic() + _PAUSE_SECONDS
            return
        connection.setblocking(False)
        caller = Caller(connection, address[0])
        with contextlib.suppress(OSError):
            connection.send(messages.greeting(caller.challenge))
        self._strangers.append(caller)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop_a_stranger()

    def _read(self, caller: Caller) -> None:
        if caller.connection.fileno() < 0:  # dropped since the poll
            return
        try:
            data = caller.connection.recv(messages.LONGEST_GREETING_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        caller.line += data
        if not data or caller.rank is not None:  # it is gone, or says more than a worker does
            self._drop(caller)
        elif caller.line.endswith(b"\n") or len(caller.line) > messages.LONGEST_GREETING_BYTES:
            self._judge(caller)

    def _judge(self, caller: Caller) -> None:
        """Make a worker of a stranger that proves to be one, in place of an earlier connection of the same rank."""
        found = messages.read_hello(caller.line, caller.challenge, self._job.num_workers, self._secret)
        if found is None:
            self._num_refused, self._last_refused = self._num_refused + 1, caller.host
            with contextlib.suppress(OSError):
                caller.connection.send(messages.REFUSED)
            self._drop(caller)
            return
        caller.rank, caller.challenges = found
        self._strangers.remove(caller)
        if caller.rank in self._workers:
            self._drop(self._workers[caller.rank])  # it was started again
        self._workers[caller.rank] = caller

    def _drop(self, caller: Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.rank is None:
            self._strangers.remove(caller)
        else:
            del self._workers[caller.rank]

    def _drop_a_stranger(self) -> bool:
        """Drop the oldest stranger of the host that has most of them; return whether there was one."""
        if not self._strangers:
            return False
        ((host, _),) = collections.Counter(caller.host for caller in self._strangers).most_common(1)
        self._drop(next(caller for caller in self._strangers if caller.host == host))
        return True

    def _remark(self) -> str:
        if not self._num_refused:
            return ""
        return (
            f" {self._num_refused} connection(s) without this job's {job_secret.VARIABLE} were refused, the last from "
            f"{self._last_refused}."
        )


def gather(job: Job, seconds: float, secret: bytes) -> tuple[list[str], str]:
    """Wait as the chief for everyone, and say to all who came which addresses are missing.

    Args:
        job: The job.
        seconds: How long to wait.
        secret: The job's.

    Returns:
        The addresses that are missing, and a remark for the error.

    Raises:
        OSError: If the port is taken.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in listening(job)]
        return Gathering(job, secret, listeners).run(seconds)


def listening(job: Job) -> list[socket.socket]:
    """Return sockets that listen on the chief's port: on the loopback for a job of this machine, else as TensorFlow.

    TensorFlow listens on all addresses of the machine, of IPv6 and of IPv4.

    Args:
        job: The job.

    Raises:
        OSError: If the port is taken.
    """
    host, port = split_address(job.addresses[0])
    places = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    if job.is_on_loopback:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        places = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
    listeners: list[socket.socket] = []
    problem: OSError | None = None
    for family, place in places:
        try:
            listener = socket.create_server((place, port), family=family, backlog=_MOST_STRANGERS)
        except OSError as error:
            problem = error
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # a machine without IPv6, or without IPv4
                for one in listeners:
                    one.close()
                raise
            continue
        listener.setblocking(False)
        listeners.append(listener)
    if problem is not None and not listeners:
        raise problem
    return listeners
