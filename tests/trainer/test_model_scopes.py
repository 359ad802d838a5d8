"""A model of a strategy's scope trains under it, by its own methods or those of tfpar; and may be trained before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases, small

pytestmark = pytest.mark.usefixtures("logical_cpus")

TWO = ["CPU:0", "CPU:1"]

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "pipelines": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2), 2),
    "sharded weights": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "tensor parallel": lambda: tfpar.TensorParallel(2, devices=TWO),
    "one device": lambda: tfpar.SingleDevice("CPU:1"),
}

Methods = Callable[[keras.Model, str], Callable[..., Any]]


def of_the_model(model: keras.Model, name: str) -> Callable[..., Any]:
    return getattr(model, name)  # type: ignore[no-any-return]


def of_tfpar(model: keras.Model, name: str) -> Callable[..., Any]:
    return lambda *data, **settings: getattr(tfpar, name)(model, *data, **settings)


def built() -> keras.Model:
    keras.utils.set_random_seed(0)
    return small.build_model()


def run(model: keras.Model, method: Methods) -> list[Any]:
    """Return what two calls of `fit` and one each of the others return."""
    data = small.data()
    histories = [method(model, "fit")(data, epochs=2, verbose=0, validation_data=data).history for _ in range(2)]
    inputs = np.concatenate([batch[0] for batch in data.as_numpy_iterator()])
    return [*histories, method(model, "evaluate")(data, verbose=0), method(model, "predict")(inputs, verbose=0)]


def assert_equal_runs(found: list[Any], expected: list[Any]) -> None:
    small.assert_same_history(found[0], expected[0])
    small.assert_same_history(found[1], expected[1])
    for one, other in zip(found[2:], expected[2:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.crossed
@pytest.mark.parametrize("inside", [False, True], ids=["after the scope", "inside"])
@pytest.mark.parametrize("method", [of_the_model, of_tfpar], ids=["model.fit", "tfpar.fit"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_trains_under_the_strategy_of_its_scope(name: str, method: Methods, inside: bool) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model = built()
        found = run(model, method) if inside else []
    found = found or run(model, method)
    assert tfpar.Trainer(model).strategy is strategy
    reference = built()
    assert_equal_runs(found, run(reference, of_the_model))
    small.assert_same_state(small.state(model), small.state(reference), 1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_file_that_is_loaded_in_a_scope_trains_on(name: str, tmp_path: Path) -> None:
    reference = built()
    reference.fit(small.data(), verbose=0)
    reference.save(tmp_path / "model.keras")
    with STRATEGIES[name]().scope():
        model = keras.models.load_model(tmp_path / "model.keras")
    found, expected = (one.evaluate(small.data(), verbose=0) for one in (model, reference))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert_equal_runs(run(model, of_the_model), run(reference, of_the_model))


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["load_weights", "set_weights"])
def test_weights_that_are_set_after_the_scope_are_trained_on(method: str, tmp_path: Path) -> None:
    reference = built()
    reference.fit(small.data(), verbose=0)
    reference.compile(reference.optimizer.__class__(), reference.loss)
    reference.save_weights(tmp_path / "model.weights.h5")
    with tfpar.Pipeline(2, 2, devices=TWO).scope():
        model = built()
    getattr(model, method)(tmp_path / "model.weights.h5" if method == "load_weights" else reference.get_weights())
    small.assert_same_state(model.get_weights(), reference.get_weights())
    model.fit(small.data(), verbose=0)
    assert not np.array_equal(model.get_weights()[0], reference.get_weights()[0])


def searched(folder: Path, scope: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Return the scores of a search of KerasTuner, and the results of the best model, as loaded by the tuner."""
    keras_tuner = pytest.importorskip("keras_tuner")

    def build(hyperparameters: Any) -> keras.Model:
        with scope():
            model = small.build_model()
            model.optimizer.learning_rate = hyperparameters.Choice("rate", [0.01, 0.1, 1.0])
        return model

    keras.utils.set_random_seed(0)
    tuner = keras_tuner.GridSearch(build, "val_accuracy", directory=folder, project_name="search")
    tuner.search(small.data(), epochs=2, validation_data=small.data(), verbose=0)
    scores = [trial.score for trial in tuner.oracle.get_best_trials(3)]
    return scores, tuner.get_best_models()[0].evaluate(small.data(), verbose=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_keras_tuner_finds_what_it_finds_with_keras(name: str, tmp_path: Path) -> None:
    expected, results = searched(tmp_path / "keras", contextlib.nullcontext)
    found, found_results = searched(tmp_path / "tfpar", STRATEGIES[name]().scope)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(found_results, results, rtol=1e-5)


@pytest.mark.few(1)
def test_a_trainer_moves_a_model_to_another_strategy_for_good() -> None:
    with STRATEGIES["pipelines"]().scope():
        model = built()
    other = tfpar.Mirrored(["CPU:2", "CPU:3"])
    tfpar.Trainer(model, other).fit(small.data(), verbose=0)
    assert tfpar.Trainer(model).strategy is other


def test_a_model_is_no_model_of_the_scope_after_it() -> None:
    with tfpar.Pipeline(2, 2, devices=TWO).scope():
        built()
    assert tfpar.Trainer(built()).strategy.describe() == "SingleDevice on CPU:0"


@pytest.mark.parametrize("name", ["train_on_batch", "predict_on_batch"])
def test_methods_for_one_batch_find_the_weights_in_place(name: str) -> None:
    (inputs, labels), *_ = small.data().as_numpy_iterator()
    data = (inputs,) if name.startswith("predict") else (inputs, labels)
    with tfpar.Pipeline(2, 2, devices=TWO).scope():
        model = built()
    np.testing.assert_allclose(getattr(model, name)(*data), getattr(built(), name)(*data), rtol=1e-5)


def test_a_model_trains_as_one_device_after_its_trainer_is_gone() -> None:
    """Keras' own fit would clip the gradient of each replica."""

    def clipped() -> keras.Model:
        keras.utils.set_random_seed(0)
        model = small.build_model()
        model.compile(keras.optimizers.SGD(0.5, clipnorm=0.05), model.loss)
        return model

    with tfpar.Mirrored(TWO).scope():
        model = clipped()
    tfpar.Trainer(model).fit(small.data(), verbose=0)
    gc.collect()
    model.fit(small.data(), verbose=0)
    reference = clipped()
    for _ in range(2):
        reference.fit(small.data(), verbose=0)
    small.assert_same_state(model.get_weights(), reference.get_weights(), 1e-5)


def trained() -> keras.Model:
    """The optimizer keeps its state."""
    model = small.build_model()
    model.fit(small.data(), verbose=0)
    return model


def trained_in_part() -> keras.Model:
    """A base that its first batch creates, with another optimizer and by single batches, under a new head."""
    base = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    base.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    for features, labels in small.data().take(3):
        base.train_on_batch(features, labels)
    features = keras.Input((parity_cases.NUM_FEATURES,))
    model = keras.Model(features, keras.layers.Dense(3)(base(features)))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.few(1)
@pytest.mark.crossed
@pytest.mark.parametrize("build", [trained, trained_in_part], ids=lambda build: build.__name__)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_model_function_may_train_its_model_or_a_part_of_it(build: Callable[[], keras.Model], name: str) -> None:
    small.assert_trains_as_one_device(build, small.data, STRATEGIES[name])


@pytest.mark.extended
@pytest.mark.crossed
def test_a_model_function_of_replicas_may_train_with_tfpar_fit() -> None:
    def with_tfpar() -> keras.Model:
        model = small.build_model()
        tfpar.fit(model, small.data(), verbose=0)
        return model

    small.assert_trains_as_one_device(with_tfpar, small.data, lambda: tfpar.Mirrored(TWO, shard="optimizer"))


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict", "train_on_batch"])
def test_keras_own_methods_in_the_scope_of_replicas_are_refused(name: str) -> None:
    """They give other weights, where the optimizer clips for one, and fail for odd batches."""

    def build() -> keras.Model:
        model = small.build_model()
        data = (parity_cases.inputs(7), parity_cases.labels(7))
        getattr(model, name)(*data[: 1 if name == "predict" else 2])
        return model

    with pytest.raises(ValueError, match=rf"A model function cannot call {name}: .* Call tfpar\.fit, tfpar\.evaluate"):
        tfpar.Trainer(build, tfpar.Mirrored(TWO))
