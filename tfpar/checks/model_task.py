"""One step of a user's model on one device, from given weights and a given batch; the results as a file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar._compat import keras_optimizer
from tfpar.checks.child_program import at_stage
from tfpar.checks.model_source import first_batch, make_trainer, source_of
from tfpar.full_precision import full_precision
from tfpar.reduction import objective
from tfpar.strategies import model_checks
from tfpar.strategies.single_device import forward_backward

START = "start"  # of the file with the weights and the batch of all steps


def step(device: str, source: dict[str, Any], dtype: str | None, folder: str, name: str) -> dict[str, Any]:
    """Run one step and write its loss, gradients and weights.

    Args:
        device: A short name.
        source: The fields of a `ModelSource`.
        dtype: The float type of the model; None for the user's own.
        folder: Where the files are; the first step writes the weights and the batch from which all of them start.
        name: Of the file with the results.

    Returns:
        The loss, the dtype policy and the number of weights.
    """
    at_stage("the model function")
    strategy = tfpar.SingleDevice(device)
    trainer, dataset = make_trainer(source_of(source), strategy, dtype)
    model: keras.Model = trainer.model
    start = Path(folder) / START
    weights, batch = pickle.loads(start.read_bytes()) if start.exists() else (None, first_batch(dataset))
    batch = tf.nest.map_structure(lambda value: _cast(value, dtype), batch)
    with strategy.creation_scope():
        model_checks.build(model, batch, "train")
        if weights is None:
            start.write_bytes(pickle.dumps((model.get_weights(), batch)))
        else:
            model.set_weights(weights)
        model.optimizer.build(model.trainable_variables)
    at_stage("a step of the model")
    loss, gradients = _step(model, batch, strategy)
    gradients = gradients or [None] * len(model.trainable_variables)
    found = {
        "paths": [variable.path for variable in model.trainable_variables],
        "loss": float(loss),
        "gradients": [None if one is None else tf.convert_to_tensor(one).numpy() for one in gradients],
        "weights": [np.asarray(variable.value) for variable in model.trainable_variables],
        "policy": model.dtype_policy.name,
    }
    (Path(folder) / name).write_bytes(pickle.dumps(found))
    return {"loss": found["loss"], "policy": found["policy"], "num_weights": len(found["paths"])}


def _step(model: keras.Model, batch: Any, strategy: tfpar.Strategy) -> tuple[Any, list[Any]]:
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)

    def one_step() -> tuple[Any, list[Any]]:
        if objective.objectives_of(model):  # several losses, each with its optimizer
            return strategy.train_step(model, batch), []
        with strategy.creation_scope():
            loss, _, gradients = forward_backward(model, inputs, targets, weights)
            with keras_optimizer.one_device_optimizer():
                keras_optimizer.apply(model.optimizer, gradients, model.trainable_variables)
        return loss, gradients

    with full_precision():
        result: tuple[Any, list[Any]] = tf.function(one_step, autograph=False)()
        return result


def _cast(value: Any, dtype: str | None) -> Any:
    if value is None or dtype is None or not np.issubdtype(np.asarray(value).dtype, np.floating):
        return value
    return np.asarray(value).astype(dtype)
