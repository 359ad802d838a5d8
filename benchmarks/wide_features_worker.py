"""One process of `benchmarks.wide_features`: the time of a step, and the bytes that a device receives."""

from __future__ import annotations

import collections
import os
from typing import Any

from benchmarks import process

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import tfpar
from benchmarks.timed_fit import steps_per_second

NUM_FEATURES, NUM_OUTPUTS = 10_000_000, 10
_BATCH = {"dense": 4, "sparse": 256}
_ENTRIES = 100  # of a sparse example


def run(kind: str, num_shards: int, num_steps: int) -> dict[str, float]:
    """Train, and return the figures of `benchmarks.wide_features.measure`."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_shards])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(num_shards)
    if num_shards > 1:
        tfpar.use_logical_cpus(num_shards)

    def build() -> keras.Model:
        features = keras.Input((NUM_FEATURES,), sparse=kind == "sparse")
        model = keras.Model(features, keras.layers.Dense(NUM_OUTPUTS, kernel_initializer="zeros")(features))
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    strategy = tfpar.SingleDevice("CPU:0") if num_shards == 1 else tfpar.TensorParallel(num_shards)
    trainer = tfpar.Trainer(build, strategy, seed=0)
    labels = np.random.default_rng(0).integers(0, NUM_OUTPUTS, _BATCH[kind])
    dataset = tf.data.Dataset.from_tensors((_features(kind), labels)).repeat()
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    received = _received_bytes(strategy, trainer.model, next(iter(dataset)))
    return {"steps_per_second": steps_per_second(trainer, dataset, num_steps), "received_bytes": received}


def _features(kind: str) -> Any:
    random, rows = np.random.default_rng(1), _BATCH[kind]
    if kind == "dense":
        return random.normal(size=(rows, NUM_FEATURES)).astype(np.float32)
    columns = np.sort(np.stack([random.choice(NUM_FEATURES, _ENTRIES, replace=False) for _ in range(rows)]))
    indices = np.stack([np.repeat(np.arange(rows), _ENTRIES), columns.reshape(-1)], -1)
    values = random.normal(size=rows * _ENTRIES).astype(np.float32)
    return tf.SparseTensor(indices, values, (rows, NUM_FEATURES))


def _received_bytes(strategy: tfpar.Strategy, model: keras.Model, element: Any) -> float:
    """Return the most bytes of features that a device reads."""
    inputs, _ = strategy.step_batch(model, element).batch
    pieces = tf.nest.flatten(inputs)
    received: collections.Counter[int] = collections.Counter()
    for number, piece in enumerate(pieces):
        for tensor in tf.nest.flatten(piece, expand_composites=True):
            received[number] += tensor.shape.num_elements() * tensor.dtype.size
    return float(max(received.values()))


if __name__ == "__main__":
    process.reply(run(**process.request()["setting"]))
