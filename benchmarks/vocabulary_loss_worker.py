"""One process of `benchmarks.vocabulary_loss`: the most memory of a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from benchmarks import process
from tfpar.cluster import process_memory

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tfpar.reduction.vocabulary import gathered_classes

NUM_CLASSES, WIDTH, CONTEXT, BATCH = 50_000, 16, 256, 16


def run(gathers: bool, counts_accuracy: bool) -> dict[str, float]:
    """Train a step of one position, then the measured one; return the figures of `vocabulary_loss.measure`.

    The first step traces the same function, and creates what stays. Its scores take few bytes: the measured step would
    use the freed bytes of larger ones again, and they would not count.
    """
    tfpar.use_logical_cpus(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if gathers:
        gathered_classes.reading_shards = contextlib.nullcontext

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((None, WIDTH)), keras.layers.Dense(NUM_CLASSES)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"] if counts_accuracy else None)
        return model

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        random = np.random.default_rng(0)
        for shape in ((1, 1), (BATCH, CONTEXT)):
            features = random.normal(size=(*shape, WIDTH)).astype(np.float32)
            yield features, random.integers(0, NUM_CLASSES, shape)

    before: list[int] = []

    def note(step: int, logs: Any = None) -> None:
        if not before:
            process_memory.reset_peak()
            before.append(process_memory.resident_bytes())

    specs = tf.TensorSpec([None, None, WIDTH], tf.float32), tf.TensorSpec([None, None], tf.int64)
    trainer = tfpar.Trainer(build, tfpar.TensorParallel(2), seed=0)
    trainer.fit(
        tf.data.Dataset.from_generator(batches, output_signature=specs),
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)],
        verbose=0,
    )
    scores_bytes = BATCH * CONTEXT * NUM_CLASSES * tf.float32.size
    return {"peak_bytes": float(process_memory.peak_bytes() - before[0]), "scores_bytes": float(scores_bytes)}


if __name__ == "__main__":
    process.reply(run(**process.request()["setting"]))
