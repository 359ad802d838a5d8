"""Fine-tuning in phases: freezing, compiling again and further training equal Keras under every strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import parity_cases, small
from tests.support.extent import sampled

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TOLERANCE = 1e-9
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    **small.STRATEGIES,
    "optimizer sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(["CPU:0", "CPU:1"], shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
}
DIVIDED: dict[str, Callable[[], tfpar.Strategy]] = {
    "tensor_parallel": lambda: tfpar.TensorParallel(2),
    "stages_of_shards": lambda: tfpar.Pipeline(2, 2, num_shards=2, balance="parameters"),
}
by_strategy = pytest.mark.parametrize("strategy", sampled(STRATEGIES, of_ci=("mirrored", "pipeline")))
Answer = tuple[list[Any], list[Any]]
Train = Callable[[Any, keras.Model], list[Any]]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with computing_in("float64"):
        yield


def build_model() -> keras.Model:
    """A base that does not train, normalized and penalized, and a head that does."""
    features = keras.Input((parity_cases.NUM_FEATURES,))
    base = keras.Sequential([layers.Dense(6, "tanh", kernel_regularizer="l2"), layers.Dense(5, "tanh")], name="base")
    base.build((None, parity_cases.NUM_FEATURES))
    base.trainable = False
    model = keras.Model(features, layers.Dense(parity_cases.NUM_CLASSES, name="head")(base(features)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss(), metrics=["accuracy"])
    return model


def loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def arrays() -> dict[str, Any]:
    return {"x": parity_cases.inputs(19), "y": parity_cases.labels(19), "batch_size": 8, "verbose": 0}


def fit(verbs: Any) -> dict[str, Any]:
    history: dict[str, Any] = verbs.fit(**arrays(), shuffle=False, epochs=2).history
    return history


@functools.cache
def _by_keras(train: Train) -> Answer:
    keras.utils.set_random_seed(0)
    model = build_model()
    return train(model, model), small.state(model)


def assert_equal_to_keras(strategy: str, train: Train) -> None:
    """What `train` does with a trainer equals what it does with Keras' own model, and so does all state."""
    expected, expected_state = _by_keras(train)
    trainer = tfpar.Trainer(build_model, STRATEGIES[strategy](), seed=0)
    found = train(trainer, trainer.model)
    keras.tree.assert_same_structure(found, expected)
    for path, one in keras.tree.flatten_with_path(found):
        other = functools.reduce(lambda part, key: part[key], path, expected)
        assert one == pytest.approx(other, rel=TOLERANCE), f"answer {path}"
    small.assert_same_state(small.state(trainer.model), expected_state, TOLERANCE)


def in_three_phases(verbs: Any, model: keras.Model) -> list[Any]:
    found: list[Any] = [fit(verbs)]
    model.get_layer("base").trainable = True
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2)
    entropy = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="entropy")
    model.compile(optimizer, loss(), metrics=[entropy], weighted_metrics=["accuracy"])
    found += [fit(verbs), float(entropy.result())]
    optimizer.learning_rate = 0.1  # what a user holds stays what trains
    found += [fit(verbs), float(entropy.result()), int(optimizer.iterations.numpy())]
    verbs.compile("adam", loss=loss(), metrics=["accuracy"])
    return [*found, fit(verbs), verbs.evaluate(**arrays(), return_dict=True)]


@pytest.mark.few(1)
@by_strategy
def test_a_model_compiled_again_outside_of_the_scope_continues_training(strategy: str) -> None:
    assert_equal_to_keras(strategy, in_three_phases)


def frozen_layers() -> keras.Model:
    """A pair of layers that tensor parallelism divides, frozen after they are built."""
    features = keras.Input((parity_cases.NUM_FEATURES,))
    pair = [layers.Dense(8, "tanh", name="columns"), layers.Dense(6, name="rows")]
    model = keras.Model(features, layers.Dense(parity_cases.NUM_CLASSES)(pair[1](pair[0](features))))
    for layer in pair:
        layer.trainable = False
    model.compile(keras.optimizers.SGD(0.1), loss())
    return model


