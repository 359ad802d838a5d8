"""The FLOPs of a model: TensorFlow's counter beside counts by hand, models that it cannot count, and the MFU."""

from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tfpar.runs.reporting import model_flops
from tfpar.runs.reporting.model_flops import ModelFlops, forward_flops


def attention() -> keras.Model:
    inputs = keras.Input([6, 16])
    return keras.Model(inputs, keras.layers.MultiHeadAttention(2, 8, use_bias=False)(inputs, inputs))


class Loop(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return tf.while_loop(lambda step, _: step < 3, lambda step, rows: (step + 1, 2 * rows), [0, inputs])[1]


def counted(*layers: keras.layers.Layer, shape: tuple[int | None, ...] = (5,)) -> int | None:
    return forward_flops(keras.Sequential([keras.Input(shape), *layers]), batch_size=4)


def test_dense_layers_are_counted_as_by_hand() -> None:
    # A product of [4, 5] and [5, 8] has 4 x 8 sums of 5 products; a bias adds 4 x 8.
    assert counted(keras.layers.Dense(8), keras.layers.Dense(1)) == 4 * (2 * 5 * 8 + 8 + 2 * 8 + 1)


def test_convolutions_are_counted_as_by_hand() -> None:
    # 6 x 6 positions, 3 x 3 x 3 products each, 4 filters, and a bias.
    assert counted(keras.layers.Conv2D(4, 3), shape=(8, 8, 3)) == 4 * 36 * 4 * (2 * 27 + 1)


def test_attention_is_counted_with_its_products_of_scores() -> None:
    flops = forward_flops(attention(), batch_size=4)
    products = 4 * (4 * 2 * 6 * 16 * 16 + 2 * 2 * 2 * 6 * 6 * 8)
    assert flops is not None
    assert products <= flops < 1.05 * products, "softmax and scale are small"


@pytest.mark.parametrize(
    "model",
    [
        lambda: keras.Sequential([keras.Input([5]), Loop()]),
        lambda: keras.Sequential([keras.Input([5, 2]), keras.layers.LSTM(3)]),
        lambda: keras.Sequential([keras.Input([None, 2]), keras.layers.Dense(3)]),
        lambda: keras.Sequential([keras.layers.Dense(3)]),
    ],
    ids=["loop", "recurrent", "unknown size", "not built"],
)
def test_what_cannot_be_counted_is_left_out(model: Any) -> None:
    assert forward_flops(model(), batch_size=4) is None


def test_the_mfu_is_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8, use_bias=False)])
    cards = [SimpleNamespace(name="GPU:0"), SimpleNamespace(name="GPU:1")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: cards)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: cards)
    details = {"device_name": "NVIDIA A100-SXM4-40GB"}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda card: details)
    strategy: Any = SimpleNamespace(num_workers=1, device_names=["GPU:0", "GPU:1"])
    flops = ModelFlops(strategy, tfpar.Throughput(), batch_size=4)
    flops.set_model(model)
    flops.on_train_begin()
    figures = flops.figures({"examples_per_second": 1e9, "step_milliseconds": 2.0})
    assert figures["flops_per_step"] == pytest.approx(3 * 80 * 2e6)
    assert figures["mfu"] == pytest.approx(3 * 80 * 1e9 / (2 * 156e12)), "TensorFlow's float32 is TensorFloat-32"
    details["device_name"] = "An unknown card"
    assert model_flops.peak_flops_per_second(strategy, model) is None
