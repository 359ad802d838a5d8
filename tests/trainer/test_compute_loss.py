"""An overridden `compute_loss` gets `training`, and its value is reduced as a sum or mean, under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.loops import test_hooks as hooks
from tests.support import parity_cases, small

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]
STRATEGIES = {**hooks.STRATEGIES, "hybrid": lambda: tfpar.Hybrid(tfpar.Pipeline(2, 1, balance=[1, 1]), 2)}


class OwnLoss(keras.Model):
    """Notes whether it is asked to train."""

    def __init__(self) -> None:
        inputs = keras.Input((parity_cases.NUM_FEATURES,))
        super().__init__(inputs, keras.layers.Dense(parity_cases.NUM_CLASSES)(keras.layers.Dense(4, "tanh")(inputs)))
        self.asked: set[bool] = set()

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        self.asked.add(training)
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return self.reduced(losses, y_pred, training)

    def reduced(self, losses: Any, outputs: Any, training: bool) -> Any:
        return keras.ops.mean(losses)


class SumsInTraining(OwnLoss):
    def reduced(self, losses: Any, outputs: Any, training: bool) -> Any:
        return keras.ops.sum(losses) if training else keras.ops.mean(losses)


class AveragesInTraining(OwnLoss):
    def reduced(self, losses: Any, outputs: Any, training: bool) -> Any:
        return keras.ops.mean(losses) if training else keras.ops.sum(losses)


class ComparesInTraining(OwnLoss):
    def reduced(self, losses: Any, outputs: Any, training: bool) -> Any:
        return keras.ops.max(losses) if training else keras.ops.mean(losses)


def build(kind: type[OwnLoss]) -> OwnLoss:
    model = kind()
    model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def trainer_of(kind: type[OwnLoss], strategy: str) -> tfpar.Trainer:
    return tfpar.Trainer(lambda: build(kind), STRATEGIES[strategy](), seed=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_gets_training_true_in_training_and_false_in_evaluation(strategy: str) -> None:
    trainer = trainer_of(OwnLoss, strategy)
    trainer.fit(small.data(), verbose=0)
    assert trainer.model.asked == {True}
    trainer.model.asked.clear()
    trainer.evaluate(small.data(), verbose=0)
    assert trainer.model.asked == {False}
    other = trainer_of(OwnLoss, strategy)
    other.evaluate(small.data(), verbose=0)
    assert other.model.asked == {False}
    other.fit(small.data(), validation_data=small.data(), verbose=0)
    assert other.model.asked == {True, False}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [SumsInTraining, AveragesInTraining], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_differs_in_training_equals_one_device(strategy: str, kind: type[OwnLoss]) -> None:
    keras.utils.set_random_seed(0)
    model = build(kind)
    fit = {"epochs": 2, "validation_data": small.data(), "verbose": 0}
    expected = model.fit(small.data(), **fit).history
    trainer = trainer_of(kind, strategy)
    small.assert_same_history(trainer.fit(small.data(), **fit).history, expected)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-5)


def test_a_loss_that_compares_examples_in_training_equals_one_device_in_a_pipeline() -> None:
    small.assert_trains_as_one_device(lambda: build(ComparesInTraining), small.data, STRATEGIES["pipeline"])


class HalvesLoss(keras.Model):
    """Transforms the loss of compile."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 0.5 * super().compute_loss(*args, **kwargs)


def masked() -> keras.Model:
    tokens = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(11, 4, mask_zero=True)(tokens)
    model = HalvesLoss(tokens, keras.layers.Dense(2)(embedded))
    model.compile("sgd", "mse")
    return model


def by_weight() -> keras.Model:
    inputs = keras.Input((6,))
    model = HalvesLoss(inputs, keras.layers.Dense(2)(keras.layers.Dense(3)(inputs)))
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return model


