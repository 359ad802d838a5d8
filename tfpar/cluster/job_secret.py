"""The job secret that all workers share, and proofs that do not reveal it."""

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
    """Return the job secret of this process; empty if it is not set.

    Unlike a flag, an environment variable is not visible to other users of the machine.

    Args:
        environment: The variables of this process, as `os.environ`. Whitespace around the secret is ignored.

    Raises:
        ValueError: If it is so short that it can be guessed.

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
    """Return a proof of the secret over some texts: their HMAC (RFC 2104) with SHA-256.

    Args:
        secret: The job secret, from `from_environment`.
        parts: The texts.

    Example:
        >>> len(proof(b"0123456789abcdef", "worker", "1"))
        64
    """
    return hmac.new(secret, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def is_proof(claimed: str, secret: bytes, *parts: str) -> bool:
    """Return whether a text is the proof, compared in constant time.

    Args:
        claimed: The received text.
        secret: The job secret, from `from_environment`.
        parts: The texts.
    """
    return hmac.compare_digest(claimed.encode(), proof(secret, *parts).encode())
