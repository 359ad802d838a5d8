"""Any graph of layers trains, evaluates and predicts in stages as on one device."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar
from tests.properties.test_parity import computing_in
from tests.support.extent import sampled
from tests.support.parity_cases import NUM_CLASSES, NUM_FEATURES, inputs
from tests.support.pipeline_models import (
    MODELS,
    TOLERANCE,
    CountsAndAddsLoss,
    assert_pipeline_equals_one_device,
    crossentropy,
    labelled,
    sequential,
)
from tests.support.small import assert_same_history, assert_same_state, state

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.mark.extended
@pytest.mark.parametrize("name", sampled(MODELS, of_ci=[*MODELS][::2]), ids=lambda name: name.replace(" ", "_"))
def test_a_model_trains_and_evaluates_as_on_one_device(name: str) -> None:
    assert_pipeline_equals_one_device(*MODELS[name], near_zero=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_first_batch_may_have_fewer_examples_than_there_are_micro_batches(schedule: str) -> None:
    def sizes(*sizes: int) -> tf.data.Dataset:
        parts = [labelled().unbatch().skip(sum(sizes[:number])).take(size) for number, size in enumerate(sizes)]
        weights = [tf.data.Dataset.from_tensors(1.0 + tf.range(size, dtype="float64")) for size in sizes]
        batches = [tf.data.Dataset.zip(part.batch(8), weight) for part, weight in zip(parts, weights, strict=True)]
        batches = [batch.map(lambda one, weight: (*one, weight)) for batch in batches]
        return functools.reduce(tf.data.Dataset.concatenate, batches)

    build = sequential(CountsAndAddsLoss, lambda: layers.Dense(8, kernel_regularizer="l2"), optimizer="adam")
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = build()
        model.run_eagerly = True  # compiled, Keras' own step is 4e-4 off: it can read a weight after its update
        expected = model.fit(sizes(1, 5, 3, 2), epochs=2, verbose=0).history
        trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 4, schedule, "parameters"), seed=0)
        assert_same_history(trainer.fit(sizes(1, 5, 3, 2), epochs=2, verbose=0).history, expected, TOLERANCE)
        assert_same_state(state(trainer.model), state(model), TOLERANCE)
        np.testing.assert_allclose(
            trainer.predict(inputs(1), verbose=0), model.predict(inputs(1), verbose=0), rtol=TOLERANCE
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "num_hidden", "num_stages"),
    [("1f1b", 0, 1), ("zero_bubble", 1, 2), ("interleaved", 0, 1), ("interleaved", 2, 3)],
)
def test_a_model_of_fewer_calls_than_stages_trains_in_fewer_stages_with_a_warning(
    schedule: str, num_hidden: int, num_stages: int
) -> None:
    def build() -> keras.Model:
        hidden = [layers.Dense(8, "tanh") for _ in range(num_hidden)]
        model = keras.Sequential([keras.Input((NUM_FEATURES,)), *hidden, layers.Dense(NUM_CLASSES)])
        model.compile("sgd", crossentropy(), metrics=["accuracy"])
        return model

    devices = ["CPU:0"] if num_hidden == 2 else None
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        expected = build().fit(labelled(), epochs=2, verbose=0).history
        with pytest.warns(UserWarning, match=f"for 4 stages: it runs in {num_stages} on CPU:0"):
            trainer = tfpar.Trainer(build, tfpar.Pipeline(4, 2, schedule, devices=devices), seed=0)
        found = trainer.fit(labelled(), epochs=2, verbose=0).history
    assert_same_history(found, expected, TOLERANCE)
    assert len(trainer.strategy.predict_step_time(trainer.model, next(iter(labelled()))).rows) == num_stages
