"""State that a layer of the user's updates from its examples is that of one device, or the model is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import parity_cases

pytestmark = pytest.mark.usefixtures("logical_cpus")

TWO = ["CPU:0", "CPU:1"]

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "sharded weights": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 3, devices=TWO),
    "pipelines": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2), 2),
}


def every_second(state: Any, x: Any) -> Any:
    """Update all but the first number, which counts steps, in every second step."""
    count = state[:1] + 1.0
    updated = ops.where(count % 2.0 == 0.0, 0.9 * state + 0.1 * ops.mean(x, 0), state)
    return ops.concatenate([count, updated[1:]], 0)


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "moving mean": lambda state, x: 0.9 * state + 0.1 * ops.mean(x, 0),
    "mean of gathered": lambda state, x: 0.9 * state + 0.1 * ops.mean(tfpar.gather(x), 0),
    "sum of gathered": lambda state, x: state + ops.sum(tfpar.gather(x), 0),
    "every second step": every_second,
    "steps": lambda state, x: state + 1.0,
    "sum": lambda state, x: state + ops.sum(x, 0),
    "maximum": lambda state, x: ops.maximum(state, ops.max(x, 0)),
    "last example": lambda state, x: x[-1],
}


class Centred(keras.layers.Layer):
    """A layer that subtracts its state in inference."""

    def __init__(self, update: str, aggregation: str | None = None) -> None:
        super().__init__()
        self.update, self.aggregation = update, aggregation

    def build(self, shape: Any) -> None:
        given = {} if self.aggregation is None else {"aggregation": self.aggregation}
        self.state = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="state", **given)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.state.assign(UPDATES[self.update](self.state, inputs))
            return inputs
        return inputs - self.state


def built(update: str, aggregation: str | None = None) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), Centred(update, aggregation), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


def fit(fit_: Callable[..., Any]) -> list[float]:
    # Batches of seven: parts of different sizes, and a last batch of two.
    arrays = parity_cases.inputs(23), parity_cases.labels(23)
    history = fit_(*arrays, batch_size=7, epochs=2, shuffle=False, verbose=0, validation_data=arrays).history
    return list(history["val_loss"])


@pytest.mark.parametrize(
    ("name", "update"),
    [
        *((name, update) for name in STRATEGIES for update in ("moving mean", "steps")),
        *(("mirrored", update) for update in ("every second step", "mean of gathered", "sum of gathered")),
    ],
)
def test_state_that_parts_of_a_batch_give_too_is_exact(name: str, update: str) -> None:
    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = built(update)()
        expected = fit(model.fit)
        trainer = tfpar.Trainer(built(update), STRATEGIES[name](), seed=0)
        np.testing.assert_allclose(fit(trainer.fit), expected, rtol=1e-12)
        np.testing.assert_allclose(trainer.model.layers[0].state, model.layers[0].state, rtol=1e-12, atol=1e-15)


@pytest.mark.crossed
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("update", ["sum", "maximum", "last example"])
def test_other_state_is_refused_before_the_first_step(name: str, update: str) -> None:
    trainer = tfpar.Trainer(built(update), STRATEGIES[name](), seed=0)
    with pytest.raises(ValueError, match=r"must update its state as on one device, and after a batch '.*/state'"):
        fit(trainer.fit)
    assert int(trainer.model.optimizer.iterations) == 0


class AlwaysUpdated(Centred):
    """A layer that updates its state in inference too, as without the argument `training`."""

    def call(self, inputs: Any) -> Any:
        outputs = inputs - self.state
        self.state.assign(UPDATES[self.update](self.state, inputs))
        return outputs


def always_updated(update: str) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), AlwaysUpdated(update), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return build


@pytest.mark.parametrize("name", STRATEGIES)
def test_state_that_evaluation_and_prediction_update_is_exact(name: str) -> None:
    arrays = parity_cases.inputs(23), parity_cases.labels(23)

    def outputs_after(model: Any) -> Any:
        fit(model.fit)
        model.evaluate(*arrays, batch_size=7, verbose=0)
        model.predict(arrays[0], batch_size=7, verbose=0)
        return model.predict(arrays[0], batch_size=7, verbose=0)

    with computing_in("float64"):
        keras.utils.set_random_seed(0)
        model = always_updated("moving mean")()
        expected = outputs_after(model)
        trainer = tfpar.Trainer(always_updated("moving mean"), STRATEGIES[name](), seed=0)
        np.testing.assert_allclose(outputs_after(trainer), expected, rtol=1e-11)
        np.testing.assert_allclose(trainer.model.layers[0].state, model.layers[0].state, rtol=1e-11)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("name", ["mirrored", "pipeline"])
def test_other_state_that_inference_updates_is_refused(name: str, method: str) -> None:
    trainer = tfpar.Trainer(always_updated("maximum"), STRATEGIES[name](), seed=0)
    arrays = parity_cases.inputs(23), parity_cases.labels(23)
    with pytest.raises(ValueError, match=r"after a batch in inference '.*/state' is not its mean over the parts"):
        getattr(trainer, method)(*(arrays if method == "evaluate" else arrays[:1]), verbose=0)


@pytest.mark.parametrize("name", ["sharded weights", "pipeline", "pipelines"])
def test_gathered_state_is_refused_where_micro_batches_gather_their_own_rows(name: str) -> None:
    trainer = tfpar.Trainer(built("sum of gathered"), STRATEGIES[name](), seed=0)
    with pytest.raises(ValueError, match=r"must update its state as on one device, and after a batch '.*/state'"):
        fit(trainer.fit)


@pytest.mark.parametrize(("update", "aggregation"), [("moving mean", "mean"), ("steps", "sum")])
def test_state_that_keras_reduces_over_replicas_otherwise_is_refused(update: str, aggregation: str) -> None:
    trainer = tfpar.Trainer(built(update, aggregation), tfpar.Mirrored(TWO), seed=0)
    with pytest.raises(ValueError, match="leave out the weight's aggregation"):
        fit(trainer.fit)


def test_state_is_exact_where_fit_is_called_inside_of_the_scope() -> None:
    keras.utils.set_random_seed(0)
    model = built("moving mean")()
    expected = fit(model.fit)
    with tfpar.Mirrored(TWO).scope():
        keras.utils.set_random_seed(0)
        mirrored = built("moving mean")()
        found = fit(mirrored.fit)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_state_in_low_precision_trains(policy: str) -> None:
    with computing_in("float32"):
        keras.config.set_dtype_policy(policy)
        trainer = tfpar.Trainer(built("moving mean"), tfpar.Mirrored(TWO), seed=0)
        assert np.isfinite(fit(trainer.fit)).all()
