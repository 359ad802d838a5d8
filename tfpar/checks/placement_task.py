"""The placement of a step of a user's model under its strategy, with the lines of the user's code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tfpar
from tfpar import strategies
from tfpar.checks.child_program import at_stage
from tfpar.checks.model_source import first_batch, make_trainer, source_of
from tfpar.checks.strategy_task import default_device, settings_on
from tfpar.full_precision import full_precision
from tfpar.loops.preparation import Preparation
from tfpar.messages.users_code import Place, last_place
from tfpar.placement.reading import read_placement
from tfpar.strategies.single_device import loss_and_gradients

_OTHERS = ("while", "body", "cond", "then", "else")  # names of TensorFlow in the name of an operation


def place(source: dict[str, Any], devices: Sequence[str]) -> dict[str, Any]:
    """Return what a step would run on the host and wait for, if its devices are or were GPUs.

    Args:
        source: The fields of a `ModelSource`.
        devices: Devices of the strategy. Without GPUs they are logical CPUs other than the first, which is the host.
    """
    at_stage("the placement of a step")
    found = source_of(source)
    with default_device(devices), full_precision():
        strategy = strategies.from_settings(settings_on(found.run().strategy, devices))
        trainer, dataset = make_trainer(found, strategy, None)  # in the model's own type: kernels differ
        batch = first_batch(dataset)
        batches = tf.data.Dataset.from_tensors(batch)
        epoch_iterator, run_steps = Preparation(trainer.model, strategy).prepare_loop(batches, None, "train")
        loop = tf.function(lambda *arguments: run_steps.run(*arguments, tf.constant(2), False), autograph=False)
        with tf.device(None):
            traced = loop.get_concrete_function(epoch_iterator.iterator, epoch_iterator.upcoming)
        on_gpus = devices[0].startswith("GPU")
        reading = read_placement(traced, None if on_gpus else {name: f"GPU:{i}" for i, name in enumerate(devices)})
        places = _places(trainer.model, batch, strategy) if reading.on_host else {}
    return {
        "on_host": [_described(one.name, one.kind, places) for one in reading.on_host],
        "num_operations": len(reading.operations),
        "num_waits": len(reading.waits),
        "num_detours": len(reading.detours),
    }


def _described(name: str, kind: str, places: dict[tuple[str, str], Place]) -> dict[str, Any]:
    key = _key(name, kind)
    found = places.get(key, places.get(_plain(key)))
    return {"kind": kind, "layer": key[0], **({} if found is None else found._asdict())}


def _places(model: keras.Model, batch: Any, strategy: tfpar.Strategy) -> dict[tuple[str, str], Place]:
    """Return the lines of the user's code that create operations, by layer and operation.

    TensorFlow records them while it traces a function, and not for the operations that a pipeline copies to its stages.
    So the model is traced once more, as a whole.
    """
    inputs, targets, weights = keras.utils.unpack_x_y_sample_weight(batch)

    def on_replica() -> tf.Tensor:
        return loss_and_gradients(model, inputs, targets, weights)[0]

    def step() -> Any:
        return on_replica() if strategy.home is None else strategy.home.run(on_replica)

    found: dict[tuple[str, str], Place] = {}
    with contextlib.suppress(Exception):  # without the lines, layers are named; a model may have several losses
        for operation in tf.function(step, autograph=False).get_concrete_function().graph.get_operations():
            created_at = last_place(operation.traceback)
            if created_at is not None:
                key = _key(operation.name, operation.type)
                found.setdefault(key, created_at)
                found.setdefault(_plain(key), created_at)
    return found


def _key(name: str, kind: str) -> tuple[str, str]:
    """Return the layer of an operation, the last part of its name that is not TensorFlow's own, and its own name."""
    *parts, own = name.split("/")
    others = (*_OTHERS, kind)
    layer = next((part for part in reversed(parts) if part not in others and "PartitionedCall" not in part), "")
    return layer, own


def _plain(key: tuple[str, str]) -> tuple[str, str]:
    """Return names without the numbers that TensorFlow appends to each to make it unique in a graph."""
    layer, own = (re.sub(r"_\d+$", "", name) for name in key)
    return layer, own
