"""Facts of a run for its report, as JSON values: versions, machine, model, layout, memory."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar import config
from tfpar.cluster import cores, process_memory
from tfpar.runs import built_objects
from tfpar.runs.directory import RunDirectory
from tfpar.runs.reporting import header
from tfpar.runs.run_trainer import RunTrainer, class_names

MOST_LAYERS = 5000


def describe(run: config.Run, directory: RunDirectory, trainer: RunTrainer) -> dict[str, Any]:
    """Return the facts of a run that its other files do not record."""
    lines = header.lines(run, directory, trainer)
    model = trainer.model
    return {
        "versions": {
            "tfpar": tfpar.__version__,
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "NumPy": np.__version__,
            "Python": platform.python_version(),
        },
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cores": cores.num_allowed_cores(),
            "devices": _devices(),
            "workers": trainer.strategy.num_workers,
            **({"note": lines["note"]} if lines["note"] else {}),
        },
        "model": {
            "name": model.name,
            "parameters": model.count_params() if model.built else None,
            "precision": built_objects.describe_precision(model),
            "optimizer": lines["optimizer"],
            "data": lines["data"],
            "classes": list(class_names(trainer)),
            "layers": _layers(model),
        },
        "layout": {"strategy": lines["strategy"], "batch": lines["batch"]},
    }


def _devices() -> list[str]:
    names = [f"{device.device_type}:{device.name.rpartition(':')[2]}" for device in tf.config.list_logical_devices()]
    cards = [tf.config.experimental.get_device_details(card) for card in tf.config.list_physical_devices("GPU")]
    kinds = [str(card["device_name"]) for card in cards if "device_name" in card]
    return [*names, *(f"({kind})" for kind in dict.fromkeys(kinds))]


def _layers(model: keras.Model) -> list[dict[str, Any]]:
    return [
        {
            "name": layer.name,
            "class": type(layer).__name__,
            "shape": _shape(layer),
            "parameters": layer.count_params() if layer.built else None,
        }
        for layer in built_objects.layers(model)[:MOST_LAYERS]
    ]


def _shape(layer: keras.Layer) -> str:
    """Return the output shape of a layer; empty if it has none or was called several times."""
    with contextlib.suppress(AttributeError, ValueError):
        return ", ".join(str(tuple(output.shape)) for output in keras.tree.flatten(layer.output))
    return ""


def memory() -> dict[str, Any]:
    """Return the peak memory of the process and of each GPU, in bytes.

    Example:
        >>> memory()["process_peak_bytes"] > 10_000_000
        True
    """
    devices = []
    for device in tf.config.list_logical_devices("GPU"):
        name = f"GPU:{device.name.rpartition(':')[2]}"
        with contextlib.suppress(ValueError, tf.errors.OpError):  # a device of another process
            devices.append({"device": name, "peak_bytes": tf.config.experimental.get_memory_info(name)["peak"]})
    return {"process_peak_bytes": process_memory.peak_bytes(), "devices": devices}
