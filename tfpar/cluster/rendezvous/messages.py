"""The messages of the rendezvous, one line each, with proofs that both sides belong to the job.

chief to worker     "tfpar CHALLENGE"       on connection
worker to chief     "RANK CHALLENGE PROOF STRATEGY"
chief to worker     "PROOF ANSWER"          in JSON, once all are connected or time is up: the missing workers, and
                                            the first with another strategy
                    "refused"               instead, after a wrong proof
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfpar.cluster import job_secret
from tfpar.cluster.tf_config import JobConfig

# Receives the rank of another worker and the open connection to it.
Keep = Callable[[int, socket.socket], None]
LONGEST_GREETING_BYTES = 256  # of the first line of each side
LONGEST_ANSWER_BYTES = 1 << 20
REFUSED = b"refused\n"
_CHALLENGE = r"[0-9a-f]{32}"
_STRATEGY = r"[A-Za-z_(=') ]{0,80}"  # empty where the caller names none


class Challenges(NamedTuple):
    """The random texts of both sides, so that a proof is valid on one connection only."""

    chief: str
    worker: str


class Hello(NamedTuple):
    """The authenticated line of a worker."""

    rank: int
    challenges: Challenges
    strategy: str


class Difference(NamedTuple):
    """A worker whose strategy differs from the chief's.

    Args:
        rank: The rank of the worker.
        strategy: The name of its strategy.
        chiefs: The name of the chief's strategy.
    """

    rank: int
    strategy: str
    chiefs: str


class Outcome(NamedTuple):
    """The outcome of the rendezvous.

    Attributes:
        missing: The addresses of the missing workers.
        remark: A sentence to append to the error; may be empty.
        reasons: Why missing addresses could not be reached, where this side tried.
        difference: The first worker with another strategy, if no worker is missing.
    """

    missing: list[str]
    remark: str = ""
    reasons: Mapping[str, str] = {}
    difference: Difference | None = None


def new_challenge() -> str:
    """Return 128 random bits in hexadecimal digits."""
    return secrets.token_hex(16)


def greeting(challenge: str) -> bytes:
    """Return the first line of the chief."""
    return f"tfpar {challenge}\n".encode()


def read_greeting(line: bytes) -> str | None:
    """Return the chief's challenge; None if the line is not a greeting."""
    match = re.fullmatch(rf"tfpar ({_CHALLENGE})\n", line.decode(errors="replace"))
    return match and match[1]


def hello(rank: int, challenges: Challenges, secret: bytes, strategy: str = "") -> bytes:
    """Return the line of a worker."""
    proof = job_secret.proof(secret, "worker", *challenges, str(rank), strategy)
    return f"{rank} {challenges.worker} {proof} {strategy}\n".encode()


def read_hello(line: bytes, chief_challenge: str, num_workers: int, secret: bytes) -> Hello | None:
    """Parse the line of a worker; None if its proof or rank is invalid."""
    pattern = rf"([0-9]{{1,9}}) ({_CHALLENGE}) ([0-9a-f]{{64}}) ({_STRATEGY})\n"
    match = re.fullmatch(pattern, line.decode(errors="replace"))
    if match is None or not 0 < int(match[1]) < num_workers:
        return None
    rank, challenges, strategy = received = Hello(int(match[1]), Challenges(chief_challenge, match[2]), match[4])
    is_proven = job_secret.is_proof(match[3], secret, "worker", *challenges, str(rank), strategy)
    return received if is_proven else None


def answer(missing: list[str], challenges: Challenges, secret: bytes, difference: Difference | None = None) -> bytes:
    """Return the last line of the chief."""
    text = json.dumps([missing, difference])
    return f"{job_secret.proof(secret, 'chief', *challenges, text)} {text}\n".encode()


def read_answer(line: bytes, challenges: Challenges, job: JobConfig, secret: bytes) -> Outcome | None:
    """Parse the chief's answer; None if its proof or content is invalid."""
    claimed, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
    if not job_secret.is_proof(claimed, secret, "chief", *challenges, text):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # Without a job secret, any program can compute the proof: accept only addresses of this job, and plain names.
    if not isinstance(content, list) or len(content) != 2:
        return None
    missing, difference = content
    if not isinstance(missing, list) or not all(isinstance(name, str) and name in job.addresses for name in missing):
        return None
    if difference is None:
        return Outcome(missing)
    return Outcome(missing, difference=Difference(*difference)) if _is_difference(difference, job) else None


def _is_difference(content: object, job: JobConfig) -> bool:
    match content:
        case [int(rank), str(strategy), str(chiefs)] if not isinstance(rank, bool):
            are_names = all(re.fullmatch(_STRATEGY, name) for name in (strategy, chiefs))
            return 0 < rank < job.num_workers and are_names
    return False
