"""`tfpar.fit` takes an existing model, built under any supported strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfpar
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

TWO = ["CPU:0", "CPU:1"]


def reducing_to_one() -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(TWO, cross_device_ops=tf.distribute.ReductionToOneDevice())


SCOPES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no strategy": nullcontext,
    "MirroredStrategy": lambda: reducing_to_one().scope(),
    "tfpar.Mirrored": lambda: tfpar.Mirrored(TWO).scope(),
}


@pytest.mark.few(1)
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


@pytest.mark.parametrize("kind", [tf.distribute.OneDeviceStrategy, tf.distribute.experimental.CentralStorageStrategy])
def test_a_model_under_another_strategy_is_refused_by_its_name(kind: Any) -> None:
    strategy = kind("CPU:0") if kind is tf.distribute.OneDeviceStrategy else kind(TWO)
    with strategy.scope():
        model = small.build_model()
    with pytest.raises(TypeError, match=rf"received one built under {kind.__name__}\. Build it with tfpar\.Trainer"):
        tfpar.fit(model, small.data(), verbose=0)


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
