"""Checks of the network between workers: versions, clocks, ports in both directions, bandwidth.

The chief queries the workers. A connection carries one request:

    worker to client    "tfpar-doctor CHALLENGE"
    client to worker    "PROOF REQUEST"             a proof of the job secret over challenge and request (JSON)
    client to worker    bytes                       for the request "receive" only
    worker to client    ANSWER                      in JSON
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfpar.checks import machine
from tfpar.checks.processes import Task, started
from tfpar.checks.report import Check
from tfpar.cluster import job_secret, reachability, tf_config
from tfpar.cluster.rendezvous.chief import listening
from tfpar.files.code_listing import code_listing
from tfpar.launcher.reserved_ports import ReservedPorts

START_SECONDS = 30.0
SERVE_SECONDS = 120.0
_GREETING = "tfpar-doctor"
_LONGEST_LINE_BYTES, _BLOCK_BYTES = 1 << 16, 1 << 20
_SENT_BYTES, _MOST_BYTES = 32 << 20, 256 << 20
_ANSWER_SECONDS, _REACH_SECONDS = 60.0, 3.0
_ACCEPT_SECONDS = 0.2  # how often listeners check whether the checks have ended
_CLOCK_BOUND_SECONDS = 1.0
_MOST_PAIRS = 30  # above, only the pairs of a ring are measured
_SLOW_FRACTION = 0.5  # of the median bandwidth
_ROUND_TRIPS = 5


def check_local(num_workers: int) -> Iterator[Check]:
    """Check the network between local workers: this process is the chief and starts the others."""
    secret = (os.environ.get(job_secret.VARIABLE) or job_secret.new()).encode()
    with ReservedPorts(num_workers) as ports:
        addresses = tuple(ports.addresses)
        others = [
            Task(
                "workers.serve",
                {"job": tf_config.JobConfig(addresses, rank, "worker"), "secret": secret},
                SERVE_SECONDS,
            )
            for rank in range(1, num_workers)
        ]
        with started(others, len(others)):
            yield from check(tf_config.JobConfig(addresses, 0, "chief"), secret)


def facts() -> dict[str, str]:
    """Return the versions, and a hash of tfpar's code, which must be equal on all workers."""
    versions = {name: str(value) for name, value in machine.versions().values.items() if name != "system"}
    return {**versions, "code of tfpar": hashlib.sha256(code_listing().encode()).hexdigest()[:12]}


