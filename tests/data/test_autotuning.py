"""No dataset is iterated over with TensorFlow's autotuning, which lets the end of an iterator take up to a minute."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import tensorflow as tf

import tfpar
from tests import ROOT
from tests.support import small

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture
def autotuned() -> Iterator[list[str]]:
    """The lines of the library that iterate over a dataset with autotuning."""
    lines: list[str] = []
    original = tf.data.Dataset.__iter__

    def iterate(dataset: tf.data.Dataset) -> Iterator[object]:
        if dataset.options().autotune.enabled is not False:
            inside = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT / "tfpar"))]
            lines.extend(f"{frame.filename}:{frame.lineno}" for frame in inside[-1:])
        return original(dataset)

    with mock.patch.object(tf.data.Dataset, "__iter__", iterate):
        yield lines


def slow(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return dataset.map(lambda *parts: parts, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def train(strategy: Callable[[], tfpar.Strategy], dataset: object) -> None:
    trainer = tfpar.Trainer(small.build_model, strategy())
    trainer.fit(dataset, epochs=2, steps_per_epoch=1, validation_data=small.data(), verbose=0)
    trainer.evaluate(slow(small.data()), verbose=0)
    trainer.predict(slow(small.data()), verbose=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy",
    [
        tfpar.SingleDevice,
        lambda: tfpar.Mirrored(["CPU:0", "CPU:1"]),
        pytest.param(lambda: tfpar.Pipeline(2, 2), marks=pytest.mark.extended),
    ],
    ids=["single_device", "mirrored", "pipeline"],
)
def test_a_trainer_reads_without_autotuning(strategy: Callable[[], tfpar.Strategy], autotuned: list[str]) -> None:
    train(strategy, slow(small.data()))
    train(strategy, (batch for batch in list(small.data())))
    assert not autotuned
