"""The choice of how replicas run a model's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tfpar.engines.engine import Engine

OwnSteps = Literal["exact", "average"]


def check_own_steps(own_steps: str, batch_shares: Sequence[int] | None = None) -> None:
    """Refuse another value than those of `OwnSteps`, and an average over replicas with unequal shares.

    Raises:
        ValueError: If it is none of them, or excludes the shares.
    """
    if own_steps not in ("exact", "average"):
        raise ValueError(f'own_steps must be "exact" or "average", received {own_steps!r}. Leave it out for "exact".')
    if own_steps == "average" and batch_shares is not None:
        raise ValueError(
            'own_steps="average" gives every replica the same weight, whatever the size of its per-replica batch, '
            f"received batch_shares={list(batch_shares)}. Leave one of them out."
        )


def averaged_steps(engine: Engine) -> str:
    """Return the end of a description where replicas average their own steps, else nothing."""
    return "; own train steps are averaged, not those of one device" * engine.averages_own_steps
