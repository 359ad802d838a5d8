"""The messages of the rendezvous, one line each, and the proofs that both sides belong to the job.

chief to worker     "tfpar CHALLENGE"       at the connection
worker to chief     "RANK CHALLENGE PROOF STRATEGY"
chief to worker     "PROOF ANSWER"          in JSON, once all are connected or at the time limit: the missing workers,
                                            and one that creates another strategy
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

# Takes the rank of another worker, and the open connection to it.
Keep = Callable[[int, socket.socket], None]
LONGEST_GREETING_BYTES = 256  # of the first line of each side
LONGEST_ANSWER_BYTES = 1 << 20
REFUSED = b"refused\n"
_CHALLENGE = r"[0-9a-f]{32}"
_STRATEGY = r"[A-Za-z_(=') ]{0,80}"  # empty where the caller names none


class Challenges(NamedTuple):
    """The random texts of both sides, so that a proof over them is invalid on another connection."""

    chief: str
    worker: str


class Hello(NamedTuple):
    """The line of a worker.

    Args:
        rank: Its rank.
        challenges: The challenges of its connection.
        strategy: The strategy that it creates.
    """

    rank: int
    challenges: Challenges
    strategy: str


class Difference(NamedTuple):
    """A worker that creates another strategy than the chief.

    Args:
        rank: Its rank.
        strategy: Its strategy.
        chiefs: The strategy of the chief.
    """

    rank: int
    strategy: str
    chiefs: str


class Outcome(NamedTuple):
    """What one side of the rendezvous found.

    Attributes:
        missing: The addresses of the missing workers.
        remark: More for the error, "" for nothing.
        reasons: For a missing address the reason why it could not be reached, as far as this side tried.
        difference: The first worker with another strategy than the chief, if no worker is missing.
    """

    missing: list[str]
    remark: str = ""
    reasons: Mapping[str, str] = {}
    difference: Difference | None = None


def new_challenge() -> str:
    """Return a random text."""
    return secrets.token_hex(16)


def greeting(challenge: str) -> bytes:
    """Return the first line of the chief."""
    return f"tfpar {challenge}\n".encode()


def read_greeting(line: bytes) -> str | None:
    """Return the chief's challenge; None if the line is not that of a chief."""
    match = re.fullmatch(rf"tfpar ({_CHALLENGE})\n", line.decode(errors="replace"))
    return match and match[1]


def hello(rank: int, challenges: Challenges, secret: bytes, strategy: str = "") -> bytes:
    """Return the line of a worker."""
    proof = job_secret.proof(secret, "worker", *challenges, str(rank), strategy)
    return f"{rank} {challenges.worker} {proof} {strategy}\n".encode()


def read_hello(line: bytes, chief_challenge: str, num_workers: int, secret: bytes) -> Hello | None:
    """Return what a worker's line says; None if its proof or its rank is invalid."""
    pattern = rf"([0-9]{{1,9}}) ({_CHALLENGE}) ([0-9a-f]{{64}}) ({_STRATEGY})\n"
    match = re.fullmatch(pattern, line.decode(errors="replace"))
    if match is None or not 0 < int(match[1]) < num_workers:
        return None
    found = Hello(int(match[1]), Challenges(chief_challenge, match[2]), match[4])
    is_proven = job_secret.is_proof(match[3], secret, "worker", *found.challenges, str(found.rank), found.strategy)
    return found if is_proven else None


def answer(missing: list[str], challenges: Challenges, secret: bytes, difference: Difference | None = None) -> bytes:
    """Return the last line of the chief."""
    text = json.dumps([missing, difference])
    return f"{job_secret.proof(secret, 'chief', *challenges, text)} {text}\n".encode()


def read_answer(line: bytes, challenges: Challenges, job: JobConfig, secret: bytes) -> Outcome | None:
    """Return what the chief found; None if its proof is invalid."""
    claimed, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
    if not job_secret.is_proof(claimed, secret, "chief", *challenges, text):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # Without a job secret any program can compute the proof: print only addresses of this job, and names.
    if not isinstance(found, list) or len(found) != 2:
        return None
    missing, difference = found
    if not isinstance(missing, list) or not all(isinstance(one, str) and one in job.addresses for one in missing):
        return None
    if difference is None:
        return Outcome(missing)
    return Outcome(missing, difference=Difference(*difference)) if _is_difference(difference, job) else None


def _is_difference(found: object, job: JobConfig) -> bool:
    match found:
        case [int(rank), str(strategy), str(chiefs)] if not isinstance(rank, bool):
            names = (re.fullmatch(_STRATEGY, one) for one in (strategy, chiefs))
            return 0 < rank < job.num_workers and all(names)
    return False
