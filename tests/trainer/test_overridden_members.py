"""Members of Keras' classes that users override: each is used as Keras uses it, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tfpar._compat.optimizers import keras_sharded_updates

pytestmark = pytest.mark.usefixtures("logical_cpus")

TWO = ["CPU:0", "CPU:1"]
STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "single device": lambda: tfpar.SingleDevice(),
    "mirrored": lambda: tfpar.Mirrored(TWO),
    "optimizer sharded": lambda: tfpar.Mirrored(TWO, shard="optimizer"),
    "weights sharded": lambda: tfpar.Mirrored(TWO, shard="weights"),
    "pipeline": lambda: tfpar.Pipeline(2, 2, devices=TWO),
    "tensor parallel": lambda: tfpar.TensorParallel(2, devices=TWO),
}
CUTTING = ("pipeline", "weights sharded")
FEATURES = parity_cases.NUM_FEATURES


def with_loss(model: keras.Model, optimizer: Any = "sgd", **settings: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, **{"loss": loss, **settings})
    return model


def classifier(*hidden: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(3)])


class Centralized(keras.optimizers.SGD):
    """Subtracts the mean of each gradient in the method that Keras' training step calls."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        return super().apply_gradients([(one - tf.reduce_mean(one), weight) for one, weight in grads_and_vars])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "tensor parallel"])
def test_an_optimizer_applies_gradients_by_its_own_method(name: str) -> None:
    small.assert_trains_as_one_device(
        lambda: with_loss(classifier(keras.layers.Dense(4, "tanh")), Centralized(0.1)), small.data, STRATEGIES[name]
    )


def test_an_optimizer_that_takes_all_gradients_at_once_has_no_state_of_a_worker_alone() -> None:
    with pytest.raises(ValueError, match="apply_gradients of Centralized takes all weights at once"):
        keras_sharded_updates.check(Centralized())


class TrainsTheHead(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        return self.head(self.backbone(inputs))

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        return self.head.trainable_weights  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["single device", "pipeline"])
def test_a_property_that_chooses_the_trained_weights_is_refused(name: str) -> None:
    trainer = tfpar.Trainer(lambda: with_loss(TrainsTheHead()), STRATEGIES[name](), seed=0)
    with pytest.raises(ValueError, match=r"trainable_weights of TrainsTheHead leaves out .*Set `trainable` of layers"):
        trainer.fit(small.data(), verbose=0)


class Doubling(keras.layers.Dense):
    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(inputs * 2.0, *args, **kwargs)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["weights sharded", "pipeline", "tensor parallel"])
def test_a_layer_runs_its_own_call_operator_once(name: str) -> None:
    small.assert_trains_as_one_device(lambda: with_loss(classifier(Doubling(4, "tanh"))), small.data, STRATEGIES[name])


def penalized(targets: Any, outputs: Any) -> Any:
    """Add the squared gradient of a loss by the outputs."""
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        loss = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    gradient = tape.gradient(loss, outputs, unconnected_gradients="zero")
    return loss + 0.5 * keras.ops.sum(gradient**2, axis=-1)


class GradientPenalty(TrainsTheHead):
    trainable_weights = keras.Model.trainable_weights

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x)
        loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return keras.ops.mean(loss) + 0.1 * keras.ops.mean(keras.ops.sum(tape.gradient(outputs, x) ** 2, axis=-1))


class Forces(keras.layers.Layer):
    """The gradient of an energy by its inputs."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            energy = keras.ops.sum(keras.ops.tanh(keras.ops.matmul(inputs, self.kernel)) ** 2)
        return tape.gradient(energy, inputs)


class GradientByWeights(GradientPenalty):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
        return loss + 0.1 * keras.ops.sum(tape.gradient(loss, self.head.bias) * [1.0, 2.0, 3.0])


@pytest.mark.few(1)
@pytest.mark.crossed
@pytest.mark.parametrize(
    "build",
    [
        lambda: with_loss(classifier(keras.layers.Dense(4, "tanh")), loss=penalized),
        lambda: with_loss(GradientPenalty(), loss=None),
        lambda: with_loss(classifier(keras.layers.Dense(4, "tanh"), Forces())),
        lambda: with_loss(GradientByWeights(), loss=None),
    ],
    ids=["loss", "compute_loss", "layer", "compute_loss by weights"],
)
@pytest.mark.parametrize("name", CUTTING)
def test_tapes_of_users_record_in_stages(name: str, build: Callable[[], keras.Model]) -> None:
    small.assert_trains_as_one_device(build, small.data, STRATEGIES[name])


class Annealed(TrainsTheHead):
    """A model with a number that a callback changes."""

    trainable_weights = keras.Model.trainable_weights
    rate = 0.0

    def call(self, inputs: Any) -> Any:
        outputs = super().call(inputs)
        self.add_loss(self.rate * keras.ops.mean(keras.ops.square(outputs)))
        return outputs


class Anneals(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.rate = 0.5


def test_a_number_that_a_callback_changes_before_the_first_step_takes_effect() -> None:
    keras.utils.set_random_seed(0)
    expected = with_loss(Annealed()).fit(small.data(), verbose=0, callbacks=[Anneals()]).history
    trainer = tfpar.Trainer(lambda: with_loss(Annealed()), STRATEGIES["mirrored"](), seed=0)
    small.assert_same_history(trainer.fit(small.data(), verbose=0, callbacks=[Anneals()]).history, expected)


@pytest.mark.parametrize("name", ["pipeline", "tensor parallel"])
def test_such_a_number_is_refused_where_the_call_is_read_before(name: str) -> None:
    trainer = tfpar.Trainer(lambda: with_loss(Annealed()), STRATEGIES[name](), seed=0)
    before = trainer.evaluate(small.data(), verbose=0)
    with pytest.raises(ValueError, match=r"those of Annealed differ at .* must be a variable"):
        trainer.fit(small.data(), verbose=0, callbacks=[Anneals()])
    np.testing.assert_array_equal(trainer.evaluate(small.data(), verbose=0), before, "no step was done")
