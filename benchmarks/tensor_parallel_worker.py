"""One process of `benchmarks.tensor_parallel`: the time of a step on one core, or with layers divided over several."""

from __future__ import annotations

import os

from benchmarks import process

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import tensorflow as tf

import tfpar
from benchmarks.timed_fit import steps_per_second

_DENSE_WIDTH, _DENSE_BATCH = 4096, 256
_WIDTH, _NUM_HEADS, _CONTEXT, _BATCH = 1024, 16, 128, 8


def _dense_pair() -> tuple[keras.Model, tf.Tensor]:
    layers = [keras.layers.Dense(_DENSE_WIDTH, "gelu"), keras.layers.Dense(_DENSE_WIDTH)]
    return keras.Sequential([keras.Input((_DENSE_WIDTH,)), *layers]), tf.random.normal([_DENSE_BATCH, _DENSE_WIDTH])


def _attention_block() -> tuple[keras.Model, tf.Tensor]:
    tokens = keras.Input((_CONTEXT, _WIDTH))
    normalized = keras.layers.LayerNormalization()(tokens)
    attended = keras.layers.MultiHeadAttention(_NUM_HEADS, _WIDTH // _NUM_HEADS)(normalized, normalized)
    hidden = keras.layers.Add()([tokens, attended])
    normalized = keras.layers.LayerNormalization()(hidden)
    widened = keras.layers.Dense(4 * _WIDTH, "gelu")(normalized)
    outputs = keras.layers.Add()([hidden, keras.layers.Dense(_WIDTH)(widened)])
    return keras.Model(tokens, outputs), tf.random.normal([_BATCH, _CONTEXT, _WIDTH])


_WORKLOADS = {"dense pair": _dense_pair, "attention block": _attention_block}


def run(workload: str, num_shards: int, num_steps: int) -> dict[str, float]:
    """Train, and return the figures of `benchmarks.tensor_parallel.measure`."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num_shards])
    tfpar.use_logical_cpus(num_shards, threads_per_device=1)
    tf.config.threading.set_inter_op_parallelism_threads(num_shards)
    examples = tf.zeros([])

    def build() -> keras.Model:
        nonlocal examples
        model, examples = _WORKLOADS[workload]()
        model.compile(keras.optimizers.SGD(1e-4), "mse")
        return model

    strategy = tfpar.SingleDevice() if num_shards == 1 else tfpar.TensorParallel(num_shards)
    trainer = tfpar.Trainer(build, strategy, seed=0)
    dataset = tf.data.Dataset.from_tensors((examples, examples)).repeat()
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    return {"steps_per_second": steps_per_second(trainer, dataset, num_steps)}


if __name__ == "__main__":
    process.reply(run(**process.request()["setting"]))
