"""`tfpar.fit` takes an existing model, built under any supported strategy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]


def reducing_to_one() -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(TWO, cross_device_ops=tf.distribute.ReductionToOneDevice())


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no strategy": nullcontext,
    "MirroredStrategy": lambda: reducing_to_one().scope(),
    "tfpar.Mirrored": lambda: tfpar.Mirrored(TWO).scope(),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCOPES)
def test_fit_equals_keras_fit_called_twice_and_does_not_compile_again(name: str) -> None:
    with SCOPES[name]():
        keras.utils.set_random_seed(0)
        model = small.build_model()
    keras.utils.set_random_seed(0)
    reference = small.build_model()
    traces: list[int] = []
    original = keras.Sequential.call

    def traced(self: keras.Model, *arguments: Any, **settings: Any) -> Any:
        traces.append(1)
        return original(self, *arguments, **settings)

    for round_ in range(2):
        expected = reference.fit(small.data(), epochs=2, verbose=0, validation_data=small.data()).history
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keras.Sequential, "call", traced)
            traces.clear()
            history = tfpar.fit(model, small.data(), epochs=2, verbose=0, validation_data=small.data()).history
        assert bool(traces) == (round_ == 0), f"traced {len(traces)} times in round {round_}"
        small.assert_same_history(history, expected)
        small.assert_same_state(small.state(model), small.state(reference), 1e-5)


def test_fit_takes_arrays_and_every_argument_of_keras() -> None:
    inputs, labels = parity_cases.inputs(37), parity_cases.labels(37)
    settings = {
        "batch_size": 8,
        "epochs": 3,
        "initial_epoch": 1,
        "shuffle": False,
        "verbose": 0,
        "validation_split": 0.2,
    }
    histories = []
    for fit in (lambda model: model.fit, lambda model: lambda *data, **more: tfpar.fit(model, *data, **more)):
        keras.utils.set_random_seed(0)
        histories.append(fit(small.build_model())(inputs, labels, **settings).history)
    small.assert_same_history(histories[1], histories[0])


@pytest.mark.parametrize("strategy", [reducing_to_one, lambda: tfpar.Mirrored(TWO)], ids=["tf", "tfpar"])
def test_fit_works_inside_the_scope_too(strategy: Callable[[], Any]) -> None:
    with strategy().scope():
        model = small.build_model()
        history = tfpar.fit(model, small.data(), verbose=0, validation_data=small.data()).history
    assert np.isfinite(history["val_loss"]).all()


def test_a_model_compiled_again_is_trained_with_new_settings() -> None:
    keras.utils.set_random_seed(0)
    model = small.build_model()
    keras.utils.set_random_seed(0)
    reference = small.build_model()
    for metrics in (["accuracy"], ["sparse_categorical_crossentropy"]):
        for each in (model, reference):
            each.compile(each.optimizer, each.loss, metrics=metrics)
        expected = reference.fit(small.data(), verbose=0).history
        small.assert_same_history(tfpar.fit(model, small.data(), verbose=0).history, expected)


def test_the_model_stays_a_plain_keras_model(tmp_path: Any) -> None:
    model = small.build_model()
    tfpar.fit(model, small.data(), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    inputs = parity_cases.inputs(5)
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0))
    assert np.isfinite(tfpar.fit(loaded, small.data(), verbose=0).history["loss"]).all()
    assert np.isfinite(model.fit(small.data(), verbose=0).history["loss"]).all()


@pytest.mark.parametrize("kind", [tf.distribute.OneDeviceStrategy, tf.distribute.experimental.CentralStorageStrategy])
def test_a_model_under_another_strategy_is_refused_by_its_name(kind: Any) -> None:
    strategy = kind("CPU:0") if kind is tf.distribute.OneDeviceStrategy else kind(TWO)
    with strategy.scope():
        model = small.build_model()
    with pytest.raises(TypeError, match=rf"received one built under {kind.__name__}\. Build it with tfpar\.Trainer"):
        tfpar.fit(model, small.data(), verbose=0)


def test_an_uncompiled_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is not compiled"):
        tfpar.fit(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]), small.data(), verbose=0)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"keras\.Model, received NoneType"):
        tfpar.fit(None, small.data(), verbose=0)


@pytest.mark.extended
def test_models_of_other_shapes_train_under_tensorflows_default_all_reduce() -> None:
    """In a separate process: a failure ends all collective operations of the process."""
    script = """
        import tensorflow as tf
        import tfpar
        tfpar.use_logical_cpus(2)
        from tests.support import parity_cases, small
        cases = [(small.build_model, small.data), (parity_cases.sequence_model, parity_cases.sequence_data)]
        models = []
        for build, data in cases:
            with tf.distribute.MirroredStrategy().scope():
                models.append((build(), data))
        for _ in range(2):
            for model, data in models:
                print("trained", tfpar.fit(model, data(), verbose=0).history["loss"])
    """
    completed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert completed.stdout.count("trained") == 4, completed.stdout + completed.stderr[-2000:]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_unknown_arguments_are_refused_in_the_name_of_the_function(method: str) -> None:
    function, model = getattr(tfpar, method), small.build_model()
    with pytest.raises(
        TypeError, match=rf"^tfpar.{method}\(\).*Use tfpar.Trainer\(model, strategy\).{method}\(...\).$"
    ):
        function(model, small.data(), strategy=tfpar.Mirrored(TWO))
    with pytest.raises(
        TypeError, match=rf"^tfpar.{method}\(\) has no argument 'batchsize'. Did you mean batch_size\?$"
    ):
        function(model, small.data(), batchsize=4)
