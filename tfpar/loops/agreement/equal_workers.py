"""Checks that arguments, data and settings are equal on all workers, and weights after training.

Each worker runs the user's program by itself. If a program differs, the workers train different models or deadlock:

    worker 0   Adam(clipnorm=1.0)   ─┐
                                     ├─ all-reduce ─ each updates its copy of the weights: the copies differ
    worker 1   Adam(clipnorm=0.1)   ─┘
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import data
from tfpar._compat.models import keras_model
from tfpar.job import Job
from tfpar.loops.epoch_iterator import EpochIterator

# Automatic names count the objects of a process, seeds may be random, and the chief's learning rate is broadcast.
_LEFT_OUT = ("name", "seed", "learning_rate", "registered_name", "build_config")
_LARGEST_DIFFERENCE = 1e-5


def check_fit(job: Job, **arguments: Any) -> None:
    """Raise an error if the arguments of `fit` differ between workers.

    Raises:
        ValueError: If an argument of a worker is not that of the chief; on every worker.
    """
    if job.num_workers > 1:
        job.require_equal(
            {f"the argument {name} of fit": json.dumps(_plain(value)) for name, value in arguments.items()}
        )


def check_data(job: Job, dataset: data.Batches, epoch_iterator: EpochIterator) -> None:
    """Raise an error if the number or size of batches, or the source of shards, differs between workers.

    `ReadOrder` compares the batches themselves.

    Args:
        job: The workers.
        dataset: Global batches.
        epoch_iterator: The iterator over them.

    Raises:
        ValueError: If they are not those of the chief; on every worker.
    """
    if job.num_workers == 1:
        return
    steps = epoch_iterator.steps_per_epoch or "any number of"
    facts = {"the data": f"{steps} steps with batches of {epoch_iterator.batch_size} examples"}
    if isinstance(dataset, data.Sharded):
        facts["the files or examples of its shards, or their order"] = dataset.source
    job.require_equal(facts)


def describe_settings(model: keras.Model) -> str:
    """Return a line for each setting of a layer or of `compile`, equal on all workers that run the same program.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, "tanh")])
        >>> model.compile(keras.optimizers.SGD(0.1), "mse", loss_weights=[2.0])
        >>> [line for line in describe_settings(model).splitlines() if "activation" in line or "loss_weights" in line]
        ['layer 1 Dense activation: "tanh"', 'loss_weights 0: 2.0']
    """
    layers = [layer for layer in keras_model.all_layers(model) if not isinstance(layer, keras.Model)]
    lines = [line for number, layer in enumerate(layers) for line in _lines(f"layer {number}", _plain(layer))]
    for name, value in keras_model.compile_arguments(model).items():
        lines += _lines(name, _plain(value))
    return "\n".join(lines)


def _lines(path: str, value: Any) -> list[str]:
    """Return a line with path and value for each leaf of a structure."""
    items = sorted(value.items()) if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    lines = [line for key, item in items for line in _lines(f"{path} {key}", item)]
    return lines or [f"{path}: {json.dumps(value)}"]


def check_weights(job: Job, model: keras.Model) -> None:
    """Raise an error if the weights of workers differ after training; all workers must call this.

    Raises:
        RuntimeError: If they differ; on every worker.
    """
    if job.num_workers > 1 and weights_differ(job, model):
        raise RuntimeError(
            "All workers must end with equal weights, and they differ: a callback or a setting of one worker changes "
            "its learning rate, its weights or its optimizer. Do so on every worker, and find the step with "
            "tfpar.ReplicaCheck(every_steps=1)."
        )


def weights_differ(job: Job, model: keras.Model) -> bool:
    """Return whether the weights of a built model differ between workers; all workers must call this.

    The sum of each weight and of its absolute values are compared, with a tolerance for rounding on other processors.
    """
    weights = [tf.cast(weight, tf.float64) for weight in model.weights if "float" in weight.dtype]
    sums = [float(tf.reduce_sum(weight)) for weight in weights]
    sizes = np.array([float(tf.reduce_sum(tf.abs(weight))) for weight in weights])
    _, differ = compare_numbers(job, np.concatenate([sums, sizes]), np.concatenate([sizes, sizes]))
    return differ


def compare_numbers(job: Job, own: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, bool]:
    """Compare numbers between workers; all workers must call this.

    Args:
        job: The workers.
        own: The numbers of this worker, `[numbers]`.
        scale: The magnitudes to which the tolerance is relative, `[numbers]`.

    Returns:
        The means over the workers, and whether any number of any worker differs from its mean.
    """
    if not len(own):  # TensorFlow cannot reduce an empty tensor
        return own, False
    means = np.asarray(job.sum(own.tolist())) / job.num_workers
    differs = bool(np.any(np.abs(own - means) > _LARGEST_DIFFERENCE * scale))
    (num_differing,) = job.sum([float(differs)])
    return means, bool(num_differing)


def _plain(value: Any) -> Any:
    """Return a value as JSON without what differs between processes, such as addresses and automatic names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        if str(value.get("class_name")).endswith("DTypePolicy"):
            return str(value["config"])
        if value.get("class_name") == "__lambda__":  # its code contains the name of its file
            return "lambda"
        return {str(key): _plain(item) for key, item in value.items() if not _is_left_out(str(key), item)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _digest(value)
    kind = getattr(value, "__qualname__", None) or type(value).__qualname__
    settings = None
    if hasattr(value, "get_config") and not isinstance(value, type | keras.Variable):
        with contextlib.suppress(Exception):  # a class without a configuration of its own
            settings = _plain(value.get_config())
    return kind if settings is None else {kind: settings}


def _is_left_out(key: str, value: Any) -> bool:
    is_schedule = key == "learning_rate" and not isinstance(value, int | float | np.number)
    return "initializer" in key or (key in _LEFT_OUT and not is_schedule)


def _digest(array: np.ndarray) -> str:
    content = array.tobytes() if array.dtype != object else str(array.tolist()).encode()
    return hashlib.sha256(content).hexdigest()[:12]
