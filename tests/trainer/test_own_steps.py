"""Models with a `train_step`, `test_step` or `predict_step` of their own, on one device and on replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import small
from tests.support.once import in_a_run
from tests.support.own_step_cases import CASES, Case, Guide, labelled, unlabelled
from tfpar._compat.random_numbers import fixed_random_ops

pytestmark = pytest.mark.usefixtures("logical_cpus")
TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "one device": tfpar.SingleDevice,
    "replicas": lambda: tfpar.Mirrored(TWO),
    "sharded optimizer": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
    "uneven shares": lambda: tfpar.Mirrored(TWO, batch_shares=[3, 1]),
}


@pytest.fixture(autouse=True)
def typical_numbers() -> Iterator[None]:
    """Compute in float64, and replace random numbers: those of replicas are not those of one device."""
    with computing_in("float64"), fixed_random_ops.all_fixed(lambda name: None):
        yield


def trained(case: Case, fit: Callable[..., Any], model: keras.Model) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    validation = {"validation_data": case.data()} if case.validates else {}
    history = fit(case.data(), epochs=2, verbose=0, **validation).history
    return history, model.get_weights()


@in_a_run
def of_keras(name: str) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Return what Keras' own fit gives."""
    keras.utils.set_random_seed(0)
    model = CASES[name].build()
    return trained(CASES[name], model.fit, model)


# The other rows and strategies run with the whole tables.
IN_CI = {
    ("guide", "one device"),
    ("guide", "sharded optimizer"),
    ("WGAN-GP", "replicas"),
    ("diffusion", "replicas"),
    ("SimCLR", "uneven shares"),
    ("masked sequences", "sharded optimizer"),
}


def rows() -> Iterator[Any]:
    for name in CASES:
        for strategy in STRATEGIES:
            marks = () if (name, strategy) in IN_CI else pytest.mark.extended
            yield pytest.param(name, strategy, marks=marks, id=f"{name}-{strategy}")


@pytest.mark.parametrize(("name", "strategy"), rows())
def test_own_steps_equal_those_of_keras(name: str, strategy: str) -> None:
    trainer = tfpar.Trainer(CASES[name].build, STRATEGIES[strategy](), seed=0)
    history, weights = trained(CASES[name], trainer.fit, trainer.model)
    expected_history, expected = of_keras(name)
    small.assert_same_history(history, expected_history)
    assert_close(weights, expected)


def assert_close(weights: list[np.ndarray], expected: list[np.ndarray], tolerance: float = 1e-9) -> None:
    for actual, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize(
    "settings",
    [
        {"run_eagerly": True},
        {"steps_per_execution": 2},
        pytest.param({"jit_compile": True}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_the_settings_of_compile_apply_to_own_steps(settings: dict[str, Any]) -> None:
    def build() -> keras.Model:
        model = Guide()
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["mae"], **settings)
        return model

    keras.utils.set_random_seed(0)
    model = build()
    expected = model.fit(labelled(), verbose=0).history
    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO), seed=0)
    small.assert_same_history(trainer.fit(labelled(), verbose=0).history, expected)
    assert_close(trainer.model.get_weights(), model.get_weights())


def test_own_steps_scale_losses_in_mixed_precision() -> None:
    def build() -> keras.Model:
        model = Guide()
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        return model

    with computing_in("float32"):
        keras.config.set_dtype_policy("mixed_float16")
        keras.utils.set_random_seed(0)
        model = build()
        model.fit(labelled(), verbose=0)
        trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO), seed=0)
        trainer.fit(labelled(), verbose=0)
    assert isinstance(trainer.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert_close(trainer.model.get_weights(), model.get_weights(), tolerance=3e-3)


def test_an_own_predict_step_returns_the_rows_of_the_batch() -> None:
    case = CASES["diffusion"]
    keras.utils.set_random_seed(0)
    expected = case.build().predict(case.data(), verbose=0)
    for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(TWO)):
        predicted = tfpar.Trainer(case.build, strategy, seed=0).predict(case.data(), verbose=0)
        np.testing.assert_allclose(predicted, expected, rtol=1e-9)


def test_methods_for_one_batch_run_own_steps() -> None:
    case = CASES["siamese"]
    (batch,) = next(iter(case.data()))
    keras.utils.set_random_seed(0)
    model = case.build()
    expected = model.train_on_batch(batch), model.get_weights()
    trainer = tfpar.Trainer(case.build, tfpar.Mirrored(TWO), seed=0)
    loss = trainer.model.train_on_batch(batch)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-9)
    assert_close(trainer.model.get_weights(), expected[1])
    model.reset_metrics()
    np.testing.assert_allclose(trainer.model.test_on_batch(batch), model.test_on_batch(batch), rtol=1e-9)


