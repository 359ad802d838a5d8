"""The chief's side of the rendezvous: one poll over a bounded number of connections with deadlines."""

from __future__ import annotations

import collections
import contextlib
import errno
import selectors
import socket
import time

from tfpar.cluster import job_secret
from tfpar.cluster.rendezvous import messages
from tfpar.cluster.rendezvous.messages import Keep
from tfpar.cluster.tf_config import JobConfig, split_address

_HELLO_SECONDS = 5.0  # from the connection to the worker's hello
_MOST_STRANGERS = 128  # unauthenticated connections
_PAUSE_SECONDS = 0.1  # when file descriptors are exhausted
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connection:
    """A connection to the chief, of a stranger until it is authenticated.

    Args:
        socket_: The non-blocking socket.
        host: The address of the peer.
    """

    def __init__(self, socket_: socket.socket, host: str) -> None:
        self.socket, self.host = socket_, host
        self.challenge = messages.new_challenge()
        self.ends_seconds = time.monotonic() + _HELLO_SECONDS
        self.line = b""
        # Set once the worker is authenticated.
        self.rank: int | None = None
        self.challenges: messages.Challenges | None = None
        self.strategy = ""


class Rendezvous:
    """The connections to the chief until all workers are present.

    Args:
        job: The job whose chief this process is.
        secret: The job secret.
        listeners: Listening sockets.
        strategy: The name of the chief's strategy.
    """

    def __init__(self, job: JobConfig, secret: bytes, listeners: list[socket.socket], strategy: str) -> None:
        self._job, self._secret, self._listeners, self._strategy = job, secret, listeners, strategy
        self._strangers: list[Connection] = []  # the oldest first
        self._workers: dict[int, Connection] = {}
        self._num_refused, self._last_refused = 0, ""
        self._accepts_from_seconds = 0.0
        self._selector = selectors.PollSelector()

    def run(self, seconds: float, keep: Keep | None = None) -> messages.Outcome:
        """Wait for all workers, answer the connected ones, and close every connection that is not kept.

        Args:
            seconds: Time limit.
            keep: Receives the connections to the workers, if all are present with the same strategy.
        """
        ends_seconds = time.monotonic() + seconds
        try:
            while len(self._workers) < self._job.num_workers - 1 and time.monotonic() < ends_seconds:
                self._listen()
                for key, _ in self._selector.select(self._next_deadline(ends_seconds) - time.monotonic()):
                    self._accept(key.fileobj) if key.data is None else self._read(key.data)
                now = time.monotonic()
                for stranger in [stranger for stranger in self._strangers if stranger.ends_seconds <= now]:
                    self._drop(stranger)
            missing = [
                address for rank, address in enumerate(self._job.addresses) if rank and rank not in self._workers
            ]
            difference = None if missing else self._difference()
            for worker in self._workers.values():
                assert worker.challenges is not None
                with contextlib.suppress(OSError):
                    worker.socket.send(messages.answer(missing, worker.challenges, self._secret, difference))
            while keep is not None and not missing and difference is None and self._workers:
                rank, worker = self._workers.popitem()
                keep(rank, worker.socket)
            return messages.Outcome(missing, self._remark(), difference=difference)
        finally:
            for connection in [*self._strangers, *self._workers.values()]:
                connection.socket.close()

    def _listen(self) -> None:
        """Accept connections, except during the pause after file descriptors were exhausted."""
        is_time = time.monotonic() >= self._accepts_from_seconds
        for listener in self._listeners:
            is_registered = listener in self._selector.get_map()
            if is_time and not is_registered:
                self._selector.register(listener, selectors.EVENT_READ)
            elif is_registered and not is_time:
                self._selector.unregister(listener)

    def _next_deadline(self, ends_seconds: float) -> float:
        deadlines = [ends_seconds, *(stranger.ends_seconds for stranger in self._strangers[:1])]
        if self._accepts_from_seconds > time.monotonic():
            deadlines.append(self._accepts_from_seconds)
        return min(deadlines)

    def _accept(self, listener: object) -> None:
        assert isinstance(listener, socket.socket)
        try:
            accepted, address = listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM and not self._drop_a_stranger():
                self._accepts_from_seconds = time.monotonic() + _PAUSE_SECONDS
            return
        accepted.setblocking(False)
        stranger = Connection(accepted, address[0])
        with contextlib.suppress(OSError):
            accepted.send(messages.greeting(stranger.challenge))
        self._strangers.append(stranger)
        self._selector.register(accepted, selectors.EVENT_READ, stranger)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop_a_stranger()

    def _read(self, connection: Connection) -> None:
        if connection.socket.fileno() < 0:  # dropped since the poll
            return
        try:
            data = connection.socket.recv(messages.LONGEST_GREETING_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.line += data
        if not data or connection.rank is not None:  # closed, or more bytes than a worker sends
            self._drop(connection)
        elif connection.line.endswith(b"\n") or len(connection.line) > messages.LONGEST_GREETING_BYTES:
            self._check_proof(connection)

    def _check_proof(self, stranger: Connection) -> None:
        """Admit a stranger with a valid proof as a worker, in place of an earlier connection of its rank."""
        hello = messages.read_hello(stranger.line, stranger.challenge, self._job.num_workers, self._secret)
        if hello is None:
            self._num_refused, self._last_refused = self._num_refused + 1, stranger.host
            with contextlib.suppress(OSError):
                stranger.socket.send(messages.REFUSED)
            self._drop(stranger)
            return
        stranger.rank, stranger.challenges, stranger.strategy = hello
        self._strangers.remove(stranger)
        if stranger.rank in self._workers:
            self._drop(self._workers[stranger.rank])  # the worker was restarted
        self._workers[stranger.rank] = stranger

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.rank is None:
            self._strangers.remove(connection)
        else:
            del self._workers[connection.rank]

    def _drop_a_stranger(self) -> bool:
        """Drop the oldest stranger from the host with the most strangers; return False if there are none."""
        if not self._strangers:
            return False
        ((host, _),) = collections.Counter(stranger.host for stranger in self._strangers).most_common(1)
        self._drop(next(stranger for stranger in self._strangers if stranger.host == host))
        return True

    def _difference(self) -> messages.Difference | None:
        """Return the first worker whose strategy differs from the chief's."""
        for rank, worker in sorted(self._workers.items()):
            if worker.strategy != self._strategy:
                return messages.Difference(rank, worker.strategy, self._strategy)
        return None

    def _remark(self) -> str:
        if not self._num_refused:
            return ""
        return (
            f" {self._num_refused} connection(s) without this job's {job_secret.VARIABLE} were refused, the last from "
            f"{self._last_refused}."
        )


def gather(
    job: JobConfig, seconds: float, secret: bytes, keep: Keep | None = None, strategy: str = ""
) -> messages.Outcome:
    """Wait for all workers as the chief, and send the outcome to the connected ones.

    Args:
        job: The job.
        seconds: Time limit.
        secret: The job secret.
        keep: Receives the non-blocking connections to the workers; None closes them.
        strategy: The name of this process's strategy.

    Raises:
        OSError: If the port is taken.
    """
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listening(job)]
        return Rendezvous(job, secret, listeners, strategy).run(seconds, keep)


def listening(job: JobConfig, rank: int = 0) -> list[socket.socket]:
    """Listen on the port of a worker: on the loopback for a local job, else on all addresses, as TensorFlow does later.

    Args:
        job: The job.
        rank: The rank of this worker. Defaults to the chief.

    Raises:
        OSError: If the port is taken.
    """
    host, port = split_address(job.addresses[rank])
    binds = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    if job.is_on_loopback:
        rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        binds = list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in rows))
    listeners: list[socket.socket] = []
    problem: OSError | None = None
    for family, address in binds:
        try:
            listener = socket.create_server((address, port), family=family, backlog=_MOST_STRANGERS)
        except OSError as error:
            problem = error
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6, or no IPv4
                for opened in listeners:
                    opened.close()
                raise
            continue
        listener.setblocking(False)
        listeners.append(listener)
    if problem is not None and not listeners:
        raise problem
    return listeners
