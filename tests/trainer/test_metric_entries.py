"""The entries of an overridden `compute_metrics` or `get_metrics_result` are logged as under Keras, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.loops import test_hooks as hooks
from tests.loops.test_hooks import Recorder, assert_same_events, data
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]
STRATEGIES = {**hooks.STRATEGIES, "hybrid": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 1, balance=[1, 1]), 2)}


class Counting(keras.Model):
    """Two layers and a metric, which `compute_metrics` updates."""

    def __init__(self) -> None:
        inputs = keras.Input((parity_cases.NUM_FEATURES,))
        super().__init__(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(4, "tanh")(inputs)))
        self.own = keras.metrics.RootMeanSquaredError(name="own")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        self.own.update_state(y, y_pred)
        return self.added(super().compute_metrics(x, y, y_pred, sample_weight), y_pred)

    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        raise NotImplementedError


class SameNames(Counting):
    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        return {**results, "own": self.own.result()}


class AnotherName(Counting):
    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        return {**results, "another": self.own.result()}


class Derived(Counting):
    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        derived = {"square": self.own.result() ** 2, "perplexity": keras.ops.exp(results["loss"]), "constant": 2.5}
        return {**results, "nested": derived}


class Fewer(Counting):
    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        return {"loss": results["loss"]}


class Unlisted(AnotherName):
    """The metric is none of the model's list, and so is never reset."""

    @property
    def metrics(self) -> list[keras.Metric]:
        return [metric for metric in super().metrics if metric.name != "own"]


class OwnResults(Counting):
    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        return self.get_metrics_result()

    def get_metrics_result(self) -> dict[str, Any]:
        return {"loss": self.metrics[0].result(), "twice": 2 * self.own.result()}


class OfTheBatch(Counting):
    def added(self, results: dict[str, Any], outputs: Any) -> dict[str, Any]:
        return {**results, "mean_output": keras.ops.mean(outputs), "outputs": outputs[:, 0]}


EXACT: list[type[Counting]] = [SameNames, AnotherName, Derived, Fewer, Unlisted, OwnResults]


def build(kind: type[Counting], **settings: Any) -> Callable[[], keras.Model]:
    def build_model() -> keras.Model:
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["mae"], **settings)
        return model

    return build_model


def results_of(trainer: Any) -> tuple[Any, ...]:
    """The history, what a callback saw, and two forms of evaluation."""
    recorder = Recorder()
    fit = {"epochs": 2, "steps_per_epoch": 4, "validation_data": data().take(2)}
    history = trainer.fit(data().repeat(), verbose=0, callbacks=[recorder], **fit).history
    evaluated = trainer.evaluate(data(), verbose=0, return_dict=True)
    return history, recorder.events, evaluated, trainer.evaluate(data(), verbose=0)


def values_of(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The history and the entries of an evaluation."""
    history = trainer.fit(data(), epochs=2, validation_data=data(), verbose=0).history
    return history, trainer.evaluate(data(), verbose=0, return_dict=True)


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    small.assert_same_history(actual[0], expected[0])
    assert_same_events(actual[1], expected[1])
    small.assert_same_history({"": list(actual[2].values())}, {"": list(expected[2].values())})
    assert list(actual[2]) == list(expected[2])
    small.assert_same_history({"": [actual[3]]}, {"": [expected[3]]})


@functools.cache
def of_keras(kind: type[Counting], **settings: Any) -> tuple[Any, ...]:
    keras.utils.set_random_seed(0)
    return results_of(build(kind, **settings)())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_entries_that_follow_from_metrics_are_those_of_keras(strategy: str, kind: type[Counting]) -> None:
    trainer = tfpar.Trainer(build(kind), STRATEGIES[strategy](), seed=0)
    assert_same(results_of(trainer), of_keras(kind))


@pytest.mark.parametrize("strategy", ["single_device", pytest.param("mirrored", marks=pytest.mark.extended)])
def test_entries_are_those_of_keras_where_python_runs_every_step(strategy: str) -> None:
    trainer = tfpar.Trainer(build(Derived, run_eagerly=True), STRATEGIES[strategy](), seed=0)
    assert_same(results_of(trainer), of_keras(Derived, run_eagerly=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}], ids=str)
def test_one_device_logs_the_entries_of_the_last_batch(settings: dict[str, Any]) -> None:
    keras.utils.set_random_seed(0)
    expected = values_of(build(OfTheBatch, **settings)())
    actual = values_of(tfpar.Trainer(build(OfTheBatch, **settings), tfpar.SingleDevice(), seed=0))
    assert_same_values(actual[0], expected[0])
    assert_same_values(actual[1], expected[1])


def assert_same_values(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_entries_that_depend_on_examples_are_refused_where_a_batch_is_shared(strategy: str, verb: str) -> None:
    trainer = tfpar.Trainer(build(OfTheBatch), STRATEGIES[strategy](), seed=0)
    message = (
        "an entry that compute_metrics adds must be computed from the model's metrics, and 'mean_output' of OfTheBatch"
    )
    with pytest.raises(ValueError, match=message):
        getattr(trainer, verb)(data(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0, "before the first step"


def test_metrics_are_counted_once(logical_cpus: list[str]) -> None:
    """To compute entries again counts no example."""
    trainer = tfpar.Trainer(build(AnotherName), STRATEGIES["mirrored"](), seed=0)
    trainer.evaluate(data(), verbose=0)
    counted = [float(tf.reduce_sum(variable)) for variable in trainer.model.own.variables]
    keras.utils.set_random_seed(0)
    model = build(AnotherName)()
    model.evaluate(data(), verbose=0)
    np.testing.assert_allclose(counted, [float(tf.reduce_sum(variable)) for variable in model.own.variables])
