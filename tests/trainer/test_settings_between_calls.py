"""Settings of layers that change between calls of a trainer, without compile, equal Keras or are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.support import parity_cases, small
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


@pytest.mark.parametrize(("first", "second"), [("evaluate", "fit"), ("fit", "evaluate"), ("predict", "evaluate")])
@pytest.mark.parametrize("strategy", DIVIDING)
def test_regularizers_added_after_a_call_need_compile_before_another_kind_of_call(
    strategy: str, first: str, second: str
) -> None:
    """Keras traces each kind of call at its first use, with the settings of that time."""
    trainer = trainer_of(strategy)
    CALLS[first](trainer)
    add_activity_regularizer(trainer.model)
    with pytest.raises(ValueError, match=r"An activity regularizer takes effect with compile\(\), and a layer of"):
        CALLS[second](trainer)
    CALLS[first](trainer)  # as it was traced


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", DIVIDING)
def test_settings_changed_after_all_kinds_of_calls_have_no_effect(strategy: str) -> None:
    keras.utils.set_random_seed(0)
    model, trainer = by_function(), trainer_of(strategy)
    for verbs, changed in ((model, model), (trainer, trainer.model)):
        for call in CALLS.values():
            call(verbs)
        change_activation(changed)
    for call in CALLS.values():
        np.testing.assert_allclose(call(trainer), call(model), rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_is_assigned_needs_compile() -> None:
    """Keras trains on with the optimizer of its trace."""
    trainer = trainer_of("mirrored")
    CALLS["fit"](trainer)
    trainer.model.optimizer = keras.optimizers.SGD(0.5, name="other")
    with pytest.raises(ValueError, match=r"was assigned another one: 'other'\. Call compile\("):
        CALLS["fit"](trainer)


@pytest.mark.parametrize("strategy", ["mirrored", "optimizer sharded", *DIVIDED])
def test_weights_that_are_added_after_a_step_need_compile(strategy: str) -> None:
    trainer = trainer_of(strategy)
    CALLS["fit"](trainer)
    trainer.model.layers[-1].enable_lora(2)
    with pytest.raises(ValueError, match=r"has other weights than in its last train step, as after enable_lora"):
        CALLS["fit"](trainer)


def test_a_layer_that_is_replaced_after_a_step_needs_compile() -> None:
    trainer = tfpar.Trainer(small.build_model, small.STRATEGIES["mirrored"](), seed=0)
    CALLS["fit"](trainer)
    trainer.model.pop()
    trainer.model.add(keras.layers.Dense(parity_cases.NUM_CLASSES))
    with pytest.raises(
        ValueError, match=r"other weights than in its last train step, as after .* or pop\(\)\. Call comp"
    ):
        CALLS["fit"](trainer)


@pytest.mark.parametrize("strategy", DIVIDING)
def test_an_activation_changed_after_evaluate_takes_effect_in_fit(strategy: str) -> None:
    """Keras traces fit at its first call."""
    keras.utils.set_random_seed(0)
    model, trainer = by_function(), trainer_of(strategy)
    for verbs, changed in ((model, model), (trainer, trainer.model)):
        CALLS["evaluate"](verbs)
        change_activation(changed)
    for call in ("fit", "evaluate"):
        np.testing.assert_allclose(CALLS[call](trainer), CALLS[call](model), rtol=1e-5)


@pytest.mark.parametrize("strategy", ["pipeline", "weights sharded", "stages_of_shards"])
def test_an_activation_changed_between_evaluate_and_predict_needs_compile(strategy: str) -> None:
    """Both have the traces of one pass."""
    trainer = trainer_of(strategy)
    CALLS["evaluate"](trainer)
    change_activation(trainer.model)
    with pytest.raises(ValueError, match=r"the layer '.*first' of .* has other settings than in the last evaluate\(\)"):
        CALLS["predict"](trainer)


def test_an_activation_changed_after_a_preview_needs_compile() -> None:
    trainer = trainer_of("pipeline")
    trainer.preview(**{name: value for name, value in arrays().items() if name != "verbose"})
    change_activation(trainer.model)
    with pytest.raises(ValueError, match=r"has other settings than in the last fit\(\) or preview\(\)"):
        CALLS["fit"](trainer)


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


@pytest.mark.few(3)
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


@pytest.mark.few(3)
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
