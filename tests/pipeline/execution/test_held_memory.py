"""The memory that is held between the steps of a pipeline."""

from __future__ import annotations

import gc
from typing import Literal

import keras
import pytest
import tensorflow as tf

import tfpar
from tfpar.reduction.weight_owners import num_bytes

WIDTH = 1024


def build_model() -> keras.Model:
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, use_bias=False) for _ in range(2))])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def held_bytes(device: str) -> int:
    gc.collect()
    try:
        return int(tf.config.experimental.get_memory_info(device)["current"])
    except ValueError:  # an allocator that counts nothing
        pytest.skip("TensorFlow does not count the memory of CPUs here")


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_no_gradients_are_held_between_steps(logical_cpus: list[str], schedule: Literal["1f1b", "zero_bubble"]) -> None:
    trainer = tfpar.Trainer(build_model, tfpar.Pipeline(2, 4, schedule, devices=logical_cpus[:2], balance=[1, 1]))
    dataset = tf.data.Dataset.from_tensors((tf.zeros([8, WIDTH]), tf.zeros([8, WIDTH]))).repeat()
    trainer.build(dataset)
    before_bytes = held_bytes(logical_cpus[0])
    trainer.fit(dataset, steps_per_epoch=2, verbose=0)
    gradient_bytes = sum(map(num_bytes, trainer.model.trainable_variables))
    assert held_bytes(logical_cpus[0]) - before_bytes < gradient_bytes / 4