class Calls(keras.metrics.Metric):
    """Counts its updates in a whole number."""

    def __init__(self) -> None:
        super().__init__(name="calls", dtype="int32")
        self.count = self.add_variable((), "zeros", "int32", name="count")

    def update_state(self) -> None:
        self.count.assign_add(1)

    def result(self) -> Any:
        return self.count + 0


class Logging(Guide):
    """Logs numbers of other types than floats."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.calls.update_state()
        others = {"int": 3, "flag": True, "rows": tf.shape(data[0])[0], "rate": self.optimizer.learning_rate}
        return {**logs, **others, "calls": self.calls.result()}

    @property
    def metrics(self) -> list[Any]:
        return [metric for metric in super().metrics if metric.name != "calls"]

    def reset_metrics(self) -> None:
        super().reset_metrics()
        self.calls.reset_state()


def test_log_entries_may_have_any_type() -> None:
    def build() -> keras.Model:
        model = Logging()
        model.compile("sgd", "binary_crossentropy")
        return model

    keras.utils.set_random_seed(0)
    expected = build().fit(labelled(), epochs=2, verbose=0).history
    for strategy in (tfpar.SingleDevice(), tfpar.Mirrored(TWO)):
        history = tfpar.Trainer(build, strategy, seed=0).fit(labelled(), epochs=2, verbose=0).history
        small.assert_same_history(history, expected)


class Ranked(keras.Model):
    """Compares the examples of a batch without tfpar.gather."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4, use_bias=False)

    def train_step(self, rows: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = self.dense(rows)
            loss = keras.ops.mean(keras.ops.square(keras.ops.matmul(outputs, keras.ops.transpose(outputs))))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"similarity": loss}


def ranked() -> keras.Model:
    model = Ranked()
    model.compile("sgd")
    return model


def test_a_step_that_compares_examples_is_refused_or_averaged() -> None:
    with pytest.raises(ValueError, match=r"the gradient of 'dense.*kernel' in Ranked.train_step is neither for two"):
        tfpar.Trainer(ranked, tfpar.Mirrored(TWO), seed=0).fit(unlabelled(), verbose=0)
    strategy = tfpar.Mirrored(TWO, own_steps="average")
    assert strategy.describe().endswith("own train steps are averaged, not those of one device")
    history = tfpar.Trainer(ranked, strategy, seed=0).fit(unlabelled(), epochs=3, verbose=0).history
    assert history["similarity"][-1] < history["similarity"][0]


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: tfpar.Pipeline(2, 4, devices=TWO),
        lambda: tfpar.TensorParallel(2, devices=TWO),
        lambda: tfpar.Mirrored(TWO, shard="weights"),
    ],
)
def test_stages_and_sharded_weights_refuse_own_steps(make_strategy: Callable[[], tfpar.Strategy]) -> None:
    with pytest.raises(ValueError, match=r"Siamese overrides train_step, which takes it whole. Use compute_loss or"):
        tfpar.Trainer(CASES["siamese"].build, make_strategy(), seed=0)


@pytest.mark.parametrize("strategy", ["one device", "replicas"])
def test_steps_are_counted_where_the_optimizer_of_compile_trains_nothing(strategy: str) -> None:
    trainer = tfpar.Trainer(CASES["WGAN-GP"].build, STRATEGIES[strategy](), seed=0)
    trainer.fit(CASES["WGAN-GP"].data(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 3


def test_log_entries_move_with_their_model() -> None:
    case = CASES["WGAN-GP"]
    histories = []
    for strategies in ((tfpar.SingleDevice, tfpar.SingleDevice), (tfpar.SingleDevice, lambda: tfpar.Mirrored(TWO))):
        keras.utils.set_random_seed(0)
        model = case.build()
        histories.append([tfpar.Trainer(model, make()).fit(case.data(), verbose=0).history for make in strategies])
    for actual, expected in zip(*histories, strict=True):
        small.assert_same_history(actual, expected)


def test_another_choice_of_own_steps_is_refused() -> None:
    with pytest.raises(ValueError, match='own_steps must be "exact" or "average", received \'mean\''):
        tfpar.Mirrored(TWO, own_steps="mean")  # type: ignore[arg-type]
