"""Existing models: a trainer takes them with all their state, and `tfpar.predict` takes models made of their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import parity_cases, small
from tests.support.extent import sampled
from tfpar import cluster
from tfpar.strategies.resolve import print_unused_devices, resolve

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single_device": lambda: tfpar.SingleDevice("CPU:1"),
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "tf.distribute": lambda: tf.distribute.MirroredStrategy(TWO),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
    "optimizer sharded": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "tensor parallel": lambda: tfpar.TensorParallel(2),
}
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def build_model(excludes: bool = True) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((parity_cases.NUM_FEATURES,)),
            keras.layers.Dense(6, "tanh", name="features"),
            keras.layers.Dropout(0.0, seed=3),
            keras.layers.Dense(parity_cases.NUM_CLASSES, name="last"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5, use_ema=True, gradient_accumulation_steps=2)
    if excludes:
        optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["last/bias"])
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def trained_model(excludes: bool = True) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = build_model(excludes)
    model.fit(small.data(), verbose=0)
    return model


def test_a_model_that_exists_stays_under_its_strategy_unless_another_is_named() -> None:
    with (mirrored := tfpar.Mirrored(TWO)).scope():
        model = small.build_model()
    assert tfpar.Trainer(model).strategy is mirrored
    assert tfpar.Trainer(small.build_model()).strategy.describe() == "SingleDevice on CPU:0"


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, of_ci=["optimizer sharded"]))
def test_a_trainer_takes_a_trained_model_with_all_its_state(strategy: str) -> None:
    with computing_in("float64"):
        model, reference = trained_model(), trained_model()
        before, kernel = small.state(model), model.layers[0].kernel
        random_state = np.random.get_state()[1].copy()
        trainer = tfpar.Trainer(model, STRATEGIES[strategy]())
        assert trainer.model is model
        small.assert_same_state(small.state(model), before)
        assert (np.random.get_state()[1] == random_state).all(), "there is nothing to seed"
        expected = reference.fit(small.data(), epochs=2, verbose=0).history
        small.assert_same_history(trainer.fit(small.data(), epochs=2, verbose=0).history, expected, 1e-9)
        small.assert_same_state(small.state(model), small.state(reference), 1e-9)
        np.testing.assert_allclose(kernel.numpy(), reference.get_weights()[0], err_msg="what a user holds stays valid")


@pytest.mark.extended
def test_a_model_moves_from_strategy_to_strategy_and_back() -> None:
    with computing_in("float64"):
        # After a move, Keras' own `fit` does not find a weight of `var_list` again.
        model, reference = trained_model(excludes=False), trained_model(excludes=False)
        trainers = {name: tfpar.Trainer(model, make()) for name, make in STRATEGIES.items()}
        for name in (*trainers, "mirrored", "pipeline"):
            expected = reference.fit(small.data(), verbose=0).history
            small.assert_same_history(trainers[name].fit(small.data(), verbose=0).history, expected, 1e-9)
        small.assert_same_state(small.state(model), small.state(reference), 1e-9)
        devices = {variable.value.device[-5:] for variable in model.variables}
        tfpar.Trainer(model, tfpar.SingleDevice("CPU:2"))
        assert len(devices) == 2
        assert {variable.value.device[-5:] for variable in model.trainable_variables} == {"CPU:2"}
        small.assert_same_history(
            model.fit(small.data(), verbose=0).history, reference.fit(small.data(), verbose=0).history
        )


# --- tfpar.evaluate, tfpar.predict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, of_ci=["mirrored"]))
def test_evaluate_and_predict_of_a_model_and_of_one_derived_from_it(strategy: str) -> None:
    reference = trained_model()
    trainer = tfpar.Trainer(trained_model(), STRATEGIES[strategy]())
    model, inputs = trainer.model, parity_cases.inputs(19)
    assert tfpar.evaluate(model, small.data(), verbose=0, return_dict=True) == pytest.approx(
        reference.evaluate(small.data(), verbose=0, return_dict=True), rel=1e-5
    )

    def features_of(model: keras.Model) -> keras.Model:
        return keras.Model(model.inputs, {"features": model.get_layer("features").output, "all": model.outputs[0]})

    expected = features_of(reference).predict(inputs, verbose=0)
    derived = features_of(model)
    with trainer.strategy.scope():
        inside = features_of(model)
        found = [tfpar.predict(one, inputs, batch_size=8, verbose=0) for one in (derived, inside)]
    found += [tfpar.predict(one, inputs, 8, verbose=0) for one in (derived, inside)]
    for outputs in found:
        for name, output in expected.items():
            np.testing.assert_allclose(outputs[name], output, rtol=1e-5, atol=1e-6)
    before = small.state(model)
    trainer.fit(small.data(), verbose=0)
    assert any((one != other).any() for one, other in zip(before, small.state(model), strict=True)), "it trains on"
    now = tfpar.predict(derived, inputs, verbose=0)["features"]
    assert (now != expected["features"]).any(), "with the same weights"


def test_a_model_with_a_custom_train_step_predicts() -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {}

    model = Own([keras.Input((parity_cases.NUM_FEATURES,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    inputs = parity_cases.inputs(5)
    np.testing.assert_array_equal(tfpar.predict(model, inputs, verbose=0), model.predict(inputs, verbose=0))


def test_fit_on_one_of_several_devices_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    print_unused_devices.cache_clear()
    chosen = small.build_model()
    trainer = tfpar.Trainer(chosen, tfpar.SingleDevice())
    tfpar.fit(chosen, small.data(), verbose=0)
    with tfpar.Mirrored(TWO).scope():
        tfpar.fit(small.build_model(), small.data(), verbose=0)
    assert "devices" not in capfd.readouterr().err, "what somebody chose needs no advice"
    del trainer
    for _ in range(2):
        tfpar.fit(small.build_model(), small.data(), verbose=0)
    said = capfd.readouterr().err
    assert said.count("tfpar.fit trains on 1 of 4 devices") == 1
    assert "tfpar.Trainer(model, tfpar.Mirrored())" in said


def test_a_trainer_without_a_strategy_on_several_devices_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    print_unused_devices.cache_clear()
    tfpar.Trainer(small.build_model, tfpar.SingleDevice())
    assert "devices" not in capfd.readouterr().err, "what somebody chose needs no advice"
    for _ in range(2):
        tfpar.Trainer(small.build_model)
    assert capfd.readouterr().err == (
        "tfpar.Trainer trains on 1 of 4 devices, as it was given no strategy. Train on all of them with "
        "strategy=tfpar.Mirrored().\n"
    )


def test_the_strategy_auto_is_mirrored_on_several_devices(capfd: pytest.CaptureFixture[str]) -> None:
    trainer = tfpar.Trainer(small.build_model, "auto")
    assert trainer.strategy.describe() == "Mirrored over 4 replicas on CPU:0, CPU:1, CPU:2, CPU:3"
    assert not capfd.readouterr().err


@pytest.mark.parametrize(("devices", "kind"), [(["CPU:0"], tfpar.SingleDevice), (["GPU:0"], tfpar.SingleDevice)])
def test_the_strategy_auto_is_one_device_where_there_is_one(
    devices: list[str], kind: type[tfpar.Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "resolve_devices", lambda names: devices)
    assert type(resolve("auto")) is kind


# --- wrong kinds of argument ------------------------------------------------------------------------------------------


class OfWidth(keras.Model):
    def __init__(self, width: int) -> None:
        super().__init__()


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (
        lambda: tfpar.Trainer(small.build_model, "mirrored"),  # type: ignore[arg-type]
        TypeError,
        r"strategy must be a strategy object.* received 'mirrored'\. Write tfpar\.Mirrored\(\)\.",
    ),
    "a class": (
        lambda: tfpar.Trainer(small.build_model, tfpar.Pipeline),  # type: ignore[arg-type]
        TypeError,
        r"received the class Pipeline\. Write tfpar\.Pipeline\(num_stages=2, num_microbatches=8\)",
    ),
    "a number of devices": (
        lambda: tfpar.Trainer(small.build_model, 2),  # type: ignore[arg-type]
        TypeError,
        r"received 2\. Write tfpar\.Mirrored\(\)",
    ),
    "another tf.distribute strategy": (
        lambda: tfpar.Trainer(small.build_model, tf.distribute.OneDeviceStrategy("CPU:0")),
        TypeError,
        r"received a OneDeviceStrategy of tf\.distribute\. Write tfpar\.Mirrored\(\) or tfpar\.SingleDevice\(\)",
    ),
    "swapped": (
        lambda: tfpar.Trainer(tfpar.Mirrored(TWO), small.build_model),  # type: ignore[arg-type]
        TypeError,
        r"received Mirrored first\. Write tfpar\.Trainer\(build_model, strategy\)",
    ),
    "no function": (
        lambda: tfpar.Trainer("model.keras", tfpar.SingleDevice()),  # type: ignore[arg-type]
        TypeError,
        r"takes a function that returns a compiled keras\.Model, or such a model, received 'model\.keras'",
    ),
    "a function with parameters": (
        lambda: tfpar.Trainer(parity_cases.optimizer),  # type: ignore[arg-type]
        TypeError,
        r"optimizer requires name\. Write tfpar\.Trainer\(lambda: optimizer\(name=\.\.\.\), strategy\)",
    ),
    "a model's class with parameters": (
        lambda: tfpar.Trainer(OfWidth),  # type: ignore[arg-type]
        TypeError,
        r"received the class OfWidth\. Write a function that creates OfWidth\(\.\.\.\), compiles and returns it",
    ),
    "nothing": (
        lambda: tfpar.Trainer(lambda: None),  # type: ignore[arg-type,return-value]
        TypeError,
        r"must return a compiled keras.Model, received NoneType\. End it with",
    ),
    "a tuple": (
        lambda: tfpar.Trainer(lambda: (small.build_model(), 1)),  # type: ignore[arg-type,return-value]
        TypeError,
        r"must return a compiled keras\.Model, received tuple",
    ),
    "a negative seed": (lambda: tfpar.Trainer(small.build_model, seed=-1), ValueError, "seed must be at least 0"),
    "numbers of devices": (
        lambda: tfpar.Mirrored([0, 1]),  # type: ignore[list-item]
        TypeError,
        r"devices must be a list of names such as \['CPU:2', 'CPU:3'\], received \[0, 1\]",
    ),
    "more devices than there are": (
        lambda: tfpar.Mirrored(5),
        ValueError,
        r"a number from 1 to 4, received 5\. There are: .*'CPU:3'\]\. Without GPUs, tfpar\.use_logical_cpus\(5\)",
    ),
    "one device": (lambda: tfpar.Mirrored("GPU:0"), ValueError, r'received \'GPU:0\'\. Write \["GPU:0"\]'),
    "a device's number": (
        lambda: tfpar.SingleDevice(0),  # type: ignore[arg-type]
        TypeError,
        'device must be one name such as "CPU:0" or "GPU:0", received 0',
    ),
    "parity of a model": (
        lambda: tfpar.check_parity(small.build_model(), small.data(), tfpar.SingleDevice()),
        TypeError,
        "pass the function that builds them, not a model",
    ),
    "parity on arrays": (
        lambda: tfpar.check_parity(small.build_model, parity_cases.inputs(5), tfpar.SingleDevice()),  # type: ignore[arg-type]
        TypeError,
        r"takes a tf\.data\.Dataset of global batches, received ndarray",
    ),
    "half a stage": (lambda: tfpar.Pipeline(4.0, 8), ValueError, "num_stages must be a whole number .* received 4.0"),  # type: ignore[arg-type]
    "epoch": (
        lambda: TRAINER().fit(small.data(), epoch=3),
        TypeError,
        r"^Trainer\.fit\(\) has no argument 'epoch'\. Did you mean epochs\?$",
    ),
    "stages": (
        lambda: tfpar.Pipeline(stages=2, num_microbatches=4),  # type: ignore[call-arg]
        TypeError,
        r"^Pipeline\(\) has no argument 'stages'\. Did you mean num_stages\?",
    ),
}


def TRAINER() -> Any:  # noqa: N802 - a placeholder for a trainer in the table
    return tfpar.Trainer(small.build_model)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kind_of_argument_is_refused_with_the_right_code(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_class_that_compiles_itself_is_a_model_function() -> None:
    class Compiled(keras.Sequential):
        def __init__(self) -> None:
            super().__init__([keras.Input((5,)), keras.layers.Dense(3)])
            self.compile("sgd", small.build_model().loss)

    assert np.isfinite(tfpar.Trainer(Compiled).fit(small.data(), verbose=0).history["loss"]).all()


def test_keras_own_fit_of_a_new_model_of_mirrored_layers_names_that_of_tfpar() -> None:
    trained = tfpar.Trainer(small.build_model, tfpar.Mirrored(TWO)).model
    model = keras.Sequential([*trained.layers[:-1], keras.layers.Dense(3)], name="head")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for fit in (model.fit, model.train_on_batch):
        with pytest.raises(ValueError, match=r"fit of 'head' is Keras' own.* Use tfpar\.fit\(head, \.\.\.\)\."):
            fit(parity_cases.inputs(8), parity_cases.labels(8))
    assert np.isfinite(tfpar.fit(model, small.data(), verbose=0).history["loss"]).all()
