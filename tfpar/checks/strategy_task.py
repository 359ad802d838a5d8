"""Three steps of a user's model under its strategy and on one device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar import comparable, config, strategies
from tfpar.checks.child_program import at_stage
from tfpar.checks.model_source import ModelSource, first_batch, make_trainer, source_of
from tfpar.full_precision import full_precision
from tfpar.parity import log_differences, weight_differences

NUM_STEPS = 3


def compare(source: dict[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Train three steps under the strategy and on one device, as `tfpar.check_parity` does.

    Args:
        source: The fields of a `ModelSource`.
        devices: Devices of the strategy. Without GPUs they are logical CPUs other than the first, which is the host.
    """
    found = source_of(source)
    settings = settings_on(found.run().strategy, devices)
    with default_device(devices), full_precision():
        strategy = strategies.from_settings(settings)
        on_one_device = functools.partial(_on_one_device, found, strategy, devices[0])
        model, (logs, batch, switched_off), precision = comparable.trained(on_one_device)
        at_stage(f"three steps of {settings.kind}")
        trainer, _ = make_trainer(found, strategy, precision.dtype)
        own_logs = _trained(trainer, strategy, batch)[0]
    by_weight = weight_differences(trainer.model.get_weights(), model.get_weights())
    paths = [variable.path for variable in trainer.model.weights]
    return {
        "strategy": strategy.describe(),
        "logs": log_differences(own_logs, logs),
        "weights": dict(zip(paths, by_weight, strict=True)),
        "finite": bool(np.isfinite(own_logs.get("loss", 0.0)).all()),
        "switched_off": switched_off,
        "conditions": comparable.switched_off_clause(switched_off),
        "bound": comparable.TOLERANCES[precision.dtype],
        "precision": precision.describe(),
    }


def _on_one_device(
    source: ModelSource, strategy: tfpar.Strategy, device: str, dtype: str
) -> tuple[keras.Model, tuple[dict[str, Any], Any, list[str]]]:
    """Train on one device; return the model, its logs, the batch, and the layers that were switched off."""
    at_stage("three steps on one device")
    trainer, dataset = make_trainer(source, tfpar.SingleDevice(device), dtype)
    # One batch for both: a second dataset may be shuffled in another order.
    batch = tf.nest.map_structure(lambda value: _in_type(value, dtype), first_batch(dataset))
    logs, switched_off = _trained(trainer, strategy, batch)
    return trainer.model, (logs, batch, switched_off)


def default_device(devices: Sequence[str]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the first device has what requests none, as the first GPU of a machine has it."""
    return contextlib.nullcontext() if devices[0].startswith("GPU") else tf.device(devices[0])


def settings_on(settings: config.Strategy, devices: Sequence[str]) -> config.Strategy:
    """Return the settings of a strategy with other devices; "auto" becomes the kind that fits them."""
    if isinstance(settings, config.Auto):
        several = len(devices) > 1
        settings = config.Mirrored(batch_dependent_layers=settings.batch_dependent_layers) if several else (
            config.SingleDevice())  # fmt: skip
    if isinstance(settings, config.SingleDevice):
        return settings.model_copy(update={"device": devices[0]})
    # The devices of this machine stand for those of other workers.
    across = {"across_workers": False} if isinstance(settings, config.Pipeline) else {}
    return settings.model_copy(update={"devices": tuple(devices), "num_logical_cpus": 1, **across})


def _trained(trainer: tfpar.Trainer, strategy: tfpar.Strategy, batch: Any) -> tuple[dict[str, Any], list[str]]:
    repeated = tf.data.Dataset.from_tensors(batch).repeat(NUM_STEPS)
    with comparable.without_differences_by_design(strategy) as switched_off:
        return trainer.fit(repeated, epochs=1, verbose=0).history, switched_off


def _in_type(value: Any, dtype: str) -> Any:
    return value if value is None or not np.issubdtype(value.dtype, np.floating) else value.astype(dtype)
