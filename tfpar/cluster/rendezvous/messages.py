"""The messages of the rendezvous, one line each, and the proofs that both sides belong to the job.

chief to worker     "tfpar CHALLENGE"       at the connection
worker to chief     "RANK CHALLENGE PROOF"
chief to worker     "PROOF MISSING"         a list in JSON, once all are connected or at the time limit
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
from tfpar.cluster.tf_config import Job

# Takes the rank of another worker, and the open connection to it.
Keep = Callable[[int, socket.socket], None]
LONGEST_GREETING_BYTES = 256  # of the first line of each side
LONGEST_ANSWER_BYTES = 1 << 20
REFUSED = b"refused\n"
_CHALLENGE = r"[0-9a-f]{32}"


class Challenges(NamedTuple):
    """The random texts of both sides, so that a proof over them is invalid on another connection."""

    chief: str
    worker: str


class Outcome(NamedTuple):
    """What one side of the rendezvous found.

    Attributes:
        missing: The addresses of the missing workers.
        remark: More for the error, "" for nothing.
        reasons: For a missing address the reason why it could not be reached, as far as this side tried.
    """

    missing: list[str]
    remark: str = ""
    reasons: Mapping[str, str] = {}


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


def hello(rank: int, challenges: Challenges, secret: bytes) -> bytes:
    """Return the line of a worker."""
    return f"{rank} {challenges.worker} {_worker_proof(rank, challenges, secret)}\n".encode()


def read_hello(line: bytes, chief_challenge: str, num_workers: int, secret: bytes) -> tuple[int, Challenges] | None:
    """Return a worker's rank and the challenges; None if its proof or its rank is invalid."""
    match = re.fullmatch(rf"([0-9]{{1,9}}) ({_CHALLENGE}) ([0-9a-f]{{64}})\n", line.decode(errors="replace"))
    if match is None or not 0 < int(match[1]) < num_workers:
        return None
    rank, challenges = int(match[1]), Challenges(chief_challenge, match[2])
    if not job_secret.is_proof(match[3], secret, "worker", *challenges, str(rank)):
        return None
    return rank, challenges


def answer(missing: list[str], challenges: Challenges, secret: bytes) -> bytes:
    """Return the last line of the chief."""
    text = json.dumps(missing)
    return f"{job_secret.proof(secret, 'chief', *challenges, text)} {text}\n".encode()


def read_answer(line: bytes, challenges: Challenges, job: Job, secret: bytes) -> list[str] | None:
    """Return the missing addresses; None if the proof of the chief is invalid."""
    claimed, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
    if not job_secret.is_proof(claimed, secret, "chief", *challenges, text):
        return None
    try:
        missing = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # Without a job secret any program can compute the proof: print only addresses of this job.
    is_list = isinstance(missing, list) and all(isinstance(one, str) and one in job.addresses for one in missing)
    return missing if is_list else None


def _worker_proof(rank: int, challenges: Challenges, secret: bytes) -> str:
    return job_secret.proof(secret, "worker", *challenges, str(rank))
