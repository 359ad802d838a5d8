"""The prediction of a step: memory, saved tensors, the order of actions; and the trace of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.support.parity_cases import classifier, inputs, labels
from tests.support.pipeline_models import deep
from tests.support.small import shuffled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


def test_an_error_of_a_measurement_on_one_worker_is_reported_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a report, the other workers would wait for the messages of the measurement."""
    pipeline = tfpar.Pipeline(2, 2, balance="parameters")
    trainer = tfpar.Trainer(classifier(), pipeline, seed=0)
    batch = trainer.build(shuffled())
    reports = []

    @contextlib.contextmanager
    def reported() -> Iterator[None]:
        try:
            yield
        except tf.errors.OpError as error:
            reports.append(error.message)
            raise

    def failing(*_: object) -> None:
        raise tf.errors.InternalError(None, None, "the device is lost")

    monkeypatch.setattr(pipeline.job, "reported", reported)
    monkeypatch.setattr("tfpar.pipeline.analysis.step_timing.measure_durations", failing)
    with pytest.raises(tf.errors.InternalError):
        pipeline.predict_step_time(trainer.model, batch)
    assert reports == ["the device is lost"]


def test_recomputation_lowers_the_memory_of_a_device_without_delayed_weight_gradients() -> None:
    def most_bytes(schedule: str, recompute: bool) -> int:
        strategy = tfpar.Pipeline(2, 4, schedule, [2, 2], recompute=recompute, memory_limit_bytes=1)
        with pytest.raises(ValueError, match="with this balance the devices need") as error:
            tfpar.Trainer(deep, strategy, seed=0).fit(inputs(8), labels(8), batch_size=8, verbose=0)
        _, _, needs = str(error.value).partition("the devices need ")
        return max(int(need.replace(",", "")) for need in needs.partition(" bytes")[0].split(", "))

    assert most_bytes("1f1b", recompute=True) < most_bytes("1f1b", recompute=False)
    # A W runs after the next micro-batch's B, whose recomputed activations are saved until its own W.
    assert most_bytes("zero_bubble", recompute=True) == most_bytes("zero_bubble", recompute=False)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "recompute", "expected"),
    [
        ("1f1b", False, [(160 + 640, 0, 0, 0), (320, 0, 0, 0)]),
        ("1f1b", True, [(160, 640, 0, 0), (320, 0, 0, 0)]),
        # Nothing comes before stage 0 that needs a gradient: all that its B has to do is left to W.
        ("zero_bubble", False, [(160 + 640, 0, 0, 320), (320, 0, 0, 80)]),
        ("zero_bubble", True, [(160, 0, 640, 320), (320, 0, 0, 80)]),
    ],
)
def test_the_bytes_saved_for_a_micro_batch_are_known(
    schedule: str, recompute: bool, expected: list[tuple[int, ...]]
) -> None:
    """Of 5 examples in float32: 160 bytes into stage 0, 320 from each of its two layers, 80 out of stage 1."""

    def build() -> keras.Model:
        hidden = [layers.Dense(16, "relu"), layers.Dense(16, "relu")]
        model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4)])
        model.compile("adam", "mse")
        return model

    pipeline = tfpar.Pipeline(2, 4, schedule, [2, 1], recompute=recompute)
    trainer = tfpar.Trainer(build, pipeline, seed=0)
    arrays = np.ones((20, 8), "float32"), np.ones((20, 4), "float32")
    batch = trainer.build(tf.data.Dataset.from_tensor_slices(arrays).batch(20))
    prediction = pipeline.predict_step_time(trainer.model, batch)
    sizes = prediction.durations
    saved = (
        *(sizes.activation_bytes, sizes.backward_temporary_bytes),
        *(sizes.weight_gradient_temporary_bytes, sizes.until_weight_gradient_bytes),
    )
    assert list(zip(*saved, strict=True)) == expected
    assert tuple(row.memory_bytes for row in prediction.rows) == prediction.planned.peak_bytes


def test_a_traced_step_shows_devices_that_work_at_the_same_time() -> None:
    """stage 0  F0 F1 F2 F3 …
    stage 1     F0 F1 F2 …      in TensorFlow's own order, all clocks were read one after the other, and so ran this."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((256,)), layers.Dense(2048, "gelu"), layers.Dense(2048, "gelu")])
        model.compile("sgd", "mse")
        return model

    pipeline = tfpar.Pipeline(2, 4, "gpipe", balance=[1, 1])
    trainer = tfpar.Trainer(build, pipeline, seed=0)
    arrays = np.ones((256, 256), "float32"), np.ones((256, 2048), "float32")
    batch = trainer.build(tf.data.Dataset.from_tensor_slices(arrays).batch(256))
    spans = pipeline.trace(trainer.model, batch).spans
    stages = [[span for span in spans if span.device == device] for device in range(2)]
    together = [
        (one.action, other.action)
        for one in stages[0]
        for other in stages[1]
        if one.begin_seconds < other.end_seconds and other.begin_seconds < one.end_seconds
    ]
    assert together, f"no two actions of different devices overlap in {spans}"
