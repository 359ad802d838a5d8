"""Arguments of fit, evaluate and predict of a wrong kind are refused in one sentence that names them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import tfpar

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

INPUTS, TARGETS = np.ones((16, 4), "float32"), np.ones((16, 1), "float32")
VALIDATION: dict[str, Any] = {"validation_data": (INPUTS, TARGETS)}


@pytest.fixture(scope="module")
def trainer(logical_cpus: list[str]) -> tfpar.Trainer:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    return tfpar.Trainer(build, tfpar.Mirrored(["CPU:0", "CPU:1"]))


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        ("epochs", "3", {}),
        ("epochs", None, {}),
        ("initial_epoch", "1", {}),
        ("batch_size", 8.0, {}),
        ("steps_per_epoch", 1.5, {}),
        ("steps_per_call", "3", {}),
        ("validation_steps", "1", VALIDATION),
    ],
)
def test_numbers_of_fit_must_be_whole(trainer: tfpar.Trainer, name: str, value: Any, others: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a whole number, received {value!r}"):
        trainer.fit(INPUTS, TARGETS, verbose=0, **{name: value}, **others)


@pytest.mark.parametrize("name", ["steps", "batch_size"])
def test_numbers_of_evaluate_and_predict_must_be_whole(trainer: tfpar.Trainer, name: str) -> None:
    for call in (
        lambda: trainer.evaluate(INPUTS, TARGETS, **{name: "1"}),
        lambda: trainer.predict(INPUTS, **{name: "1"}),
    ):
        with pytest.raises(TypeError, match=f"^{name} must be a whole number, received '1'"):
            call()


def test_whole_numbers_of_numpy_train(trainer: tfpar.Trainer) -> None:
    history = trainer.fit(INPUTS, TARGETS, epochs=np.int64(2), batch_size=np.int32(8), verbose=0).history
    assert len(history["loss"]) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps_per_epoch": -1}, ValueError, "steps_per_epoch must not be negative, received -1"),
        ({"validation_split": "0.5"}, TypeError, "validation_split must be a fraction above 0 and below 1"),
        ({"validation_freq": "1", **VALIDATION}, ValueError, "validation_freq must be a number of epochs"),
        ({"class_weight": "balanced"}, TypeError, r"class_weight maps classes .*'balanced'.* compute_class_weight"),
        ({"checkpoints": "folder"}, TypeError, r"Write checkpoints=tfpar\.Checkpoints\(folder\)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_other_arguments_of_a_wrong_kind(
    trainer: tfpar.Trainer, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        trainer.fit(INPUTS, TARGETS, verbose=0, **arguments)


def test_weights_for_some_outputs_only_name_the_others() -> None:
    def build() -> keras.Model:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in ("first", "second")})
        model.compile("sgd", {"first": "mse", "second": "mse"})
        return model

    trainer = tfpar.Trainer(build, tfpar.Mirrored(["CPU:0", "CPU:1"]))
    targets, weights = {"first": TARGETS, "second": TARGETS}, {"first": np.ones(16)}
    with pytest.raises(ValueError, match=r"received \['first'\] for \['first', 'second'\]\. Give an output"):
        trainer.fit(INPUTS, targets, sample_weight=weights, verbose=0)
