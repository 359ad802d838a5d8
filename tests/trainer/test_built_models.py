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
from tfpar import cluster
from tfpar.strategies.resolve import print_unused_devices, resolve

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "single_device": lambda: tfpar.SingleDevice("CPU:1"),
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "tf.distribute": lambda: tf.distribute.MirroredStrategy(TWO),
    "pipeline": lambda: tfpar.Pipeline(2, 2, balance="parameters"),
}
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((parity_cases.NUM_FEATURES,)),
            keras.layers.Dense(6, "tanh", name="features"),
            keras.layers.Dropout(0.0, seed=3),
            keras.layers.Dense(parity_cases.NUM_CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2), loss, metrics=["accuracy"])
    return model


def trained_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = build_model()
    model.fit(small.data(), verbose=0)
    return model


def test_a_model_that_exists_stays_under_its_strategy_unless_another_is_named() -> None:
    with (mirrored := tfpar.Mirrored(TWO)).scope():
        model = small.build_model()
    assert tfpar.Trainer(model).strategy is mirrored
    assert tfpar.Trainer(small.build_model()).strategy.describe() == "SingleDevice on CPU:0"


def test_bare_variables_of_the_scope_stay_where_they_are() -> None:
    def build() -> keras.Model:
        model = small.build_model()
        model.layers[0].count = tf.Variable(0.0)
        return model

    trainer = tfpar.Trainer(build, tfpar.Mirrored(TWO))
    trainer.model.compile("sgd", trainer.model.loss)
    assert np.isfinite(trainer.fit(small.data(), verbose=0).history["loss"]).all()
    assert tfpar.Trainer(build(), tfpar.SingleDevice()).strategy.num_replicas == 1


def test_metrics_that_another_strategy_has_not_built_yet_move_with_their_model() -> None:
    with tf.distribute.MirroredStrategy(TWO).scope():
        model = small.build_model()
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    features, targets = parity_cases.inputs(9), np.ones([9, parity_cases.NUM_CLASSES], "float32")
    moved = tfpar.Trainer(model, tfpar.Mirrored(TWO)).evaluate(features, targets, verbose=0)
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    other.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError()])
    np.testing.assert_allclose(moved, other.evaluate(features, targets, verbose=0), rtol=1e-5)


@by_strategy
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


def test_a_model_moves_from_strategy_to_strategy_and_back() -> None:
    with computing_in("float64"):
        model, reference = trained_model(), trained_model()
        trainers = {name: tfpar.Trainer(model, make()) for name, make in STRATEGIES.items()}
        for name in ("mirrored", "pipeline", "single_device", "mirrored", "pipeline"):
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


def test_a_subclass_that_is_not_built_and_its_own_optimizers_move() -> None:
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.mean = keras.layers.Dense(3), keras.metrics.Mean("size")
            self.other = keras.optimizers.SGD(0.5)

        def call(self, inputs: Any) -> Any:
            outputs = self.dense(inputs)
            self.mean.update_state(keras.ops.abs(outputs))
            return outputs

    histories = []
    for train in (lambda model: model.fit, lambda model: tfpar.Trainer(model, tfpar.Mirrored(TWO)).fit):
        keras.utils.set_random_seed(0)
        model = Twice()
        model.compile("sgd", small.build_model().loss)
        histories.append(train(model)(small.data(), epochs=2, verbose=0).history)
    small.assert_same_history(histories[1], histories[0])
    copies = tf.distribute.get_strategy().experimental_local_results(model.other.learning_rate.value)
    assert len(model.other.learning_rate.value.values) == 2, copies


# --- tfpar.evaluate, tfpar.predict ------------------------------------------------------------------------------------


@pytest.mark.few(3)
@by_strategy
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
    with pytest.raises(ValueError, match="Own overrides train_step"):
        tfpar.fit(model, inputs, inputs[:, :3], verbose=0)


def test_fit_evaluate_and_predict_share_compiled_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[int] = []
    original = keras.Sequential.call
    with tfpar.Mirrored(TWO).scope():
        model = small.build_model()
    tfpar.fit(model, small.data(), verbose=0, validation_data=small.data())
    tfpar.predict(model, small.data(), verbose=0)

    def traced(self: keras.Model, *arguments: Any, **settings: Any) -> Any:
        traces.append(1)
        return original(self, *arguments, **settings)

    monkeypatch.setattr(keras.Sequential, "call", traced)
    tfpar.evaluate(model, small.data(), verbose=0)
    tfpar.predict(model, small.data(), verbose=0)
    tfpar.fit(model, small.data(), verbose=0)
    assert not traces


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


