"""Unsupported models of pipelines are refused in one sentence, before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.support.parity_cases import NUM_CLASSES, NUM_FEATURES
from tests.support.pipeline_models import crossentropy, labelled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def named() -> keras.Model:
    names = [layers.Dense(3, name=name) for name in ("a", "b", "c")]
    model = keras.Sequential([keras.Input((NUM_FEATURES,)), *names])
    model.compile("sgd", crossentropy())
    return model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stages": 0}, "num_stages must be a whole number of at least 1, received 0"),
        ({"num_microbatches": 2.5}, r"num_microbatches must be a whole number of at least 1, received 2\.5"),
        ({"schedule": "1F1B"}, "must be one of gpipe, 1f1b, interleaved, zero_bubble, received '1F1B'"),
        ({"num_stages": 4, "num_microbatches": 3, "schedule": "interleaved"}, "set num_microbatches to 4"),
        ({"num_stages": 4, "schedule": "interleaved", "devices": ["CPU:0", "CPU:1", "CPU:2"]}, "set num_stages to 6"),
        ({"num_stages": 5}, r"5 stages under '1f1b' need 5 devices, and there are 4.* Use fewer stages"),
        ({"devices": ["GPU:0", "GPU:1"]}, r"different devices of this machine, received \['GPU:0', 'GPU:1'\]"),
        ({"devices": ["CPU:0", "CPU:0"]}, "must name different devices"),
        ({"num_stages": 3, "devices": ["CPU:0", "CPU:1"]}, "needs one device for each stage.* set num_stages to 2"),
        ({"balance": "speed"}, "must be one of time, flops, parameters, memory, received 'speed'"),
        ({"balance": [0, 3]}, r"2 numbers above 0, received \[0, 3\]"),
        ({"balance": ["a", "b"]}, r"1 for 2 stages, received 2: \['a', 'b'\]"),
    ],
)
def test_settings_that_cannot_be_are_refused_when_the_strategy_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfpar.Pipeline(**{"num_stages": 2, "num_microbatches": 2, **settings})


@pytest.mark.parametrize(("num_stages", "number"), [(2, 8), (4, 16)])
def test_a_pipeline_without_micro_batches_proposes_a_number(num_stages: int, number: int) -> None:
    match = rf"needs num_microbatches.* Write Pipeline\({num_stages}, num_microbatches={number}\): with four"
    with pytest.raises(TypeError, match=match):
        tfpar.Pipeline(num_stages)


class ReadsSize(keras.Model):
    """Divides by the number of examples, with TensorFlow's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.last = layers.Dense(4), layers.Dense(NUM_CLASSES)

    def call(self, features: Any) -> Any:
        hidden = self.dense(features)
        size = tf.shape(hidden)[0]
        self.add_loss(tf.reduce_sum(hidden) / tf.cast(size, hidden.dtype))
        return self.last(hidden)


def test_the_line_of_a_call_that_reads_the_size_of_a_batch_is_named() -> None:
    def build() -> keras.Model:
        model = ReadsSize()
        model.compile("sgd", crossentropy())
        return model

    line = 1 + Path(__file__).read_text().splitlines().index("        size = tf.shape(hidden)[0]")
    with pytest.raises(ValueError, match=rf"received ReadsSize, where: {__file__}:{line} raises A KerasTensor cannot"):
        tfpar.Trainer(build, tfpar.Pipeline(2, 2)).fit(labelled(), verbose=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"balance": [1, 1]}, r"add up to the 3 layer calls of the model, received \[1, 1\], which adds up to 2"),
        ({"balance": ["nope"]}, "received 'nope'; the model has 'a', 'b', 'c'"),
        ({"balance": ["a"]}, "must leave a layer before it, received 'a'.* such as 'b'"),
        ({"num_stages": 3, "balance": ["c", "b"]}, r"received 'c' before 'b', which comes first; write \['b', 'c'\]"),
        ({"memory_limit_bytes": 100}, "memory_limit_bytes=100, and 'a' alone needs .* raise the limit to"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_when_the_trainer_is_made(
    settings: dict[str, Any], message: str
) -> None:
    strategy = tfpar.Pipeline(**{"num_stages": 2, "num_microbatches": 2, "balance": "parameters", **settings})
    with pytest.raises(ValueError, match=message):
        tfpar.Trainer(named, strategy)
