"""Three steps of a user's model under its strategy and on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar import config, strategies
from tfpar._compat import keras_model
from tfpar.checks.child_program import at_stage
from tfpar.checks.model_source import first_batch, make_trainer, source_of
from tfpar.full_precision import full_precision
from tfpar.parity import relative_difference, weight_differences

NUM_STEPS = 3


def compare(source: dict[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Train three steps in float64 under the strategy and on one device.

    Args:
        source: The fields of a `ModelSource`.
        devices: Devices of the strategy. Without GPUs they are logical CPUs other than the first, which is the host.
    """
    found = source_of(source)
    settings = settings_on(found.run().strategy, devices)
    with default_device(devices), full_precision():
        strategy = strategies.from_settings(settings)
        at_stage("three steps on one device")
        trainer, dataset = make_trainer(found, tfpar.SingleDevice(devices[0]), "float64")
        # One batch for both: a second dataset may be shuffled in another order.
        batch = tf.nest.map_structure(_in_float64, first_batch(dataset))
        logs, weights = _trained(trainer, batch)
        at_stage(f"three steps of {settings.kind}")
        own_trainer, _ = make_trainer(found, strategy, "float64")
        own_logs, own_weights = _trained(own_trainer, batch)
    model = own_trainer.model
    by_weight = weight_differences(own_weights, weights)
    differences = {variable.path: value for variable, value in zip(model.weights, by_weight, strict=True)}
    return {
        "strategy": strategy.describe(),
        "loss": relative_difference(np.array(own_logs["loss"]), np.array(logs["loss"])),
        "weights": differences,
        "finite": bool(np.isfinite(own_logs["loss"]).all()),
        "by_design": by_design(model),
    }


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


def _trained(trainer: tfpar.Trainer, batch: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    repeated = tf.data.Dataset.from_tensors(batch).repeat(NUM_STEPS)
    logs = trainer.fit(repeated, epochs=1, verbose=0).history
    return logs, trainer.model.get_weights()


def _in_float64(value: Any) -> Any:
    if value is None or not np.issubdtype(value.dtype, np.floating):
        return value
    return value.astype("float64")


def by_design(model: keras.Model) -> list[str]:
    """Return the layers whose results depend on how a batch is divided: random ones, and BatchNormalization."""
    found = []
    for layer in keras_model.all_layers(model):
        is_random = getattr(layer, "seed_generator", None) is not None and bool(getattr(layer, "rate", True))
        is_normalizing = isinstance(layer, keras.layers.BatchNormalization)
        if is_random or is_normalizing:
            found.append(layer.name)
    return found
