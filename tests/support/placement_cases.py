"""The placement of one training step of several models under every strategy, as if their devices were GPUs.

The logical CPU 0 stands for the host, the logical CPUs 1 and 2 for GPU 0 and GPU 1.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfpar
from tests import ROOT
from tests.support.device_placement import HOST, Reading, read_placement
from tests.support.extent import sampled
from tfpar import host_sizes
from tfpar.engines.steps.launched_steps import LaunchedSteps
from tfpar.loops.model_function import make_model
from tfpar.loops.preparation import Preparation

NUM_MICROBATCHES = 5  # enough for loops
GPUS = {"CPU:1": "GPU:0", "CPU:2": "GPU:1"}
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single_device": lambda: tfpar.SingleDevice("CPU:1"),
    "mirrored": lambda: tfpar.Mirrored(list(GPUS)),
    "mirrored, sharded": lambda: tfpar.Mirrored(list(GPUS), shard="optimizer"),
    "multi_worker": lambda: tfpar.MultiWorker(list(GPUS)),
    "multi_worker, sharded": lambda: tfpar.MultiWorker(list(GPUS), shard="optimizer"),
    "pipeline": lambda: tfpar.Pipeline(2, NUM_MICROBATCHES, balance="parameters", devices=list(GPUS)),
    "gpipe": lambda: tfpar.Pipeline(2, NUM_MICROBATCHES, "gpipe", balance="parameters", devices=list(GPUS)),
    "hybrid": lambda: tfpar.Hybrid(tfpar.Pipeline(1, NUM_MICROBATCHES), 2, devices=list(GPUS)),
}

WORKERS = ("multi_worker", "multi_worker, sharded")


class Case(NamedTuple):
    """A placed step.

    Args:
        reading: Where its operations run.
        stages: The GPU of the weights of each layer of a pipeline, by the layer's name.
    """

    reading: Reading
    stages: dict[str, str]


def cnn() -> keras.Model:
    return _compiled(
        keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, name="alpha"),
                layers.LayerNormalization(name="beta"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                layers.Dense(11, name="gamma"),
            ]
        )
    )


def transformer() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(11, 8, name="alpha")(tokens)
    attended = layers.MultiHeadAttention(2, 4, name="beta")(embedded, embedded, use_causal_mask=True)
    normed = layers.LayerNormalization(name="gamma")(attended + embedded)
    return _compiled(keras.Model(tokens, layers.Dense(11, name="delta")(normed)))


def masked_lstm() -> keras.Model:
    return _compiled(
        keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                layers.Embedding(11, 8, mask_zero=True, name="alpha"),
                layers.LSTM(4, name="beta"),
                layers.Dense(11, name="gamma"),
            ]
        )
    )


MODELS = {"cnn": cnn, "transformer": transformer, "masked_lstm": masked_lstm}


READ_OVER_WORKERS = sampled(
    itertools.product(WORKERS, MODELS), of_ci=[("multi_worker", "cnn"), ("multi_worker, sharded", "transformer")]
)


def _compiled(model: keras.Model) -> keras.Model:
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def data(model: str) -> tf.data.Dataset:
    tokens = np.ones((8, 6), "int32")
    targets = np.ones((8, 6) if model == "transformer" else (8,), "int64")
    return tf.data.Dataset.from_tensor_slices(
        (np.ones((8, 8, 8, 1), "float32") if model == "cnn" else tokens, targets)
    ).batch(5)


def as_gpus() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which steps are traced as for GPUs."""
    return mock.patch.object(host_sizes, "is_gpu", lambda device: device[-5:] in GPUS)


@functools.cache
def case(strategy: str, model: str) -> Case:
    """Trace and read the launch of a train step of a model under a strategy."""
    if strategy in WORKERS:  # TensorFlow's collectives can be set up once in a process
        return _in_process_of_its_own()[strategy, model]
    return read(STRATEGIES[strategy](), model)


def read(strategy: tfpar.Strategy, model: str) -> Case:
    """Trace and read the launch of a train step of a model under a strategy that was made for it."""
    built, traced = launch(strategy, MODELS[model], data(model))
    reading = read_placement(traced, GPUS, default=HOST)  # the device of the call
    homes = {layer.name: layer.variables[0].value.device for layer in built.layers if layer.variables}
    return Case(reading, {name: GPUS.get(home[-5:], "CPU:0") for name, home in homes.items()})


def launch(
    strategy: tfpar.Strategy, build: Callable[[], keras.Model], dataset: tf.data.Dataset, fused: bool = True
) -> tuple[keras.Model, Any]:
    """Return a model and the concrete function that launches a train step of it."""
    with as_gpus(), tf.device("CPU:1"):  # what requests no device is on the first GPU, outside of the step as well
        built = make_model(build, strategy, 0)
        epoch_iterator, steps = Preparation(built, strategy, fused).prepare_loop(dataset, None, "train")
    assert isinstance(steps, LaunchedSteps)
    with as_gpus():
        function = steps.launch(epoch_iterator.upcoming)
    return built, function.get_concrete_function(epoch_iterator.upcoming, epoch_iterator.upcoming)


@functools.cache
def _in_process_of_its_own() -> dict[tuple[str, str], Case]:
    completed = subprocess.run(
        [sys.executable, "-m", __name__], cwd=ROOT, capture_output=True, check=False, timeout=300
    )
    assert completed.returncode == 0, completed.stderr.decode()[-2000:]
    found: dict[tuple[str, str], Case] = pickle.loads(completed.stdout[completed.stdout.index(b"\x80") :])
    return found


if __name__ == "__main__":
    from tests.support import placement_cases

    tfpar.use_logical_cpus(3)
    cases = {}
    for name in WORKERS:
        strategy = STRATEGIES[name]()
        of_name = [model for one, model in READ_OVER_WORKERS if one == name]
        cases |= {(name, model): placement_cases.read(strategy, model) for model in of_name}
    sys.stdout.buffer.write(pickle.dumps(cases))
