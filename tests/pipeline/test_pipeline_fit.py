"""Optimizers, eager steps, callbacks and unusual elements: `fit` does in pipelines what it does in Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.properties.test_parity import computing_in
from tests.support.parity_cases import NUM_FEATURES, inputs, labels
from tests.support.pipeline_models import NUM_EXAMPLES, TOLERANCE, batched, crossentropy, deep, labelled, tokens
from tests.support.small import assert_same_history, assert_same_state, assert_trains_as_one_device, state

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.mark.extended
def test_a_function_chooses_the_optimizer_of_each_weight() -> None:
    def build() -> keras.Model:
        model = deep()
        of_path = {path: keras.optimizers.SGD(0.1 + index) for index, path in enumerate(("kernel", "bias"))}
        optimizer = keras.optimizers.MultiOptimizer(lambda weight: of_path[weight.path.rsplit("/", 1)[1]])
        model.compile(optimizer, crossentropy())
        return model

    assert_trains_as_one_device(build, labelled, lambda: tfpar.Pipeline(2, 2))


def test_eager_steps_of_many_micro_batches_train_embeddings_and_predict() -> None:
    def build() -> keras.Model:
        embedding, pooling = layers.Embedding(12, 4), layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((5,), dtype="int32"), embedding, pooling, layers.Dense(3)])
        model.compile("sgd", crossentropy(), run_eagerly=True)
        return model

    dataset = batched(tokens(5), labels(NUM_EXAMPLES))
    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(dataset, verbose=0).history
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 6, balance="parameters"), seed=0)
    assert_same_history(trainer.fit(dataset, verbose=0).history, expected, 1e-5)
    np.testing.assert_allclose(trainer.predict(dataset, verbose=0), model.predict(dataset, verbose=0), rtol=1e-4)


def test_the_arguments_and_callbacks_of_fit_work_as_in_keras(tmp_path: Path) -> None:
    histories, models = [], []
    with computing_in("float64"):
        for folder in ("keras", "pipeline"):
            if folder == "keras":
                keras.utils.set_random_seed(0)
                model = deep()
                fit = model.fit
            else:
                trainer = tfpar.Trainer(deep, tfpar.Pipeline(2, 3, balance="parameters"), seed=0)
                model, fit = trainer.model, trainer.fit
            callbacks = [
                keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.05, restore_best_weights=True),
                keras.callbacks.ModelCheckpoint(tmp_path / folder / "{epoch}.keras"),
                keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
                keras.callbacks.TensorBoard(tmp_path / folder / "logs", histogram_freq=1),
            ]
            more = {"validation_split": 0.2, "sample_weight": np.linspace(0, 2, NUM_EXAMPLES), "callbacks": callbacks}
            features, targets = inputs(NUM_EXAMPLES), labels(NUM_EXAMPLES)
            found = fit(features, targets, batch_size=7, epochs=6, shuffle=False, verbose=0, **more)
            histories.append(found.history)
            models.append(model)
        assert_same_history(histories[1], histories[0], TOLERANCE)
        assert_same_state(models[1].get_weights(), models[0].get_weights(), TOLERANCE)
        saved = [keras.models.load_model(tmp_path / name / "2.keras").get_weights() for name in ("keras", "pipeline")]
        assert_same_state(saved[1], saved[0], TOLERANCE)
    assert len(histories[0]["loss"]) < 6


BY_STAGES: dict[str, Callable[[], tfpar.Strategy]] = {
    "pipeline": lambda: tfpar.Pipeline(2, 4, balance="parameters"),
    "hybrid": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), 2),
    "shards": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
}


class AddsReconstructionLoss(layers.Layer):
    def call(self, original: Any, output: Any) -> Any:
        self.add_loss(ops.mean(ops.square(original - output), -1))
        return output


@pytest.mark.few(1)
@pytest.mark.parametrize("structure", ["tensor", "dict"])
@pytest.mark.parametrize("strategy", BY_STAGES)
def test_elements_may_be_the_inputs_alone(strategy: str, structure: str) -> None:
    def build() -> keras.Model:
        image = keras.Input((inputs(1).shape[1],), name="image")
        output = AddsReconstructionLoss()(image, layers.Dense(image.shape[1])(layers.Dense(4)(image)))
        model = keras.Model({"image": image} if structure == "dict" else image, output)
        model.compile("sgd")
        return model

    features = inputs(NUM_EXAMPLES)
    data = tf.data.Dataset.from_tensor_slices({"image": features} if structure == "dict" else features).batch(8)
    keras.utils.set_random_seed(0)
    model, trainer = build(), tfpar.Trainer(build, BY_STAGES[strategy](), seed=0)
    expected = model.fit(data, epochs=2, verbose=0).history
    assert_same_history(trainer.fit(data, epochs=2, verbose=0).history, expected, 1e-5)
    assert_same_state(state(trainer.model), state(model), 1e-5)
    assert trainer.evaluate(data, verbose=0) == pytest.approx(model.evaluate(data, verbose=0), rel=1e-5)
    np.testing.assert_allclose(trainer.predict(data, verbose=0), model.predict(data, verbose=0), rtol=1e-4, atol=1e-6)


PASSING_INPUTS_THROUGH = {
    **BY_STAGES,
    "one stage": lambda: tfpar.Pipeline(1, 2),
    "gpipe": lambda: tfpar.Pipeline(3, 5, "gpipe", balance="parameters"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
    "stages of shards": lambda: tfpar.Pipeline(2, 2, balance="parameters", num_shards=2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", PASSING_INPUTS_THROUGH)
def test_a_model_may_pass_inputs_through_to_its_outputs(strategy: str) -> None:
    """Layers read one of them, which has a loss; none reads the other, an integer."""

    def build() -> keras.Model:
        features, key = keras.Input((NUM_FEATURES,), name="features"), keras.Input((), name="key", dtype="int64")
        hidden = layers.Dense(6, activation="tanh")(layers.Dense(4)(features))
        score = layers.Dense(1, name="score")(hidden)
        model = keras.Model([features, key], {"key": key, "score": score, "features": features})
        model.compile("adam", {"score": "mse", "features": "mae"}, metrics={"score": ["mae"]})
        return model

    rows, keys = inputs(22), np.arange(22)
    targets = {"key": keys, "score": rows[:, :1], "features": rows[::-1]}
    data = tf.data.Dataset.from_tensor_slices(((rows, keys), targets)).batch(8)
    keras.utils.set_random_seed(0)
    model, trainer = build(), tfpar.Trainer(build, PASSING_INPUTS_THROUGH[strategy](), seed=0)
    expected = model.fit(data, epochs=2, validation_data=data, verbose=0).history
    assert_same_history(trainer.fit(data, epochs=2, validation_data=data, verbose=0).history, expected, 1e-5)
    assert_same_state(state(trainer.model), state(model), 1e-5)
    assert trainer.evaluate(data, verbose=0) == pytest.approx(model.evaluate(data, verbose=0), rel=1e-5)
    outputs, expected_outputs = trainer.predict(data, verbose=0), model.predict(data, verbose=0)
    assert outputs.keys() == expected_outputs.keys()
    for name, values in expected_outputs.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["pipeline", "shards"])
def test_a_layer_may_give_another_shape_than_it_says(strategy: str) -> None:
    def build() -> keras.Model:
        words = layers.TextVectorization(max_tokens=8, output_mode="multi_hot")
        words.adapt(["a b c d"])
        text = keras.Input((1,), dtype="string")
        assert words(text).shape == (None, 1, 5)  # Keras 3.15; the tensors are [examples, 5]
        model = keras.Model(text, layers.Dense(3)(layers.Dense(4, activation="tanh")(words(text))))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    texts = tf.constant([["a b"], ["b c d"], ["a a"], ["d"]] * 4)
    data = tf.data.Dataset.from_tensor_slices((texts, labels(16))).batch(8)
    assert_trains_as_one_device(build, lambda: data, BY_STAGES[strategy])
