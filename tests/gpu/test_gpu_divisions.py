"""Divided models on GPUs, by state, weights, layers and stages: they equal one device, and hold a share."""

from __future__ import annotations

import gc
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.gpu.test_gpu_parity import check, reference
from tests.properties.test_parity import CASES, computing_in
from tests.support import small
from tests.support.pipeline_cases import deepened

pytestmark = pytest.mark.gpu

Made = Callable[[list[str]], tfpar.Strategy]
DIVISIONS: dict[str, Made] = {
    "state": lambda gpus: tfpar.Mirrored(gpus[:2], shard="optimizer"),
    "weights": lambda gpus: tfpar.Mirrored(gpus[:2], shard="weights"),
    "layers": lambda gpus: tfpar.TensorParallel(2, devices=gpus[:2]),
    "stages": lambda gpus: tfpar.Pipeline(2, 2, balance="parameters", devices=gpus[:2]),
    "stages of shards": lambda gpus: tfpar.Pipeline(2, 2, balance="parameters", num_shards=2, devices=gpus[:4]),
    "replicas of stages": lambda gpus: tfpar.Hybrid(
        tfpar.Pipeline(2, 2, balance="parameters"), 2, gpus[:4], shard="optimizer"
    ),
    "replicas of layers": lambda gpus: tfpar.Hybrid(tfpar.TensorParallel(2), 2, gpus[:4], shard="optimizer"),
}
GRIDS = ("stages of shards", "replicas of stages", "replicas of layers")
by_division = pytest.mark.parametrize("division", DIVISIONS)


def made(division: str, gpus: list[str]) -> tfpar.Strategy:
    if division in GRIDS and len(gpus) < 4:
        pytest.skip(f"the grid needs 4 devices, and there are {len(gpus)}")
    return DIVISIONS[division](gpus)


@by_division
@pytest.mark.parametrize(
    "row",
    [("Adam", "float32"), ("masked sequence", "float32"), ("embedding, sparse gradients", "float64")],
    ids=lambda row: row[0],
)
def test_equals_one_device_after_20_steps(gpus: list[str], division: str, row: tuple[str, str]) -> None:
    case, dtype = row
    strategy = made(division, gpus)
    with computing_in(dtype):
        check(deepened(CASES[case]), strategy, reference(case, dtype, deep=True), dtype)


@by_division
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_trains_as_with_keras(gpus: list[str], division: str, policy: str) -> None:
    tolerance = {"mixed_float16": 5e-3, "mixed_bfloat16": 3e-2}[policy]
    strategy = made(division, gpus)
    keras.config.set_dtype_policy(policy)
    try:
        small.assert_trains_as_one_device(small.build_model, small.data, lambda: strategy, tolerance)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("division", ["state", "weights", "stages", "replicas of stages"])
def test_steps_compiled_by_xla_equal_those_of_one_device(gpus: list[str], division: str) -> None:
    strategy = made(division, gpus)

    def build() -> keras.Model:
        model = small.build_model()
        model.jit_compile = True
        return model

    small.assert_trains_as_one_device(build, small.data, lambda: strategy)


@by_division
def test_predictions_equal_those_of_keras_in_their_order(gpus: list[str], division: str) -> None:
    trainer = tfpar.Trainer(small.build_model, made(division, gpus), seed=0)
    inputs = np.random.default_rng(0).normal(size=(41, 5)).astype("float32")
    expected = small.initial_model().predict(inputs, batch_size=8, verbose=0)
    np.testing.assert_allclose(trainer.predict(inputs, batch_size=8, verbose=0), expected, rtol=1e-5, atol=1e-6)


# Two weights of 16 MiB, each with 32 MiB of Adam's state: 96 MiB on one device.
HELD_MIB = {"state": 64, "weights": 48, "layers": 48, "stages": 48}
# A gradient that TensorFlow has not freed yet, and what is small.
MOST_OTHERS_MIB, ROUNDING_MIB = 16 + 4, 1


@pytest.mark.parametrize("division", HELD_MIB)
def test_a_device_holds_its_share_alone_after_training(gpus: list[str], division: str) -> None:
    if gpus[0].startswith("CPU"):
        pytest.skip("TensorFlow does not count the memory of CPUs")

    def build() -> keras.Model:
        layers = [keras.layers.Dense(2048, use_bias=False) for _ in range(2)]
        model = keras.Sequential([keras.Input((2048,)), *layers])
        model.compile("adam", "mse")
        return model

    def held_mib() -> np.ndarray:
        tf.test.experimental.sync_devices()
        return np.array([tf.config.experimental.get_memory_info(name)["current"] for name in gpus[:2]]) / 2**20

    gc.collect()
    before = held_mib()
    trainer = tfpar.Trainer(build, made(division, gpus), seed=0)
    ones = np.ones((8, 2048), "float32")
    trainer.fit(ones, ones, batch_size=4, verbose=0)
    others = held_mib() - before - HELD_MIB[division]
    assert others.min() > -ROUNDING_MIB
    assert others.max() < MOST_OTHERS_MIB


def test_a_plan_ranks_layouts_of_these_devices(gpus: list[str]) -> None:
    features = np.random.default_rng(0).normal(size=(64, 5)).astype("float32")
    found = tfpar.plan(small.build_model, (features, np.zeros(64, "int32")), batch_size=16, devices=gpus[:2])
    assert found.rows
    if gpus[0].startswith("GPU"):
        assert found.devices.memory_bytes is not None
        assert 0 < found.rows[0].measured.memory_bytes < found.devices.memory_bytes
