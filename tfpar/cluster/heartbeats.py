"""Heartbeats between the chief and the workers whose devices it uses, over the rendezvous connections.

worker 1   ping ──┐      ping ──┐      ping ──┐                ┌── closes
chief             └─ answer     └─ answer     └─ answer ... "ended"

Only an answer from the process itself proves that it is alive: the kernel accepts connections for a suspended process,
and a broken link closes no connection. A worker that receives SIGTERM forwards it to the chief, which stops the job.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping

_PING, _STOP, _ENDED = b".", b"s", b"e"
_LONGEST_INTERVAL_SECONDS = 1.0
CLOSED, SILENT = "connection closed", "no heartbeat"


def interval(silence_seconds: float) -> float:
    """Return the seconds between heartbeats for a time limit of `silence_seconds`."""
    return min(_LONGEST_INTERVAL_SECONDS, silence_seconds / 8)


class Answers:
    """Answer the heartbeats of the workers. Runs on the chief, in a dedicated thread.

    Args:
        connections: Connections to the other workers, by address.
        silence_seconds: Seconds without a heartbeat after which a worker counts as lost.
        stop: Called when a worker receives a request to stop.
    """

    def __init__(
        self, connections: Mapping[str, socket.socket], silence_seconds: float, stop: Callable[[], None]
    ) -> None:
        self._connections, self._silence_seconds, self._stop = dict(connections), silence_seconds, stop
        self._last_seconds = dict.fromkeys(connections, time.monotonic())
        for connection in connections.values():
            connection.setblocking(False)

    def first_loss(self) -> tuple[list[str], str]:
        """Wait until workers are lost; return their addresses and the reason."""
        poll = select.poll()
        addresses = {}
        for address, connection in self._connections.items():
            addresses[connection.fileno()] = address
            poll.register(connection, select.POLLIN)
        while True:
            # Read before checking for silence: heartbeats that arrived while this process was suspended count.
            ready = poll.poll(1000 * interval(self._silence_seconds))
            closed = [address for address in map(addresses.__getitem__, dict(ready)) if not self._answer(address)]
            if closed:
                return closed, CLOSED
            if silent := self._silent():
                return silent, SILENT

    def end(self) -> None:
        """Tell the workers that the job has ended."""
        for connection in self._connections.values():
            _send(connection, _ENDED)

    def _answer(self, address: str) -> bool:
        """Answer a worker; return whether its connection is still open."""
        connection = self._connections[address]
        received = _received(connection)
        if received:
            self._last_seconds[address] = time.monotonic()
            _send(connection, _PING)
        if _STOP in received:
            self._stop()
        return bool(received)

    def _silent(self) -> list[str]:
        """Return the silent workers, including those that fell silent at about the same time as the first."""
        now, margin = time.monotonic(), 2 * interval(self._silence_seconds)
        silences = {address: now - last for address, last in self._last_seconds.items()}
        if max(silences.values()) < self._silence_seconds:
            return []
        return [address for address, seconds in silences.items() if seconds > self._silence_seconds - margin]


class Pings(threading.Thread):
    """Send heartbeats to the chief from a worker, until the job ends or the chief is lost.

    Args:
        connection: The connection to the chief.
        silence_seconds: Seconds without an answer after which the chief counts as lost.

    Attributes:
        loss: Why the chief was lost; None while the thread runs and after a normal end of the job.
    """

    def __init__(self, connection: socket.socket, silence_seconds: float) -> None:
        super().__init__(name="tfpar-heartbeats", daemon=True)
        connection.setblocking(False)
        self._connection, self._silence_seconds = connection, silence_seconds
        self.loss: str | None = None

    def ask_to_stop(self) -> None:
        """Ask the chief to stop the job."""
        _send(self._connection, _STOP)

    def run(self) -> None:
        """Send heartbeats until the job ends or the chief is lost."""
        poll, pause = select.poll(), interval(self._silence_seconds)
        poll.register(self._connection, select.POLLIN)
        _send(self._connection, _PING)
        answered = pinged = time.monotonic()
        received, has_ended = _PING, False
        while True:
            if poll.poll(1000 * max(0.0, pinged + pause - time.monotonic())):
                received = _received(self._connection)
                has_ended = has_ended or _ENDED in received
                if not received:
                    break
                answered = time.monotonic()
            if time.monotonic() - answered > self._silence_seconds:
                break
            if time.monotonic() >= pinged + pause:
                _send(self._connection, _PING)
                pinged = time.monotonic()
        if not has_ended:
            self.loss = SILENT if received else CLOSED


def _received(connection: socket.socket) -> bytes:
    """Return the bytes that have arrived; empty if the connection is closed."""
    try:
        return connection.recv(4096)
    except OSError:
        return b""


def _send(connection: socket.socket, message: bytes) -> None:
    try:
        connection.send(message)
    except OSError:  # the next read reports it
        return
