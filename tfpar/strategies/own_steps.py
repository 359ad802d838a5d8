"""The choice of how replicas run a model's own steps."""

from __future__ import annotations

from typing import Literal

from tfpar.engines.engine import Engine

OwnSteps = Literal["exact", "average"]


def check_own_steps(own_steps: str) -> None:
    """Refuse another value than those of `OwnSteps`.

    Raises:
        ValueError: If it is none of them.
    """
    if own_steps not in ("exact", "average"):
        raise ValueError(f'own_steps must be "exact" or "average", received {own_steps!r}. Leave it out for "exact".')


def averaged_steps(engine: Engine) -> str:
    """Return the end of a description where replicas average their own steps, else nothing."""
    return "; own train steps are averaged, not those of one device" * engine.averages_own_steps
