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


def copy_state(one: keras.Model, other: keras.Model) -> None:
    variables = model_state.state_variables(other)
    model_state.assign_bytes(variables, model_state.to_bytes(model_state.state_variables(one)))


def test_fresh_weights_reach_another_model_exactly() -> None:
    one, other = built(0), built(1)
    assert model_state.digest(one) != model_state.digest(other)
    copy_state(one, other)
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
    with pytest.raises(ValueError, match=r"The chief's state is of another model: 'weights/"):
        copy_state(small.build_model(), built(0))


def test_state_that_was_cut_short_is_refused() -> None:
    variables = model_state.state_variables(built(0))
    with pytest.raises(file_format.DamagedError):
        model_state.assign_bytes(variables, model_state.to_bytes(variables)[:-10])


@pytest.mark.parametrize(("pack_bytes", "num_packs"), [(1, 17), (100, 7), (1 << 20, 1)])
def test_packs_hold_every_variable_once_and_are_no_larger_than_asked_or_one_variable(
    pack_bytes: int, num_packs: int
) -> None:
    model = built(0)
    packs = list(model_state.packs(model, pack_bytes))
    variables = model_state.state_variables(model)
    assert [name for pack in packs for name in pack] == list(variables)
    assert len(packs) == num_packs
    for pack in packs:
        *others, _ = [variable.numpy().nbytes for variable in pack.values()]
        assert sum(others) < pack_bytes
