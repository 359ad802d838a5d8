"""The train command with sharded state, sharded weights and divided layers: the weights of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import command
from tests.support.command import metrics, settings

OWN = """
import keras, sklearn.datasets, tfpar
from tfpar.trainers import recipe

class Digits(tfpar.Trainer):
    reads = ("seed", "training.global_batch_size", "training.precision")

    def __init__(self, run, strategy):
        recipe.set_precision(run.training.precision)
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        self.train_data = batches(images[:100] / 16, labels[:100], run.training.global_batch_size)
        self.validation_data = batches(images[100:130] / 16, labels[100:130], run.training.global_batch_size)
        self.num_train_examples = 100
        super().__init__(build_model, strategy, run.seed)

def batches(images, labels, size):
    import tensorflow as tf
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(size)

def build_model():
    hidden = keras.layers.Dense(16, "tanh", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(12, "tanh"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01, use_ema=True), loss, metrics=["accuracy"])
    return model
"""
ASKED = [
    *("trainer=own.Digits", "training.global_batch_size=32", "training.epochs=2", "training.precision=float64"),
    *("callbacks.tensorboard=false", "callbacks.report=false"),
]
ON_TWO = ["strategy.num_logical_cpus=4", 'strategy.devices=["CPU:1", "CPU:2"]']


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("configuration", "layout", "described"),
    [
        ("digits_sharded_state", ON_TWO, "Mirrored over 2 replicas on CPU:1, CPU:2, optimizer state sharded"),
        (
            "digits_tensor_parallel",
            ["strategy.num_logical_cpus=4", "strategy.num_replicas=2", "strategy.shard=optimizer"],
            "Hybrid of 2 replicas of 2 shards on (CPU:0 CPU:1), (CPU:2 CPU:3), optimizer state sharded",
        ),
        ("digits_sharded_weights", ON_TWO, "Mirrored over 2 replicas on CPU:1, CPU:2, weights sharded"),
        ("digits_tensor_parallel", ON_TWO, "TensorParallel of 2 shards on CPU:1, CPU:2"),
    ],
    ids=["sharded state", "replicas of shards, sharded state", "sharded weights", "tensor parallel"],
)
def test_a_divided_model_has_the_weights_of_one_device(
    configuration: str, layout: list[str], described: str, call: command.InProcess, tmp_path: Path
) -> None:
    one = call("--config", "digits", "--directory", "one", *settings(*ASKED, "strategy.kind=single_device"))
    assert one.code == 0, one
    divided = call("--config", configuration, "--directory", "divided", *settings(*ASKED, *layout))
    assert divided.code == 0, divided
    assert described in " ".join(divided.out.split())
    command.assert_same_weights(tmp_path / "divided", tmp_path / "one", tolerance=1e-9)
    for line, expected in zip(metrics(tmp_path / "divided"), metrics(tmp_path / "one"), strict=True):
        assert line == pytest.approx(expected, rel=1e-9)