def masked_later(build: Any) -> tf.data.Dataset:
    """Return batches of which the first has nothing to mask, and the same weight for each example."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, 11, (16, 6))
    tokens[8:, 3:] *= random.integers(0, 2, (8, 3))
    if build is masked:
        return tf.data.Dataset.from_tensor_slices((tokens, random.normal(size=(16, 6, 2)))).batch(8)
    weights = np.concatenate([np.ones(8), random.uniform(0.1, 2.0, 8)])
    arrays = tokens.astype("float32"), random.normal(size=(16, 2)), weights
    return tf.data.Dataset.from_tensor_slices(arrays).batch(8)


@pytest.mark.parametrize(("build", "strategy"), [(masked, "pipeline"), (by_weight, "mirrored")])
def test_masks_and_weights_divide_on_the_gathered_batch_also_if_the_first_batch_masks_nothing(
    build: Any, strategy: str
) -> None:
    small.assert_trains_as_one_device(build, lambda: masked_later(build), STRATEGIES[strategy])


def two_outputs(loss: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4, "tanh")(inputs)
        model = HalvesLoss(inputs, [keras.layers.Dense(2, name="a")(hidden), keras.layers.Dense(3, name="b")(hidden)])
        model.compile(keras.optimizers.SGD(0.05), loss)
        return model

    return make


def two_targets(size: int, drop_remainder: bool) -> tf.data.Dataset:
    random = np.random.default_rng(0)
    inputs, first, second = (random.normal(size=(24, units)).astype("float32") for units in (6, 2, 3))
    return tf.data.Dataset.from_tensor_slices((inputs, (first, second))).batch(size, drop_remainder)


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["mse", ["mse", "mae"], {"a": "mae", "b": "mse"}], ids=["one", "two", "by name"])
@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("strategy", small.SPLITTING_STRATEGIES)
def test_losses_of_several_outputs_are_logged_as_on_one_device(strategy: str, drop_remainder: bool, loss: Any) -> None:
    small.assert_trains_as_one_device(
        two_outputs(loss), lambda: two_targets(7, drop_remainder), small.SPLITTING_STRATEGIES[strategy]
    )


class PenalizesInputs(keras.Model):
    """A layer that the loss alone calls, and nothing has built."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.of_loss = keras.layers.Dense(2, name="classes"), keras.layers.Dense(1, name="of_loss")

    def call(self, inputs: Any) -> Any:
        return self.classes(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return keras.ops.mean(keras.ops.square(y - y_pred)) + keras.ops.mean(keras.ops.square(self.of_loss(x)))


def penalizes_inputs() -> keras.Model:
    model = PenalizesInputs()
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
    return model


class Vectorized(keras.layers.Layer):
    """A map of TensorFlow over the examples, which it compiles itself."""

    def call(self, inputs: Any) -> Any:
        return keras.ops.vectorized_map(lambda example: keras.ops.tanh(example) * 2.0, inputs)


def vectorized() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), Vectorized(), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*layer call for 2 stages")
@pytest.mark.parametrize("build", [penalizes_inputs, vectorized], ids=lambda build: build.__name__)
@pytest.mark.parametrize("strategy", small.SPLITTING_STRATEGIES)
def test_layers_of_the_loss_and_vectorized_maps_train_as_on_one_device(
    strategy: str, build: Callable[[], keras.Model]
) -> None:
    def data() -> tf.data.Dataset:
        return two_targets(7, False).map(lambda inputs, targets: (inputs, targets[0]))

    small.assert_trains_as_one_device(build, data, small.SPLITTING_STRATEGIES[strategy])


class FindsClasses(OwnLoss):
    """Predicts which classes occur in an image, of the classes of its boxes; there is no largest value of no box."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        padded = y.to_tensor(default_value=-1) if isinstance(y, tf.RaggedTensor) else y
        present = keras.ops.max(keras.ops.one_hot(padded, parity_cases.NUM_CLASSES), axis=1)
        return keras.ops.mean(keras.ops.binary_crossentropy(present, keras.ops.sigmoid(y_pred)))


def finds_classes() -> keras.Model:
    model = FindsClasses()
    model.compile(keras.optimizers.SGD(0.05))
    return model


def boxes(lengths: list[int]) -> tf.data.Dataset:
    classes = tf.RaggedTensor.from_row_lengths(np.arange(sum(lengths)) % parity_cases.NUM_CLASSES, lengths)
    return tf.data.Dataset.from_tensor_slices((parity_cases.inputs(len(lengths)), classes)).batch(4)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_an_image_without_boxes_beside_others_trains_as_on_one_device(strategy: str) -> None:
    small.assert_trains_as_one_device(finds_classes, lambda: boxes([0, 3, 2, 1, 1, 4, 2, 2]), STRATEGIES[strategy])


class ReturnsValues(OwnLoss):
    def reduced(self, losses: Any, outputs: Any, training: bool) -> Any:
        return losses


def test_a_value_for_each_example_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ReturnsValues\.compute_loss must return a scalar, and returned values of"):
        trainer_of(ReturnsValues, "mirrored").fit(small.data(), verbose=0)


class Contrasts(OwnLoss):
    """Compares each example with all others of the batch, and adds a value of the whole batch."""

    def reduced(self, losses: Any, outputs: Any, training: bool) -> Any:
        rows = keras.ops.normalize(outputs, axis=-1)
        others = tfpar.gather(rows)
        own = keras.ops.logsumexp(keras.ops.matmul(rows, keras.ops.transpose(others)), axis=-1)
        spread = keras.ops.mean(keras.ops.square(others - keras.ops.mean(others, axis=0)))
        return keras.ops.mean(losses + own) - spread


@pytest.mark.parametrize("strategy", ["mirrored", "pipeline"])
def test_rows_of_the_whole_batch_reach_an_own_loss(strategy: str) -> None:
    small.assert_trains_as_one_device(lambda: build(Contrasts), small.data, STRATEGIES[strategy])
