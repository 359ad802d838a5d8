"""One process of `benchmarks.shards`: a step of Adam, alone or as a worker, its time and its peak memory."""

from __future__ import annotations

import os
from typing import Any

from benchmarks import process
from tfpar.cluster import process_memory

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import tensorflow as tf

import tfpar
from benchmarks.pipelines import examples, models
from benchmarks.timed_fit import steps_per_second
from tfpar._compat.variables.sharded_memory import is_remote
from tfpar.cluster import tf_config
from tfpar.placement.owners import num_bytes

_NUM_LAYERS = 24


def _dense(width: int) -> tuple[keras.Model, tf.Tensor]:
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(_NUM_LAYERS)]
    return keras.Sequential([keras.Input((width,)), *layers]), tf.zeros([8, width])


def _transformer() -> tuple[keras.Model, tf.Tensor]:
    return models.transformer_model(), tf.zeros([32, examples.CONTEXT, examples.WIDTH])


_WORKLOADS = {"updates": lambda: _dense(2048), "tiny": lambda: _dense(8), "transformer": _transformer}


def run(
    workload: str, shard: Any, num_replicas: int, num_steps: int, num_workers: int, recompute: bool, rank: int,
    addresses: list[str],
) -> dict[str, float]:  # fmt: skip
    """Train, and return the figures of `benchmarks.shards.measure`."""
    if addresses:
        os.environ["TF_CONFIG"] = tf_config.to_tf_config(addresses, rank)
    tfpar.use_logical_cpus(num_replicas)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    kind = tfpar.MultiWorker if num_workers > 1 else tfpar.Mirrored
    strategy = kind(shard=shard, recompute=recompute)
    examples_of_batch = tf.zeros([])

    def build() -> keras.Model:
        nonlocal examples_of_batch
        model, examples_of_batch = _WORKLOADS[workload]()
        model.compile(keras.optimizers.Adam(1e-4), "mse")
        return model

    before_bytes = process_memory.resident_bytes()
    trainer = tfpar.Trainer(build, strategy, seed=0)
    dataset = tf.data.Dataset.from_tensors((examples_of_batch, examples_of_batch)).repeat()
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    process_memory.reset_peak()
    speed = steps_per_second(trainer, dataset, num_steps)
    held = [one for one in trainer.model.optimizer.variables if not is_remote(one)]
    return {
        "steps_per_second": speed,
        "state_bytes": sum(map(num_bytes, held)),
        "process_bytes": process_memory.peak_bytes() - before_bytes,
        "num_parameters": trainer.model.count_params(),
        "predicted_bytes": sum(row.state_bytes for row in trainer.preview(dataset).rows),
    }


if __name__ == "__main__":
    request = process.request()
    process.reply(run(**request["setting"], rank=request["rank"], addresses=request["addresses"]))