@pytest.mark.extended
@pytest.mark.parametrize("exists", [False, True], ids=["model_function", "existing_model"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *DIVIDED])
def test_layers_that_were_frozen_are_trained_after_they_are_released(strategy: str, exists: bool) -> None:
    def train(verbs: Any, model: keras.Model) -> list[np.ndarray]:
        fit(verbs)
        for layer in model.layers:
            layer.trainable = True
        model.compile(keras.optimizers.SGD(0.1), loss())
        fit(verbs)
        weights: list[np.ndarray] = model.get_weights()
        return weights

    keras.utils.set_random_seed(0)
    plain = frozen_layers()
    expected = train(plain, plain)
    keras.utils.set_random_seed(0)
    build: Any = frozen_layers() if exists else frozen_layers
    trainer = tfpar.Trainer(build, {**STRATEGIES, **DIVIDED}[strategy](), seed=0)
    small.assert_same_state(train(trainer, trainer.model), expected, TOLERANCE)


def with_a_built_optimizer(verbs: Any, model: keras.Model) -> list[Any]:
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=3)
    model.compile(optimizer, loss())
    optimizer.build(model.trainable_variables)
    for slot in inner.variables:
        if slot.name.endswith("_velocity"):
            slot.assign(slot + 0.25)
    found = [fit(verbs), float(optimizer.dynamic_scale.numpy())]
    model.get_layer("head").trainable = False
    model.get_layer("base").trainable = True
    model.compile(inner := keras.optimizers.Adam(0.01), loss())
    found.append(fit(verbs))
    model.get_layer("base").layers[0].trainable = False
    model.compile(inner, loss())  # the same one, for fewer layers
    return [*found, fit(verbs)]


@pytest.mark.extended
@by_strategy
def test_an_optimizer_that_is_built_already_keeps_its_slots(strategy: str) -> None:
    assert_equal_to_keras(strategy, with_a_built_optimizer)


def freezing_without_compile(verbs: Any, model: keras.Model) -> list[Any]:
    base = model.get_layer("base")
    found = [verbs.evaluate(**arrays(), return_dict=True)]
    base.trainable = True  # before the first fit it counts
    found += [fit(verbs), _moved(verbs, base)]
    base.trainable = False
    found += [fit(verbs), _moved(verbs, base), verbs.evaluate(**arrays(), return_dict=True)]
    verbs.compile("sgd", loss())
    found.append(_moved(verbs, base))
    base.trainable = True
    return [*found, fit(verbs), _moved(verbs, base)]


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, of_ci=["mirrored"]))
def test_a_change_of_trainable_waits_for_compile(strategy: str) -> None:
    """Keras traces a step once per compilation, with the weights that train then."""
    assert_equal_to_keras(strategy, freezing_without_compile)
    assert [answer for answer in _by_keras(freezing_without_compile)[0] if isinstance(answer, bool)] == [
        True,
        True,
        False,
        False,
    ]


def _moved(verbs: Any, layer: keras.Layer) -> bool:
    """Whether a fit changes the weights of a layer."""
    before = layer.get_weights()
    fit(verbs)
    return any((one != other).any() for one, other in zip(before, layer.get_weights(), strict=True))


def test_an_optimizer_of_other_weights_is_refused_as_in_keras() -> None:
    trainer = tfpar.Trainer(build_model, tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=0)
    fit(trainer)
    trainer.model.get_layer("base").trainable = True
    trainer.compile(trainer.model.optimizer, loss())
    with pytest.raises(ValueError, match="This optimizer can only be called for the variables it was originally built"):
        fit(trainer)


class Scales(layers.Layer):
    """A factor that users change between phases."""

    factor = 1.0

    def call(self, inputs: Any) -> Any:
        return self.factor * inputs


