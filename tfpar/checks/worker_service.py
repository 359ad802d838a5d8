"""What every worker of a job answers to the others while the doctor examines the network between them.

A connection carries one request:

    service to client   "tfpar-doctor CHALLENGE"
    client to service   "PROOF REQUEST"             a proof of the job secret over both, and the request in JSON
    client to service   bytes                       of the request "receive"
    service to client   ANSWER                      in JSON
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import socket
import threading
import time
from typing import Any

from tfpar.checks import machine
from tfpar.cluster import job_secret, reachability
from tfpar.cluster.rendezvous.chief import listening
from tfpar.cluster.tf_config import Job, split_address
from tfpar.files.code_listing import code_listing

_GREETING = "tfpar-doctor"
_LONGEST_LINE_BYTES, _BLOCK_BYTES = 1 << 16, 1 << 20
MOST_BYTES = 256 << 20  # of one "receive"
_PATIENCE_SECONDS = 20.0  # without a byte
_REACH_SECONDS = 3.0
_ACCEPT_SECONDS = 0.2  # from the end of an examination to that of the listeners


def facts() -> dict[str, str]:
    """Return what must be equal on all workers: the versions, and the code of tfpar."""
    found = {name: str(one) for name, one in machine.versions().values.items() if name != "system"}
    return {**found, "code of tfpar": hashlib.sha256(code_listing().encode()).hexdigest()[:12]}


class Service:
    """The service of one worker, in a thread of its own, at its address in the job.

    Args:
        job: The job and the rank of this process in it.
        secret: The job secret; empty without one.

    Raises:
        OSError: If the address is taken.
    """

    def __init__(self, job: Job, secret: bytes) -> None:
        self._job, self._secret = job, secret
        self.has_ended = threading.Event()
        for listener in listening(job, job.rank):
            listener.settimeout(_ACCEPT_SECONDS)
            threading.Thread(target=self._serve, args=[listener], name="tfpar-doctor", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.has_ended.set()

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            while not self.has_ended.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            connection.settimeout(_PATIENCE_SECONDS)
            challenge = secrets.token_hex(16)
            connection.sendall(f"{_GREETING} {challenge}\n".encode())
            claimed, _, text = read_line(connection).partition(" ")
            if not job_secret.is_proof(claimed, self._secret, _GREETING, challenge, text):
                return
            answer = self._done(json.loads(text), connection)
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _done(self, request: dict[str, Any], connection: socket.socket) -> Any:
        kind = request["do"]
        if kind == "facts":
            return facts()
        if kind == "clock":
            return time.time()
        if kind == "reach":
            return reachability.problems(self._job.peers, _REACH_SECONDS)
        if kind == "receive":
            return _received(connection, min(int(request["num_bytes"]), MOST_BYTES))
        if kind == "send":  # to a worker of this job only
            address = self._job.addresses[int(request["rank"])]
            return seconds_to_send(address, self._secret, min(int(request["num_bytes"]), MOST_BYTES))
        if kind == "end":
            self.has_ended.set()
            return None
        raise ValueError(f"There is no request {kind!r}.")


def ask(address: str, secret: bytes, request: dict[str, Any], payload: int = 0, seconds: float = 60.0) -> Any:
    """Return the answer of a worker.

    Args:
        address: Its address in the job.
        secret: The job secret; empty without one.
        request: The request.
        payload: Bytes to send after it.
        seconds: The time limit for each part of the answer.

    Raises:
        OSError: If it cannot be reached, or does not answer.
        ValueError: If another program answers, or the worker has another secret.
    """
    with socket.create_connection(split_address(address), timeout=min(seconds, 5.0)) as connection:
        connection.settimeout(seconds)
        greeting, _, challenge = read_line(connection).partition(" ")
        if greeting != _GREETING:
            raise ValueError("another program answers there")
        text = json.dumps(request)
        connection.sendall(f"{job_secret.proof(secret, _GREETING, challenge, text)} {text}\n".encode())
        block = bytes(_BLOCK_BYTES)
        for begin in range(0, payload, _BLOCK_BYTES):
            connection.sendall(block[: payload - begin])
        answer = read_line(connection)
    if not answer:
        raise ValueError(f"it has another {job_secret.VARIABLE}, or ended")
    return json.loads(answer)


def seconds_to_send(address: str, secret: bytes, num_bytes: int) -> float:
    """Send bytes to a worker, and return the seconds from the first of them to its answer."""
    ask(address, secret, {"do": "receive", "num_bytes": _BLOCK_BYTES}, _BLOCK_BYTES)  # TCP begins slowly
    return float(ask(address, secret, {"do": "receive", "num_bytes": num_bytes}, num_bytes))


def _received(connection: socket.socket, num_bytes: int) -> float:
    begin, left = time.perf_counter(), num_bytes
    while left > 0:
        data = connection.recv(min(left, _BLOCK_BYTES))
        if not data:
            raise ConnectionError("the sender has ended")
        left -= len(data)
    return time.perf_counter() - begin


def read_line(connection: socket.socket) -> str:
    """Return a line without its end; empty if the other side closes before it.

    Bytes after the line are left to be read, so it is read byte by byte: lines are short.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE_BYTES:
        data = connection.recv(1)
        if not data:
            return ""
        line += data
    return line.decode(errors="replace").rstrip("\n")
