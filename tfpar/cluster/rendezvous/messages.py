"""What the chief and a worker send each other, one line each, and how both prove that they belong to the job.

chief to worker     "tfpar CHALLENGE"       as soon as it connects
worker to chief     "RANK CHALLENGE PROOF"
chief to worker     "PROOF MISSING"         a list in JSON, once all are there or the time is over
                    "refused"               instead, after a wrong proof
"""

from __future__ import annotations

import json
import re
import secrets
from typing import NamedTuple

from tfpar.cluster import job_secret
from tfpar.cluster.tf_config import Job

LONGEST_GREETING_BYTES = 256  # of the chief's and of a worker's
LONGEST_ANSWER_BYTES = 1 << 20
REFUSED = b"refused\n"
_CHALLENGE = r"[0-9a-f]{32}"


class Challenges(NamedTuple):
    """The random texts of both sides: a proof over them is of no use on another connection."""

    chief: str
    worker: str


def new_challenge() -> str:
    """Return a random text."""
    return secrets.token_hex(16)


def greeting(challenge: str) -> bytes:
    """Return what the chief sends first."""
    return f"tfpar {challenge}\n".encode()


def read_greeting(line: bytes) -> str | None:
    """Return the chief's challenge; None if this is no chief of a job."""
    match = re.fullmatch(rf"tfpar ({_CHALLENGE})\n", line.decode(errors="replace"))
    return match and match[1]


def hello(rank: int, challenges: Challenges, secret: bytes) -> bytes:
    """Return what a worker sends."""
    return f"{rank} {challenges.worker} {_worker_proof(rank, challenges, secret)}\n".encode()


def read_hello(line: bytes, chief_challenge: str, num_workers: int, secret: bytes) -> tuple[int, Challenges] | None:
    """Return a worker's rank and the challenges; None if its proof is wrong or it is no worker of the job."""
    match = re.fullmatch(rf"([0-9]{{1,9}}) ({_CHALLENGE}) ([0-9a-f]{{64}})\n", line.decode(errors="replace"))
    if match is None or not 0 < int(match[1]) < num_workers:
        return None
    rank, challenges = int(match[1]), Challenges(chief_challenge, match[2])
    if not job_secret.is_proof(match[3], secret, "worker", *challenges, str(rank)):
        return None
    return rank, challenges


def answer(missing: list[str], challenges: Challenges, secret: bytes) -> bytes:
    """Return what the chief sends last."""
    text = json.dumps(missing)
    return f"{job_secret.proof(secret, 'chief', *challenges, text)} {text}\n".encode()


def read_answer(line: bytes, challenges: Challenges, job: Job, secret: bytes) -> list[str] | None:
    """Return the addresses that are missing; None if the chief of this job did not write that."""
    claimed, _, text = line.decode(errors="replace").removesuffix("\n").partition(" ")
    if not job_secret.is_proof(claimed, secret, "chief", *challenges, text):
        return None
    try:
        missing = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # Without a secret anybody can prove to have it: what is printed must be of this job.
    is_list = isinstance(missing, list) and all(isinstance(one, str) and one in job.addresses for one in missing)
    return missing if is_list else None


def _worker_proof(rank: int, challenges: Challenges, secret: bytes) -> str:
    return job_secret.proof(secret, "worker", *challenges, str(rank))
