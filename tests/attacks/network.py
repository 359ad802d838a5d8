"""Strangers on the port of a rendezvous: the workers connect nevertheless, or the missing one is named in time.

Each round is a job of three workers and up to 200 strangers, who connect to the chief's port before, while and after it
listens: silent, slow, talkative, with replayed and forged proofs, or in the chief's place. In some rounds a worker is
missing: then no stranger may be taken for it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from tests.support.ports import free_addresses
from tfpar.cluster import job_secret, rendezvous
from tfpar.cluster.rendezvous import messages
from tfpar.cluster.tf_config import JobConfig, split_address

NUM_WORKERS = 3
MISSING_SECONDS = 5.0  # form_seconds of a job that is not complete
FORM_SECONDS = 30.0  # of one that is: never needed
SLACK_SECONDS = 5.0  # machines are busy; the worker's own allowance for the chief's answer is as long
IMPOSTOR_SECONDS = 0.3
MARK = "\x1b[31mSTRANGER"  # nothing that a stranger sends may be printed


def main(arguments: Sequence[str]) -> int:
    """Hold rounds for `--seconds`, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks network")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each round has the next one")
    asked = parser.parse_args(arguments)
    findings, rounds, counts = [], 0, collections.Counter[str]()
    ends_seconds = time.monotonic() + asked.seconds
    while time.monotonic() < ends_seconds:
        found = attack(asked.seed + rounds, counts)
        findings += [f"round {asked.seed + rounds}: {text}" for text in found]
        rounds += 1
    print(*findings, sep="\n")
    counted = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{rounds} rounds: {counted}; {len(findings)} findings")
    return 1 if findings else 0


def attack(seed: int, counts: collections.Counter[str], missing_seconds: float = MISSING_SECONDS) -> list[str]:
    """Hold one round and return what was wrong in it.

    Args:
        seed: Decides which strangers come, and whether a worker is missing.
        counts: Counts each kind of stranger and of end.
        missing_seconds: `form_seconds` of a job that is not complete. All strangers are threads of this process: on a
            busy machine its workers need seconds, too.
    """
    rng, secret = random.Random(seed), job_secret.new()
    addresses = tuple(free_addresses(NUM_WORKERS))
    jobs = [JobConfig(addresses, rank, "worker" if rank else "chief") for rank in range(NUM_WORKERS)]
    absent = rng.choice([None, None, 1, 2])
    seconds = FORM_SECONDS if absent is None else missing_seconds
    stop = threading.Event()
    strangers = [
        threading.Thread(target=_persistent, args=(rng.choice(STRANGERS), addresses[0], rng.random(), stop, counts))
        for _ in range(rng.choice([1, 20, 200]))
    ]
    with mock.patch.dict(os.environ, {job_secret.VARIABLE: secret}), ThreadPoolExecutor(NUM_WORKERS) as pool:
        impostor = threading.Thread(target=_be_chief_for_a_moment, args=(addresses[0], random.Random(seed)))
        has_impostor = rng.random() < 0.3
        if has_impostor:
            counts["chiefs that were none"] += 1
            impostor.start()
        for stranger in strangers:
            stranger.start()
        began_seconds = time.monotonic()
        present = [job for job in jobs if job.rank != absent]
        delays = [rng.random() * 0.3 if job.rank else has_impostor * 2 * IMPOSTOR_SECONDS for job in present]
        ends = list(pool.map(_meet, present, [seconds] * len(present), delays))
        took_seconds = time.monotonic() - began_seconds
    stop.set()
    for stranger in [*strangers, impostor][: len(strangers) + has_impostor]:
        stranger.join()
    counts["jobs that met" if absent is None else "jobs with a missing worker"] += 1
    return list(_judge(ends, None if absent is None else addresses[absent], took_seconds, seconds, secret))


