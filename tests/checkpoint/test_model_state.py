"""The transfer of a model's state between processes, and the digest that compares states."""

from __future__ import annotations

import keras
import pytest

from tests.support import parity_cases, small
from tfpar.checkpoint import file_format, model_state

pytestmark = pytest.mark.usefixtures("logical_cpus")

build_adam = parity_cases.classifier(
    lambda: keras.optimizers.Adam(0.01), layers=lambda: [keras.layers.Dropout(0.3, seed=5)]
)


def built(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = build_adam()
    model.optimizer.build(model.trainable_variables)
    return model


def test_fresh_weights_reach_another_model_exactly() -> None:
    one, other = built(0), built(1)
    assert model_state.digest(one) != model_state.digest(other)
    model_state.assign_bytes(other, model_state.snapshot_bytes(one))
    small.assert_same_state(small.state(other), small.state(one))
    assert model_state.digest(one) == model_state.digest(other)


def test_the_digest_sees_every_variable_but_those_of_metrics() -> None:
    """Every worker counts its own examples."""
    model = built(0)
    digests = {model_state.digest(model)}
    variables = model_state.state_variables(model)
    for variable in variables.values():
        variable.assign(variable + keras.ops.ones_like(variable))
        digests.add(model_state.digest(model))
    num_of_metrics = sum(name.startswith("metrics/") for name in variables)
    assert len(digests) == len(variables) - num_of_metrics + 1
    assert {name.split("/")[0] for name in variables} == {"weights", "optimizer", "metrics"}


def test_the_digest_tells_equal_bytes_under_another_name_apart() -> None:
    """Two variables that changed places are another state."""
    models = []
    for order in (("a", "b"), ("b", "a")):
        layers = [keras.layers.Dense(2, kernel_initializer="ones", name=name) for name in order]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile("sgd", "mse")
        models.append(model)
    assert model_state.digest(models[0]) != model_state.digest(models[1])


def test_the_state_of_another_model_is_refused() -> None:
    blob = model_state.snapshot_bytes(small.build_model())
    with pytest.raises(ValueError, match=r"The chief's state is of another model: 'weights/"):
        model_state.assign_bytes(built(0), blob)


def test_state_that_was_cut_short_is_refused() -> None:
    model = built(0)
    with pytest.raises(file_format.DamagedError):
        model_state.assign_bytes(model, model_state.snapshot_bytes(model)[:-10])
