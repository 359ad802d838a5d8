"""The secret shared by the workers of a job, and proofs that do not reveal it."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping

VARIABLE = "TFPAR_JOB_SECRET"
FEWEST_CHARACTERS = 16


def new() -> str:
    """Return a secret of 256 random bits.

    Example:
        >>> len(new())
        64
    """
    return secrets.token_hex(32)


def from_environment(environment: Mapping[str, str]) -> bytes:
    """Return the job secret of this process, stripped of whitespace; empty if it is not set.

    It is read from an environment variable because other users of the machine can see flags.

    Args:
        environment: Environment variables, such as `os.environ`.

    Raises:
        ValueError: If the secret is shorter than 16 characters.

    Example:
        >>> from_environment({"TFPAR_JOB_SECRET": "0123456789abcdef"})
        b'0123456789abcdef'
    """
    secret = environment.get(VARIABLE, "").strip()
    if secret and len(secret) < FEWEST_CHARACTERS:
        raise ValueError(
            f"{VARIABLE} must have at least {FEWEST_CHARACTERS} characters, received {len(secret)}. Set the same "
            "random text on all workers, such as what openssl rand -hex 32 prints."
        )
    return secret.encode(errors="surrogateescape")


def proof(secret: bytes, *parts: str) -> str:
    """Return the HMAC-SHA-256 (RFC 2104) of `parts`, which proves knowledge of the secret.

    Example:
        >>> len(proof(b"0123456789abcdef", "worker", "1"))
        64
    """
    return hmac.new(secret, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: str, secret: bytes, *parts: str) -> bool:
    """Return whether `claimed` is the proof of `parts`, in constant time."""
    return hmac.compare_digest(claimed.encode(), proof(secret, *parts).encode())