def _meet(job: JobConfig, seconds: float, delay_seconds: float) -> str:
    """Let a worker meet the others; return what it raises, or nothing."""
    time.sleep(delay_seconds)
    try:
        rendezvous.connect_workers(job, seconds)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _judge(ends: list[str], absent: str | None, took_seconds: float, seconds: float, secret: str) -> Sequence[str]:
    wrong = []
    for end in ends:
        if absent is None and end:
            wrong.append(f"all were there: {end[:400]}")
        if absent is not None and not re.match(rf"TimeoutError: All 3 .*\b{absent}( \([^)]*\))? did not\.", end):
            wrong.append(f"{absent} was missing: {end[:400]!r}")
        if "STRANGER" in end or secret in end:
            wrong.append(f"it must not be printed: {end[:400]!r}")
    most_seconds = 10.0 if absent is None else seconds + 2 * IMPOSTOR_SECONDS
    if took_seconds > most_seconds + SLACK_SECONDS:
        wrong.append(f"it took {took_seconds:.1f} s")
    return wrong


# Strangers: what each does with one connection to the chief's port


def silent(connection: socket.socket, patience: float) -> None:
    """Say nothing."""
    time.sleep(patience)


def gone(connection: socket.socket, patience: float) -> None:
    """Reset the connection at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def trickling(connection: socket.socket, patience: float) -> None:
    """Send a byte now and then."""
    for byte in b"1 0123456789abcdef":
        connection.send(bytes([byte]))
        time.sleep(patience / 10)


def talkative(connection: socket.socket, patience: float) -> None:
    """Send far more than a worker does."""
    connection.sendall(MARK.encode() * 100_000)


def binary(connection: socket.socket, patience: float) -> None:
    """Send what other protocols begin with, or noise."""
    rng = random.Random(patience)
    noise = rng.randbytes(rng.randrange(1, 400))
    preface = rng.choice([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 256, noise])
    connection.sendall(preface)
    connection.recv(1000)


def old(connection: socket.socket, patience: float) -> None:
    """Send a rank, and nothing that proves it."""
    connection.sendall(b"1\n2\n" if patience < 0.5 else b"1\n")
    connection.recv(1000)
    time.sleep(patience)


def forging(connection: socket.socket, patience: float) -> None:
    """Answer the challenge with another secret."""
    challenge = messages.read_greeting(connection.recv(1000))
    if challenge is not None:
        secret = b"" if patience < 0.3 else b"a guess at the secret"
        connection.sendall(messages.hello(1 + int(2 * patience), messages.Challenges(challenge, "0" * 32), secret))
        connection.recv(1000)


def replaying(connection: socket.socket, patience: float) -> None:
    """Send a proof that belongs to another challenge."""
    connection.sendall(f"{1 + int(2 * patience)} {'0' * 32} {'a' * 64}\n".encode())
    connection.recv(1000)


def half_closed(connection: socket.socket, patience: float) -> None:
    """Send the beginning of a line and close that direction."""
    connection.sendall(b"1 ")
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1000)
    time.sleep(patience)


Stranger = Callable[[socket.socket, float], None]
STRANGERS: list[Stranger] = [
    silent, gone, trickling, talkative, binary, old, forging, replaying, half_closed
]  # fmt: skip


def _persistent(
    stranger: Stranger, address: str, patience: float, stop: threading.Event, counts: collections.Counter[str]
) -> None:
    """Connect again and again, until the round is over."""
    while not stop.wait(0.01 + patience * 0.05):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(split_address(address), timeout=0.5) as connection,
        ):
            counts[f"{stranger.__name__} strangers"] += 1
            stranger(connection, patience)


def _be_chief_for_a_moment(address: str, rng: random.Random) -> None:
    """Answer the workers in the chief's place, and give the port back before the chief starts."""
    proof = "0" * 64
    answers = [
        MARK.encode() + b"\n",
        f'{proof} ["{MARK}"]\n'.encode(),
        b"\xff" * 1000,
        b"",
        messages.greeting("0" * 32),
    ]

    ends_seconds = time.monotonic() + IMPOSTOR_SECONDS
    with socket.create_server(split_address(address)) as server:
        while (left := ends_seconds - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.sendall(rng.choice([b"", messages.greeting("0" * 32)]) + rng.choice(answers))
