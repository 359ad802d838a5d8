"""TensorFlow's profile of steps: Keras' callback under every strategy of one process, and that of `--profile`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar.runs.reporting.step_profile import FIRST_STEPS, StepProfile

CPUS = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], Any]] = {
    "mirrored": lambda: tfpar.Mirrored(CPUS),
    "pipeline": lambda: tfpar.Pipeline(2, 2, devices=CPUS),
}


def build() -> keras.Model:
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def fit(strategy: Any, callback: keras.callbacks.Callback, num_steps: int) -> None:
    rows = np.ones([8 * num_steps, 5], "float32"), np.ones([8 * num_steps, 1], "float32")
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(8)
    tfpar.Trainer(build, strategy, seed=0).fit(dataset, verbose=0, callbacks=[callback])


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest, logical_cpus: list[str]) -> Any:
    return STRATEGIES[request.param]()


@pytest.mark.few(1)
def test_the_callback_of_keras_writes_a_profile(strategy: Any, tmp_path: Path) -> None:
    fit(strategy, keras.callbacks.TensorBoard(tmp_path, profile_batch=(3, 4)), num_steps=6)
    (file,) = tmp_path.glob("**/plugins/profile/*/*.xplane.pb")
    assert file.stat().st_size > 1000


@pytest.mark.parametrize(("num_steps", "num_recorded"), [(20, 3), (FIRST_STEPS + 1, 1), (FIRST_STEPS, 0)])
def test_steps_after_the_first_few_are_recorded(
    num_steps: int, num_recorded: int, logical_cpus: list[str], tmp_path: Path
) -> None:
    profile = StepProfile(tmp_path / "tensorboard", 3)
    fit(tfpar.SingleDevice("CPU:0"), profile, num_steps)
    assert profile.num_recorded == num_recorded
    files = list((tmp_path / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))
    assert len(files) == bool(num_recorded)
    assert ("none: the training had at most 5 steps" in profile.describe()) == (not num_recorded)
    if files:
        assert files[0].read_bytes().count(b"step_num") >= 1
