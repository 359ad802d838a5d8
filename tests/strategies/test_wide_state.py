"""First layers over many features: they are saved, resumed, clipped, accumulated and averaged as on one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

FEATURES = 67
DENSE = np.where(np.random.default_rng(0).uniform(size=(13, FEATURES)) < 0.1, 1.5, 0).astype("float32")
each_kind = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def wide(sparse: bool, optimizer: Callable[[], Any], precision: str = "float32") -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        keras.config.set_dtype_policy(precision)
        try:
            features = keras.Input((FEATURES,), sparse=sparse)
            hidden = keras.layers.Dense(4, "tanh", kernel_regularizer="l2", name="first")(features)
            model = keras.Model(features, keras.layers.Dense(1)(hidden))
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile(optimizer(), "mse", metrics=["mae"])
        return model

    return build


def batches(sparse: bool) -> tf.data.Dataset:
    features = tf.sparse.from_dense(DENSE) if sparse else DENSE
    return tf.data.Dataset.from_tensor_slices((features, DENSE.sum(1, keepdims=True) / 10)).batch(5)


def fitted(build: Callable[[], keras.Model], sparse: bool, strategy: tfpar.Strategy, seed: int = 0, **fit: Any) -> Any:
    trainer = tfpar.Trainer(build, strategy, seed)
    trainer.fit(batches(sparse), verbose=0, **{"epochs": 2, **fit})
    if isinstance(strategy, tfpar.TensorParallel):
        assert sum(trainer.model.get_layer("first").kernel.value.sizes) == FEATURES, "the columns are divided"
    return trainer


def accumulated() -> keras.Optimizer:
    return keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2, clipnorm=0.05, use_ema=True, ema_momentum=0.9)


OPTIMIZERS = {
    "accumulation, clipnorm, average": accumulated,
    "global_clipnorm, overwriting average": lambda: keras.optimizers.SGD(
        0.1, 0.9, global_clipnorm=0.05, use_ema=True, ema_overwrite_frequency=3
    ),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=1e-3),
}


@each_kind
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_accumulation_and_averages_equal_one_device(optimizer: str, sparse: bool) -> None:
    build = wide(sparse, OPTIMIZERS[optimizer])
    expected, found = (fitted(build, sparse, one) for one in (tfpar.SingleDevice(), tfpar.TensorParallel(2)))
    small.assert_same_state(small.state(found.model), small.state(expected.model), 1e-5)


@each_kind
@pytest.mark.parametrize(("precision", "tolerance"), [("mixed_float16", 3e-4), ("mixed_bfloat16", 3e-3)])
def test_mixed_precision_rounds_as_on_one_device(precision: str, tolerance: float, sparse: bool) -> None:
    build = wide(sparse, lambda: keras.optimizers.SGD(0.1), precision)
    expected, found = (fitted(build, sparse, one) for one in (tfpar.SingleDevice(), tfpar.TensorParallel(2)))
    assert found.model.get_layer("first").compute_dtype == precision.removeprefix("mixed_")
    small.assert_same_state(small.state(found.model), small.state(expected.model), tolerance)
    initial = tfpar.Trainer(build, seed=0).model.get_layer("first").kernel.numpy()
    moved = np.abs(found.model.get_layer("first").kernel.numpy() - initial).max()
    assert moved > 10 * tolerance, "the case must tell one update from another"


@each_kind
def test_a_saved_model_continues_in_plain_keras(sparse: bool, tmp_path: Path) -> None:
    build = wide(sparse, accumulated)
    trainer = fitted(build, sparse, tfpar.TensorParallel(2), epochs=1)
    trainer.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    small.assert_same_state(small.state(plain), small.state(trainer.model))
    plain.fit(batches(sparse), verbose=0)
    small.assert_same_state(small.state(plain), small.state(fitted(build, sparse, tfpar.SingleDevice()).model), 1e-5)
    again = tfpar.Trainer(build, tfpar.TensorParallel(3), seed=5)
    again.build(batches(sparse))
    again.model.load_weights(tmp_path / "model.keras")
    inputs = batches(sparse).map(lambda features, _: features)
    np.testing.assert_allclose(
        again.predict(inputs, verbose=0), trainer.predict(inputs, verbose=0), rtol=1e-5, atol=1e-6
    )


ONE, TWO, THREE = tfpar.SingleDevice, lambda: tfpar.TensorParallel(2), lambda: tfpar.TensorParallel(3)


@each_kind
@pytest.mark.parametrize(("first", "then"), [(TWO, THREE), (THREE, ONE), (ONE, TWO)], ids=["2 3", "3 1", "1 2"])
def test_a_run_resumes_on_another_number_of_shards(first: Any, then: Any, sparse: bool, tmp_path: Path) -> None:
    build = wide(sparse, accumulated)
    fitted(build, sparse, first(), epochs=1, checkpoints=tfpar.Checkpoints(tmp_path))
    resumed = fitted(build, sparse, then(), seed=1, checkpoints=tfpar.Checkpoints(tmp_path))
    expected = fitted(build, sparse, tfpar.SingleDevice())
    small.assert_same_state(small.state(resumed.model), small.state(expected.model), 1e-5)
