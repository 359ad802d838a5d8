"""A pipeline whose model is compiled again between two fits trains by the new compilation, as Keras does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfpar
from tests.properties.test_parity import computing_in
from tests.support.parity_cases import NUM_CLASSES, NUM_FEATURES, inputs, labels
from tests.support.small import assert_same_history, assert_same_state, state

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_EXAMPLES, BATCH_SIZE = 11, 4
TOLERANCE = 1e-9

Change = Callable[[keras.Model], None]


def two_outputs() -> keras.Model:
    features = keras.Input((NUM_FEATURES,))
    hidden = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(features))
    model = keras.Model(
        features, [layers.Dense(NUM_CLASSES, name="kind")(hidden), layers.Dense(1, name="size")(hidden)]
    )
    compile_again("mse", metrics=[None, "mae"])(model)
    return model


def compile_again(size_loss: str = "mse", optimizer: str = "sgd", **compiled: Any) -> Change:
    def change(model: keras.Model) -> None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, [loss, size_loss], **compiled)

    return change


def scale_weights(model: keras.Model) -> None:
    model.set_weights([0.5 * weight for weight in model.get_weights()])


def arrays() -> dict[str, Any]:
    sizes = 3 * np.random.default_rng(5).normal(size=(NUM_EXAMPLES, 1)).astype(keras.config.floatx())
    return {"x": inputs(NUM_EXAMPLES), "y": [labels(NUM_EXAMPLES), sizes], "batch_size": BATCH_SIZE, "verbose": 0}


CHANGES: dict[str, Change] = {
    "loss": compile_again("mae"),
    "loss and metrics": compile_again("mae", metrics=[["accuracy"], ["mse"]], loss_weights=[0.1, 3.0]),
    "optimizer": compile_again("mse", "adam", weighted_metrics=[None, ["mae"]]),
    "fewer losses": lambda model: model.compile(model.optimizer, [None, "mae"]),
    "weights": scale_weights,
    "eagerly": compile_again("huber", run_eagerly=True),
}


def test_every_fit_follows_the_last_compilation() -> None:
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = two_outputs()
        trainer = tfpar.Trainer(two_outputs, tfpar.Pipeline(2, 3, balance="parameters"), seed=0)
        for name, change in {"first": lambda model: None, **CHANGES}.items():
            expected = []
            for one, verbs in ((model, model), (trainer.model, trainer)):
                change(one)
                before = verbs.evaluate(**arrays(), return_dict=True)
                found = verbs.fit(**arrays(), shuffle=False).history
                if one is model:
                    expected = [before, found]
            assert before == pytest.approx(expected[0], rel=TOLERANCE), name
            assert_same_history(found, expected[1], TOLERANCE)
            assert_same_state(state(trainer.model), state(model), TOLERANCE)


def test_weights_from_a_file_count_in_the_next_fit(tmp_path: Path) -> None:
    with computing_in("float64"):
        trainer = tfpar.Trainer(two_outputs, tfpar.Pipeline(2, 2, balance="parameters"), seed=0)
        trainer.model.save_weights(tmp_path / "first.weights.h5")
        histories = []
        for _ in range(2):
            histories.append(trainer.fit(**arrays(), shuffle=False).history)
            trainer.model.load_weights(tmp_path / "first.weights.h5")
    assert_same_history(histories[1], histories[0], TOLERANCE)


def test_an_optimizer_with_more_slots_is_checked_against_the_memory_limit() -> None:
    trainer = tfpar.Trainer(two_outputs, tfpar.Pipeline(2, 2, balance="parameters", memory_limit_bytes=1500), seed=0)
    trainer.fit(**arrays())
    compile_again("mae", "adam")(trainer.model)
    with pytest.raises(ValueError, match="memory_limit_bytes=1,500"):
        trainer.fit(**arrays())


def test_stages_are_measured_by_the_last_compilation_only() -> None:
    strategy = tfpar.Pipeline(2, 2, balance="parameters")
    trainer = tfpar.Trainer(two_outputs, strategy, seed=0)
    batch = inputs(4), (labels(4), np.zeros((4, 1)))
    with pytest.raises(ValueError, match=r"was not yet\. Call trainer\.build"):
        strategy.trace(trainer.model, batch)
    trainer.fit(**arrays())
    compile_again("mae")(trainer.model)
    with pytest.raises(ValueError, match=r"was compiled again since\. Call trainer\.build"):
        strategy.predict_step_time(trainer.model, batch)
