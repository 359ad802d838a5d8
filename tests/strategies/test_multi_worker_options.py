"""A job with one worker, and options that are refused before TensorFlow forms a job."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import tfpar
from tests.properties.test_parity import computing_in
from tests.support import multi_worker_cases as cases
from tests.support import small
from tests.support.multi_worker_cases import Trained, assert_same, keras_fit
from tests.support.ports import free_addresses
from tfpar.cluster import tf_config

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]], ids=len)
def test_without_tf_config_the_job_has_one_worker(devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = tfpar.MultiWorker(devices)
    assert strategy.describe().startswith(f"MultiWorker over 1 worker, {len(devices)} replicas")
    trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
    history = trainer.fit(small.data(), epochs=2, verbose=0).history
    assert_same(Trained(history, cases.state(trainer.model)), keras_fit(small.data()))


def test_after_tensorflow_has_started_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config.to_tf_config(free_addresses(2), 0))
    with pytest.raises(RuntimeError, match=r"MultiWorker\(\) must come before TensorFlow's first operation"):
        tfpar.MultiWorker(form_seconds=3)


def test_an_evaluator_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TF_CONFIG", '{"cluster": {"worker": ["localhost:1234"]}, "task": {"type": "evaluator", "index": 0}}'
    )
    with pytest.raises(ValueError, match="TF_CONFIG makes this process an evaluator"):
        tfpar.MultiWorker()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"all_reduce": "tree"}, "all_reduce must be 'auto', 'ring' or 'nccl', received 'tree'"),
        ({"all_reduce": "nccl"}, "all_reduce='nccl' needs GPUs"),
        ({"pack_bytes": 0}, "pack_bytes must be at least 1, received 0"),
        ({"compression": "float8"}, "compression must be None or 'bfloat16', received 'float8'"),
        ({"form_seconds": 0}, "both at most 604800 (a week), received 0 and 30.0"),
        ({"form_seconds": math.inf}, "both at most 604800 (a week), received inf and 30.0"),
        ({"form_seconds": math.nan}, "both at most 604800 (a week), received nan and 30.0"),
        ({"silence_seconds": 0.5}, "form_seconds must be above 0 and silence_seconds at least 1, both at most"),
        ({"sync": "never"}, "sync must be 'step' or 'average', received 'never'"),
        ({"sync": "average", "every": 0}, "every must be at least 1, received 0"),
        ({"every": 2}, "every and average_optimizer belong to sync='average', received every=2"),
        ({"average_optimizer": False}, "average_optimizer=False with sync='step'. Set sync='average'"),
        ({"sync": "average", "compression": "bfloat16"}, "compression rounds gradients, and sync='average' sends none"),
        ({"devices": ["CPU:7"]}, "devices must name different devices of this machine, received ['CPU:7']"),
        ({"devices": []}, "devices must name at least one device, received []"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tfpar.MultiWorker(**options)


def test_eager_steps_on_several_devices_of_a_worker_are_refused() -> None:
    """They waited for each other without end."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    trainer = tfpar.Trainer(build, tfpar.MultiWorker(["CPU:0", "CPU:1"]), seed=0)
    with pytest.raises(ValueError, match="With run_eagerly=True a worker can have one device, received one with 2"):
        trainer.predict(np.zeros([4, 5], "float32"), verbose=0)
    with pytest.raises(ValueError, match="With run_eagerly=True a worker can have one device"):
        trainer.fit(np.zeros([4, 5], "float32"), np.zeros([4, 3], "float32"), verbose=0)