class Chooses(keras.Model):
    """A model with a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.scales = [layers.Dense(6, "tanh"), layers.Dense(6, "tanh")], Scales()
        self.head, self.skips = layers.Dense(parity_cases.NUM_CLASSES), False

    def call(self, inputs: Any) -> Any:
        first = self.dense[0](inputs)
        second = self.scales(self.dense[1](first))
        return self.head(first + second if self.skips else second)


def by_function() -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,))
    hidden = Scales(name="scales")(layers.Dense(6, "tanh", name="first")(features))
    model = keras.Model(features, layers.Dense(parity_cases.NUM_CLASSES)(layers.Dense(5, "tanh")(hidden)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss())
    return model


def by_class() -> keras.Model:
    model = Chooses()
    model.build((None, parity_cases.NUM_FEATURES))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss())
    return model


def change_activation(model: keras.Model) -> None:
    model.layers[1].activation = keras.activations.relu


def add_activity_regularizer(model: keras.Model) -> None:
    model.layers[1].activity_regularizer = keras.regularizers.L2(0.1)


def change_attributes(model: keras.Model) -> None:
    next(layer for layer in model.layers if isinstance(layer, Scales)).factor = 0.5
    if isinstance(model, Chooses):
        model.skips = True


CHANGES = [change_activation, add_activity_regularizer, change_attributes]
ALL_STRATEGIES = {
    **STRATEGIES,
    **DIVIDED,
    "hybrid": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 2, balance="parameters"), num_replicas=2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("build", [by_function, by_class], ids=lambda build: build.__name__)
@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_changed_settings_of_layers_take_effect_with_compile(strategy: str, build: Any, change: Any) -> None:
    def train(verbs: Any, model: keras.Model) -> tuple[list[Any], list[np.ndarray]]:
        found: list[Any] = [*fit(verbs)["loss"]]
        change(model)
        model.compile(model.optimizer, loss())
        found += [*fit(verbs)["loss"], verbs.evaluate(**arrays())]
        outputs = np.asarray(verbs.predict(arrays()["x"], verbose=0))
        return found, [outputs, *small.state(model)]

    keras.utils.set_random_seed(0)
    plain = build()
    expected = train(plain, plain)
    trainer = tfpar.Trainer(build, ALL_STRATEGIES[strategy](), seed=0)
    losses, state = train(trainer, trainer.model)
    np.testing.assert_allclose(losses, expected[0], rtol=TOLERANCE)
    small.assert_same_state(state, expected[1], TOLERANCE)


def discriminator() -> keras.Model:
    model = keras.Sequential([keras.Input((parity_cases.NUM_FEATURES,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def test_a_model_that_is_frozen_and_moved_by_another_trainer_must_be_compiled() -> None:
    """Keras trains it on, with its first trace; a trace after the move would not train it, with no word."""

    def fit_both(strategy: tfpar.Strategy, other: tfpar.Strategy) -> None:
        data = {"x": parity_cases.inputs(16), "y": np.zeros((16, 1)), "batch_size": 8, "verbose": 0}
        first = tfpar.Trainer(discriminator, strategy, seed=0)
        first.fit(**data)
        first.model.trainable = False
        generator = layers.Dense(parity_cases.NUM_FEATURES)
        features = keras.Input((parity_cases.NUM_FEATURES,))
        both = keras.Model(features, first.model(generator(features)))
        both.compile("sgd", "mse")
        tfpar.Trainer(both, other).fit(**data)
        before = first.model.get_weights()
        first.fit(**data)
        assert any((one != other).any() for one, other in zip(before, first.model.get_weights(), strict=True))

    mirrored = STRATEGIES["mirrored"]()
    fit_both(mirrored, mirrored)
    with pytest.raises(ValueError, match=r"Another trainer has moved weights of .*Call compile\(\)"):
        fit_both(mirrored, tfpar.SingleDevice())
