"""One test for each past bug, with its effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfpar

pytestmark = pytest.mark.usefixtures("logical_cpus")


def linear(*layers: Any) -> keras.Model:
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def rows(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_rows, 3)).astype("float32"), rng.normal(size=(num_rows, 1)).astype("float32")


def test_one_replica_never_reads_the_added_loss_of_another() -> None:
    # Keras keeps added losses in the layers, which replicas share: while replica 0 waited for the loss weights of
    # replica 1, that one cleared the list and put its own loss there, and replica 0 then used it.
    def build() -> keras.Model:
        return linear(keras.Input((3,)), keras.layers.Dense(2, activity_regularizer="l2"))

    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices(rows(14)).batch(7)
    report = tfpar.check_parity(build, dataset, tfpar.Mirrored(["CPU:0", "CPU:1"]), verbose=0)
    assert report.equal, report.first_difference


def test_a_model_without_declared_input_takes_a_last_batch_of_another_size() -> None:
    # Such a model takes the shape of its first batch, batch size included, as the shape of its inputs.
    trainer = tfpar.Trainer(linear)
    trainer.fit(*rows(10), batch_size=8, verbose=0)
    assert trainer.predict(rows(3)[0], verbose=0).shape == (3, 1)


def test_a_checkpoint_is_written_under_several_replicas(tmp_path: Path) -> None:
    # numpy.array of a mirrored Keras variable is an array of Python objects.
    trainer = tfpar.Trainer(lambda: linear(keras.Input((3,))), tfpar.Mirrored(["CPU:0", "CPU:1"]))
    trainer.fit(*rows(8), checkpoints=tfpar.Checkpoints(tmp_path), verbose=0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.npz"]


def test_a_mask_that_is_the_same_for_all_batches_crosses_a_cut() -> None:
    # A layer may give its outputs a mask that it made once, eagerly: as a tensor of no graph it broke the tracing of
    # the stage ("Tensor.op is undefined when eager execution is enabled").
    import tensorflow as tf

    class SameMask(keras.layers.Layer):
        mask = tf.constant([[True, True, False]])

        def call(self, inputs: Any) -> Any:
            return inputs

        def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
            return self.mask

    def build() -> keras.Model:
        layers = [keras.layers.Reshape((3, 1)), SameMask(), keras.layers.GlobalAveragePooling1D()]
        return linear(keras.Input((3,)), *layers)

    arrays = rows(8)
    histories = [
        tfpar.Trainer(build, strategy, seed=0).fit(*arrays, batch_size=4, shuffle=False, verbose=0).history["loss"]
        for strategy in (tfpar.SingleDevice(), tfpar.Pipeline(2, 2, balance=[2, 2]))
    ]
    np.testing.assert_allclose(*histories, rtol=1e-5)


def test_outputs_with_several_rows_for_each_example_are_predicted_whole() -> None:
    """A pipeline took as many rows of an output as there were examples, and dropped the others."""

    def build() -> keras.Model:
        inputs = keras.Input((4, 3))
        rows = keras.ops.reshape(keras.layers.Dense(5)(inputs), (-1, 5))
        model = keras.Model(inputs, keras.layers.Dense(2)(rows))
        model.compile("sgd", "mse")
        return model

    examples = np.random.default_rng(0).normal(size=(11, 4, 3)).astype("float32")
    trainer = tfpar.Trainer(build, tfpar.Pipeline(2, 3, balance="parameters"), seed=0)
    expected = trainer.model.predict(examples, batch_size=6, verbose=0)
    np.testing.assert_allclose(trainer.predict(examples, batch_size=6, verbose=0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_a_gradient_with_side_effects_runs_in_the_backward_pass(schedule: str) -> None:
    """It was counted to the forward pass, which has no gradients: "KeyError: <Reference wrapping ...Placeholder:0>"."""
    import tensorflow as tf

    calls: list[int] = []

    @tf.custom_gradient
    def noted(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            same = tf.numpy_function(lambda one: calls.append(len(one)) or one, [upstream], upstream.dtype)
            same.set_shape(upstream.shape)
            return same

        return tf.identity(values), gradient

    class Noted(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return noted(inputs)

    def build() -> keras.Model:
        return linear(keras.Input((3,)), keras.layers.Dense(4), Noted(), keras.layers.Dense(2))

    histories = [
        tfpar.Trainer(build, strategy, seed=0).fit(*rows(8), batch_size=8, epochs=2, shuffle=False, verbose=0).history
        for strategy in (tfpar.SingleDevice(), tfpar.Pipeline(2, 2, schedule, balance="parameters"))
    ]
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-5)
    assert calls == [8, 8, 4, 4, 4, 4]


def test_a_weight_gradient_that_comes_with_that_of_the_inputs_reaches_the_update() -> None:
    """W did not receive it from B in a batch of one micro-batch: "KeyError: <Reference wrapping ...Reshape:0>"."""

    def build() -> keras.Model:
        return linear(
            keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)
        )

    histories = [
        tfpar.Trainer(build, strategy, seed=0).fit(*rows(8), batch_size=8, epochs=2, shuffle=False, verbose=0).history
        for strategy in (tfpar.SingleDevice(), tfpar.Pipeline(2, 1, "zero_bubble", balance="parameters"))
    ]
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-5)
