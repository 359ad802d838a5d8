"""Settings of layers that change between calls of a trainer, without compile, equal Keras or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.trainer.test_fine_tuning import (
    ALL_STRATEGIES,
    DIVIDED,
    add_activity_regularizer,
    arrays,
    by_function,
    change_activation,
    fit,
)

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

CALLS: dict[str, Callable[[Any], Any]] = {
    "fit": lambda verbs: fit(verbs)["loss"],
    "evaluate": lambda verbs: verbs.evaluate(**arrays()),
    "predict": lambda verbs: verbs.predict(arrays()["x"], batch_size=8, verbose=0),
}
DIVIDING = ["weights sharded", "pipeline", *DIVIDED]


def trainer_of(strategy: str) -> tfpar.Trainer:
    return tfpar.Trainer(by_function, ALL_STRATEGIES[strategy](), seed=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [add_activity_regularizer, change_activation], ids=lambda change: change.__name__)
@pytest.mark.parametrize("strategy", DIVIDING)
def test_settings_changed_before_the_first_call_take_effect(
    strategy: str, change: Callable[[keras.Model], None]
) -> None:
    keras.utils.set_random_seed(0)
    model, trainer = by_function(), trainer_of(strategy)
    change(model)
    change(trainer.model)
    for call in ("evaluate", "fit"):
        np.testing.assert_allclose(CALLS[call](trainer), CALLS[call](model), rtol=1e-5, atol=1e-6)


def assign_optimizer(model: keras.Model) -> None:
    model.optimizer = keras.optimizers.SGD(0.5, name="other")


def add_weights(model: keras.Model) -> None:
    model.layers[-1].enable_lora(2)


# The strategy, the call before the change, the change, the call after it, and the refusal.
NEED_COMPILE: dict[str, tuple[str, str, Callable[[keras.Model], None], str, str]] = {
    "a regularizer before another kind of call": (
        *("pipeline", "evaluate", add_activity_regularizer, "fit"),
        r"An activity regularizer takes effect with compile\(\)",
    ),
    "an activation where calls share a trace": (
        *("weights sharded", "evaluate", change_activation, "predict"),
        r"the layer '.*first' of .* has other settings than in the last evaluate\(\)",
    ),
    "another optimizer": (
        "mirrored",
        "fit",
        assign_optimizer,
        "fit",
        r"assigned another one: 'other'\. Call compile\(",
    ),
    "more weights": ("tensor_parallel", "fit", add_weights, "fit", r"as after enable_lora\(\), .*Call compile"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NEED_COMPILE)
def test_changes_that_the_traces_do_not_have_need_compile(name: str) -> None:
    """Keras keeps the settings of a call's first use with no word."""
    strategy, first, change, second, message = NEED_COMPILE[name]
    trainer = trainer_of(strategy)
    CALLS[first](trainer)
    change(trainer.model)
    with pytest.raises(ValueError, match=message):
        CALLS[second](trainer)


class Anneals(keras.callbacks.Callback):
    """Sets an activation before the first step, and a rate in each epoch and step, as schedules do."""

    def on_train_begin(self, logs: Any = None) -> None:
        change_activation(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.get_layer("drop").rate = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.get_layer("drop").rate = 0.5


class UnknownRegularizer(keras.regularizers.Regularizer):
    """A regularizer without a configuration."""

    def __call__(self, outputs: Any) -> Any:
        return 1e-3 * keras.ops.sum(keras.ops.square(outputs))


class KeepsTensor(keras.layers.Layer):
    """A layer that keeps a tensor of its call, such as the scores of attention for a picture."""

    def call(self, inputs: Any) -> Any:
        self.last = 2.0 * inputs
        return self.last


def annealed() -> keras.Model:
    stack = [keras.layers.Dense(6, "tanh", activity_regularizer=UnknownRegularizer()), KeepsTensor()]
    stack += [keras.layers.Dense(5), keras.layers.Dropout(0.3, name="drop"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((arrays()["x"].shape[1],)), *stack])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["mirrored", *DIVIDING])
def test_callbacks_change_settings_as_in_keras(strategy: str) -> None:
    def train(verbs: Any) -> list[float]:
        given = {**arrays(), "shuffle": False, "epochs": 2, "callbacks": [Anneals()]}
        history = verbs.fit(**given, validation_data=(arrays()["x"], arrays()["y"])).history
        verbs.predict(arrays()["x"], verbose=0)
        return [*history["loss"], *history["val_loss"]]

    keras.utils.set_random_seed(0)
    expected = train(annealed())
    found = train(tfpar.Trainer(annealed, ALL_STRATEGIES[strategy](), seed=0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_a_quantized_model_evaluates_and_predicts_without_compile_and_trains_after_it(strategy: str) -> None:
    keras.utils.set_random_seed(0)
    model, trainer = by_function(), trainer_of(strategy)
    for verbs, quantized in ((model, model), (trainer, trainer.model)):
        for call in (fit, CALLS["evaluate"], CALLS["predict"]):
            call(verbs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the input layer has no quantization
            quantized.quantize("int8")
    for name in ("evaluate", "predict"):
        np.testing.assert_allclose(CALLS[name](trainer), CALLS[name](model), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"as after enable_lora\(\), quantize\(\) or pop\(\)\. Call compile"):
        fit(trainer)