class Plain(keras.Model):
    pass


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a name": (
        lambda: tfpar.Trainer(small.build_model, "mirrored"),  # type: ignore[arg-type]
        TypeError,
        r"strategy must be a strategy object.* received 'mirrored'\. Write tfpar\.Mirrored\(\)\.",
    ),
    "another name": (
        lambda: tfpar.Trainer(small.build_model, "multiworker"),  # type: ignore[arg-type]
        TypeError,
        r"Write tfpar\.MultiWorker\(\)",
    ),
    "a class": (
        lambda: tfpar.Trainer(small.build_model, tfpar.Pipeline),  # type: ignore[arg-type]
        TypeError,
        r"received the class Pipeline\. Write tfpar\.Pipeline\(num_stages=2, num_microbatches=8\)",
    ),
    "a function": (
        lambda: tfpar.Trainer(small.build_model, lambda: tfpar.Mirrored()),  # type: ignore[arg-type]
        TypeError,
        "received a function. Write the strategy itself",
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
    "a model's class": (lambda: tfpar.Trainer(Plain), TypeError, r"the class Plain\. Write a function that creates"),
    "a model's class with parameters": (
        lambda: tfpar.Trainer(OfWidth),  # type: ignore[arg-type]
        TypeError,
        r"received the class OfWidth\. Write a function that creates OfWidth\(\.\.\.\), compiles and returns it",
    ),
    "a tuple": (
        lambda: tfpar.Trainer(lambda: (small.build_model(), 1)),  # type: ignore[arg-type,return-value]
        TypeError,
        r"must return a compiled keras\.Model, received tuple",
    ),
    "a seed in quotes": (
        lambda: tfpar.Trainer(small.build_model, seed="0"),  # type: ignore[arg-type]
        TypeError,
        "seed must be a whole number, or None to set nothing, received '0'",
    ),
    "a negative seed": (lambda: tfpar.Trainer(small.build_model, seed=-1), ValueError, "seed must be at least 0"),
    "numbers of devices": (
        lambda: tfpar.Mirrored([0, 1]),  # type: ignore[list-item]
        TypeError,
        r"devices must be a list of names such as \['CPU:2', 'CPU:3'\], received \[0, 1\]",
    ),
    "logical CPUs in quotes": (
        lambda: tfpar.use_logical_cpus("2"),  # type: ignore[arg-type]
        TypeError,
        "num_devices must be a whole number, received '2'",
    ),
    "more devices than there are": (
        lambda: tfpar.Mirrored(5),
        ValueError,
        r"a number from 1 to 4, received 5\. There are: .*'CPU:3'\]\. Without GPUs, tfpar\.use_logical_cpus\(5\)",
    ),
    "a number of devices that is no whole one": (
        lambda: tfpar.Mirrored(2.0),  # type: ignore[arg-type]
        TypeError,
        r"must be a list of names .* received 2\.0",
    ),
    "no devices": (lambda: tfpar.Mirrored(0), ValueError, "a number from 1 to 4, received 0"),
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
    "parity of the same model": (
        lambda: tfpar.check_parity(same_model(), small.data(), tfpar.SingleDevice(), num_steps=1),
        TypeError,
        "must return a new model each time it is called",
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
    "batchsize": (lambda: TRAINER().predict(small.data(), batchsize=3), TypeError, "Did you mean batch_size"),
    "callback": (lambda: TRAINER().evaluate(small.data(), callback=[]), TypeError, "Did you mean callbacks"),
    "validation": (lambda: tfpar.fit(TRAINER().model, small.data(), validation=1), TypeError, "mean validation_data"),
    "stages": (
        lambda: tfpar.Pipeline(stages=2, num_microbatches=4),  # type: ignore[call-arg]
        TypeError,
        r"^Pipeline\(\) has no argument 'stages'\. Did you mean num_stages\?",
    ),
    "gpus": (
        lambda: tfpar.Mirrored(gpus=2),  # type: ignore[call-arg]
        TypeError,
        r"Mirrored\(\) has no argument 'gpus'\. It takes devices, all_reduce, pack_bytes",
    ),
    "model_function": (
        lambda: tfpar.Trainer(model=small.build_model),  # type: ignore[call-arg]
        TypeError,
        r"Trainer\(\) has no argument 'model'\. Did you mean build_model",
    ),
}


def same_model() -> Callable[[], keras.Model]:
    model = small.build_model()
    return lambda: model


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
