"""The broadcast of the chief's state to all workers before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from tfpar.checkpoint import Checkpoints, Position, model_state
from tfpar.loops.agreement import equal_workers
from tfpar.strategies import Strategy


def broadcast_initial_state(
    model: keras.Model, strategy: Strategy, checkpoints: Checkpoints | None, position: Position
) -> tuple[Position, dict[str, Any]]:
    """Restore the chief's newest checkpoint on all workers, or broadcast the chief's weights if there is none.

    Args:
        model: A built and compiled model.
        strategy: The strategy of the workers.
        checkpoints: The checkpoints, to which only the chief needs access.
        position: The position at which a run without a checkpoint begins; the chief's is used.

    Returns:
        The position of the run and the state of its callbacks.

    Raises:
        ValueError: If workers have built different models, or the checkpoint is of another model.
        RuntimeError: If weights differ after the broadcast.
    """
    if strategy.num_workers == 1:
        engine = strategy.engine
        restored = None if checkpoints is None else checkpoints.restore(model, engine.assign, engine.assign_replicas)
        return restored or (position, {})
    facts = {"the model": model_state.describe(model), "its settings": equal_workers.describe_settings(model)}
    strategy.job.require_equal(facts)
    with strategy.job.vote("Reading a checkpoint"):
        checkpoint = checkpoints.read() if checkpoints is not None and strategy.is_chief else None
    resumes, epoch = strategy.job.sum([checkpoint is not None, position.epoch if strategy.is_chief else 0])
    callbacks: dict[str, Any] = {}
    if resumes and checkpoints is not None:
        blob = strategy.job.broadcast(checkpoint)
        position, callbacks = checkpoints.load(model, blob, strategy.engine.assign, strategy.engine.assign_replicas)
    else:
        _broadcast(model, strategy)
        position = dataclasses.replace(position, epoch=int(epoch))
    _check_equal(model, strategy)
    return position, callbacks


def share_weights(model: keras.Model, strategy: Strategy) -> None:
    """Broadcast the chief's weights if those of another worker differ, as before the first `fit`."""
    if strategy.num_workers > 1 and equal_workers.weights_differ(strategy.job, model):
        _broadcast(model, strategy)


def _broadcast(model: keras.Model, strategy: Strategy) -> None:
    for variables in model_state.packs(model):
        chiefs = strategy.job.broadcast(model_state.to_bytes(variables) if strategy.is_chief else None)
        model_state.assign_bytes(variables, chiefs, strategy.engine.assign)


def _check_equal(model: keras.Model, strategy: Strategy) -> None:
    digest = model_state.digest(model)
    chiefs = strategy.job.agree(digest)
    (num_differing,) = strategy.job.sum([digest != chiefs])
    if num_differing:
        raise RuntimeError(
            f"All workers must begin with the chief's weights, and {int(num_differing)} of {strategy.num_workers} "
            f"hold different weights (SHA-256 {digest[:12]} here, {chiefs[:12]} on the chief). A faulty machine or "
            "library is the usual cause: compare the workers' versions."
        )