class Service:
    """Answer requests at the address of a worker, in background threads.

    Raises:
        OSError: If the address is taken.
    """

    def __init__(self, job: tf_config.JobConfig, secret: bytes) -> None:
        self._job, self._secret = job, secret
        self.has_ended = threading.Event()
        for listener in listening(job, job.rank):
            listener.settimeout(_ACCEPT_SECONDS)
            threading.Thread(target=self._serve, args=[listener], name=_GREETING, daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        with listener:
            while not self.has_ended.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            connection.settimeout(_ANSWER_SECONDS)
            with connection.makefile("rwb") as stream:
                challenge = secrets.token_hex(16)
                _write_line(stream, f"{_GREETING} {challenge}")
                claimed, _, text = _read_line(stream).partition(" ")
                if job_secret.is_proof(claimed, self._secret, _GREETING, challenge, text):
                    _write_line(stream, json.dumps(self._result(json.loads(text), stream)))

    def _result(self, request: dict[str, Any], stream: Any) -> Any:
        match request["do"]:
            case "facts":
                return facts()
            case "clock":
                return time.time()
            case "reach":
                return reachability.problems(self._job.peers, _REACH_SECONDS)
            case "receive":
                left = min(int(request["num_bytes"]), _MOST_BYTES)
                while left > 0:
                    left -= len(stream.read(min(left, _BLOCK_BYTES))) or left
                return None
            case "send":  # to a worker of this job only
                return seconds_to_send(self._job.addresses[int(request["rank"])], self._secret)
            case "end":
                self.has_ended.set()
                return None
        raise ValueError(f"There is no request {request['do']!r}.")


def ask(address: str, secret: bytes, do: str, num_bytes: int = 0, **request: Any) -> Any:
    """Send a request to a worker, and return its answer.

    Args:
        address: The address of the worker.
        secret: The job secret; may be empty.
        do: The name of the request.
        num_bytes: Number of bytes to send after the request.
        **request: Further fields of the request.

    Raises:
        OSError: If the worker cannot be reached, or does not answer.
        ValueError: If another program answers, or the worker has another secret.
    """
    with socket.create_connection(tf_config.split_address(address), timeout=5.0) as connection:
        connection.settimeout(_ANSWER_SECONDS)
        with connection.makefile("rwb") as stream:
            greeting, _, challenge = _read_line(stream).partition(" ")
            if greeting != _GREETING:
                raise ValueError("another program answers there")
            text = json.dumps({"do": do, "num_bytes": num_bytes, **request})
            _write_line(stream, f"{job_secret.proof(secret, _GREETING, challenge, text)} {text}")
            block = bytes(_BLOCK_BYTES)
            for begin in range(0, num_bytes, _BLOCK_BYTES):
                stream.write(block[: num_bytes - begin])
            stream.flush()
            answer = _read_line(stream)
    if not answer:
        raise ValueError(f"it has another {job_secret.VARIABLE}, or ended")
    return json.loads(answer)


def _write_line(stream: Any, text: str) -> None:
    stream.write(f"{text}\n".encode())
    stream.flush()


def _read_line(stream: Any) -> str:
    line: bytes = stream.readline(_LONGEST_LINE_BYTES)
    return line.decode(errors="replace").rstrip("\n")


def seconds_to_send(address: str, secret: bytes) -> float:
    """Send `_SENT_BYTES` to a worker, and return the seconds until its answer."""
    ask(address, secret, "receive", _BLOCK_BYTES)  # TCP slow start
    begin = time.perf_counter()
    ask(address, secret, "receive", _SENT_BYTES)
    return time.perf_counter() - begin


def serve(job: tf_config.JobConfig, secret: bytes) -> bool:
    """Answer the chief until its checks end; return False if they exceed the time limit."""
    service = Service(job, secret)
    try:
        return service.has_ended.wait(SERVE_SECONDS)
    finally:
        service.has_ended.set()


def check(job: tf_config.JobConfig, secret: bytes) -> Iterator[Check]:
    """Check the network of a job, on its chief."""
    service = Service(job, secret)
    answers = {rank: _facts(address, secret) for rank, address in enumerate(job.addresses)}
    present = {rank: answer for rank, answer in answers.items() if not isinstance(answer, str)}
    try:
        for rank, reason in answers.items():
            if isinstance(reason, str):
                yield _unreachable(rank, job.addresses[rank], reason)
        if len(present) > 1:
            yield _versions(present)
            yield _clocks(job, secret, list(present)[1:])
            yield from _ports(job, secret, list(present))
            yield _bandwidth(job, secret, list(present))
    finally:
        for rank in list(present)[1:]:
            with contextlib.suppress(OSError, ValueError):
                ask(job.addresses[rank], secret, "end")
        service.has_ended.set()


def _facts(address: str, secret: bytes) -> dict[str, str] | str:
    """Return the facts of a worker, or why it does not answer."""
    ends_seconds = time.monotonic() + START_SECONDS
    while True:
        try:
            versions: dict[str, str] = ask(address, secret, "facts")
            return versions
        except (OSError, ValueError) as error:
            if time.monotonic() > ends_seconds:
                return reachability.reason(error)
            time.sleep(0.2)


def _unreachable(rank: int, address: str, reason: str) -> Check:
    figure = f"worker {rank} at {address} does not answer within {START_SECONDS:g} s: {reason}"
    way_out = (
        "Start the doctor there, too; open the port in the firewalls between the machines; check the address in "
        "TF_CONFIG."
    )
    return Check(f"worker {rank}", "WRONG", figure, "", way_out, {"address": address})


def _versions(present: Mapping[int, dict[str, str]]) -> Check:
    chiefs = present[0]
    different = [
        f"worker {rank} has {name} {own.get(name)} instead of {chiefs[name]}"
        for rank, own in present.items()
        for name in chiefs
        if own.get(name) != chiefs[name]
    ]
    values = {"versions": {str(rank): own for rank, own in present.items()}}
    if different:
        way_out = "Install the same versions everywhere: workers of different ones can differ without an error."
        return Check("versions of workers", "WRONG", "; ".join(different), "equal", way_out, values)
    return Check("versions of workers", "ok", f"{len(present)} workers have equal versions and code", values=values)


def _clocks(job: tf_config.JobConfig, secret: bytes, ranks: Sequence[int]) -> Check:
    offsets = {rank: _offset_seconds(job.addresses[rank], secret) for rank in ranks}
    worst = max(offsets, key=lambda rank: abs(offsets[rank]))
    is_far = abs(offsets[worst]) > _CLOCK_BOUND_SECONDS
    figure = f"worker {worst} differs most from the chief, by {offsets[worst]:+.3f} s"
    way_out = "Let chronyd or ntpd set it: times in logs and checkpoints are compared between machines."
    values = {"offset_seconds": {str(rank): offset for rank, offset in offsets.items()}}
    bound = f"{_CLOCK_BOUND_SECONDS:g} s"
    return Check("clocks", "slow" if is_far else "ok", figure, bound, way_out if is_far else "", values)


def _offset_seconds(address: str, secret: bytes) -> float:
    """Return the clock of a worker minus this one, from the fastest of several round trips."""
    round_trips = []
    for _ in range(_ROUND_TRIPS):
        begin = time.time()
        theirs = float(ask(address, secret, "clock"))
        end = time.time()
        round_trips.append((end - begin, theirs - (begin + end) / 2))
    return min(round_trips)[1]


def _ports(job: tf_config.JobConfig, secret: bytes, ranks: Sequence[int]) -> Iterator[Check]:
    closed = [
        (source, job.addresses.index(address), reason)
        for source in ranks
        for address, reason in ask(job.addresses[source], secret, "reach").items()
    ]
    closed = [row for row in closed if row[1] in ranks]  # the others are reported as unreachable already
    for source, target, reason in closed:
        way_out = f"Open port {tf_config.split_address(job.addresses[target])[1]} there for worker {source}."
        figure = f"worker {source} cannot connect to {job.addresses[target]}: {reason}"
        yield Check(f"port of worker {target}", "WRONG", figure, "", way_out)
    if not closed:
        yield Check("ports", "ok", f"all {len(ranks) * (len(ranks) - 1)} ordered pairs of workers can connect")


def _bandwidth(job: tf_config.JobConfig, secret: bytes, ranks: Sequence[int]) -> Check:
    pairs = [(source, target) for source in ranks for target in ranks if source != target]
    if len(pairs) > _MOST_PAIRS:
        pairs = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    rates: dict[tuple[int, int], float] = {}
    for source, target in pairs:
        try:
            seconds = float(ask(job.addresses[source], secret, "send", rank=target))
        except (OSError, ValueError):
            figure = f"worker {source} cannot send {_SENT_BYTES >> 20} MiB to worker {target}"
            return Check("bandwidth", "WRONG", figure, "", "A firewall may cut connections, or an MTU be too large.")
        rates[source, target] = _SENT_BYTES * 8e-9 / max(seconds, 1e-9)
    median, (source, target) = statistics.median(rates.values()), min(rates, key=lambda pair: rates[pair])
    slowest = rates[source, target]
    is_slow = slowest < _SLOW_FRACTION * median
    figure = f"median {median:.2f} Gbit/s, slowest {slowest:.2f} from worker {source} to worker {target}"
    way_out = f"Every all-reduce waits for it: look at the cable, the switch and the link of worker {target}."
    values = {"gbit_per_second": {f"{pair[0]} to {pair[1]}": rate for pair, rate in rates.items()}}
    bound = f"{_SLOW_FRACTION:g} of the median"
    return Check("bandwidth", "slow" if is_slow else "ok", figure, bound, way_out if is_slow else "", values)
