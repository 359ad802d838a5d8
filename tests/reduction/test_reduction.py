"""Losses and gradients over replicas: divided once, by the global weight, for any distribution of the examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.support import parity_cases, small
from tests.support.extent import sampled
from tfpar.reduction.gradients.all_reduce import all_reduce_gradients
from tfpar.reduction.losses import global_mean, global_sum, reduce_loss

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]

REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight")


@functools.cache
def three_replicas() -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1", "CPU:2"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def on_replicas(function: Callable[[int], tf.Tensor]) -> list[np.ndarray]:
    """Run a function of the replica's number on each replica; return what each returned."""
    strategy = three_replicas()

    @tf.function(autograph=False)
    def run() -> Any:
        def call() -> Any:
            return function(int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)))

        return strategy.run(call)

    return [result.numpy() for result in strategy.experimental_local_results(run())]


def parts(array: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(sizes)[:-1])


def value_and_gradient(function: Callable[[tf.Tensor], tf.Tensor], at: float = 2.0) -> tf.Tensor:
    """Return the value of a scalar function and its derivative, `[2]`."""
    point = tf.constant(at)
    with tf.GradientTape() as tape:
        tape.watch(point)
        value = function(point)
    return tf.stack([value, tape.gradient(value, point)])


# --- sums and means ---------------------------------------------------------------------------------------------------


def test_global_mean_has_the_mean_of_all_as_value_and_its_own_part_as_gradient() -> None:
    totals, weights = (3.0, 2.0, 0.0), (4.0, 3.0, 0.0)
    results = on_replicas(
        lambda replica: value_and_gradient(
            lambda x: global_mean(totals[replica] * x / 2.0, tf.constant(weights[replica]))
        )
    )
    np.testing.assert_allclose([result[0] for result in results], 5 / 7, rtol=1e-6)
    np.testing.assert_allclose([result[1] for result in results], [1.5 / 7, 1.0 / 7, 0.0], rtol=1e-6)


def test_global_mean_without_any_weight_is_zero() -> None:
    results = on_replicas(lambda replica: value_and_gradient(lambda x: global_mean(0.0 * x, tf.constant(0.0))))
    np.testing.assert_array_equal(results, np.zeros((3, 2)))


def test_global_sum_has_the_sum_of_all_as_value_and_its_own_part_as_gradient() -> None:
    results = on_replicas(lambda replica: value_and_gradient(lambda x: global_sum((replica + 1.0) * x)))
    np.testing.assert_allclose([result[0] for result in results], 12.0)
    np.testing.assert_allclose([result[1] for result in results], [1.0, 2.0, 3.0])


# --- one loss ---------------------------------------------------------------------------------------------------------

SIZES = {"even": (3, 3, 3), "ragged": (3, 2, 2)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("static", [True, False], ids=["static shapes", "unknown shapes"])
def test_a_loss_equals_that_of_keras_on_all_examples(sizes: tuple[int, ...], static: bool) -> None:
    """Value and the sum of the gradients, for every reduction, with and without sample weights and a mask."""
    rng = np.random.default_rng(0)
    num_examples = sum(sizes)
    losses = rng.uniform(size=(num_examples, 4)).astype("float32")
    weights = rng.uniform(0.1, 2.0, size=(num_examples, 4)).astype("float32")
    mask = rng.uniform(size=(num_examples, 4)) < 0.7
    mask[0, 0] = True
    cases = [(name, w, m) for name in REDUCTIONS for w in (None, weights) for m in (None, mask)]

    def local(array: np.ndarray | None, replica: int) -> Any:
        if array is None:
            return None
        tensor = tf.constant(parts(array, sizes)[replica])
        return tensor if static else tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, 4])

    def compute(replica: int) -> tf.Tensor:
        return tf.stack(
            [
                value_and_gradient(
                    lambda x, name=name, w=w, m=m: reduce_loss(
                        local(losses, replica) * x, local(w, replica), local(m, replica), name, "float32"
                    )
                )
                for name, w, m in cases
            ]
        )

    results = np.stack(on_replicas(compute))
    for index, (name, w, m) in enumerate(cases):
        case = f"{name}{', weighted' * (w is not None)}{', masked' * (m is not None)}"
        expected = value_and_gradient(lambda x, name=name, w=w, m=m: _keras_loss(losses * x, w, m, name)).numpy()
        np.testing.assert_allclose(results[:, index, 0], expected[0], rtol=1e-5, err_msg=f"value: {case}")
        np.testing.assert_allclose(results[:, index, 1].sum(), expected[1], rtol=1e-5, err_msg=f"gradient: {case}")


def _keras_loss(losses: Any, weights: Any, mask: Any, name: str) -> tf.Tensor:
    class Given(keras.losses.Loss):
        def call(self, targets: Any, outputs: Any) -> Any:
            return outputs

    outputs = tf.convert_to_tensor(losses)
    if mask is not None:
        outputs._keras_mask = tf.constant(mask)  # where Keras 3.15 looks for it
    return Given(reduction=name)(tf.zeros_like(outputs), outputs, sample_weight=weights)


def test_a_scalar_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="a loss must return one value per example, received a scalar"):
        reduce_loss(tf.constant(1.0), None, None, "sum", "float32")


@pytest.mark.parametrize("name", [None, "none"])
def test_a_loss_without_reduction_is_refused(name: str | None) -> None:
    with pytest.raises(ValueError, match="a loss needs a reduction, received reduction=None"):
        reduce_loss(tf.ones([3]), None, None, name, "float32")


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack_bytes", [None, 1, 24, 50, 10**9])
def test_gradients_are_summed_whatever_the_packs(pack_bytes: int | None) -> None:
    """Dense ones of several shapes and types, a sparse one, none at all; in their order."""

    def gradients(replica: int) -> list[Any]:
        factor = replica + 1.0
        return [
            tf.fill([2, 3], factor),
            None,
            tf.fill([4], 10 * factor),
            tf.IndexedSlices(tf.fill([1, 2], factor), tf.constant([replica]), dense_shape=tf.constant([3, 2])),
            tf.fill([2], tf.cast(100 * factor, "float64")),
            tf.fill([5], tf.cast(1000 * factor, "float64")),
            tf.fill([], factor),
        ]

    def compute(replica: int) -> tf.Tensor:
        sums = all_reduce_gradients(gradients(replica), pack_bytes)
        assert sums[1] is None
        assert [sum_.dtype.name for sum_ in (sums[0], sums[4])] == ["float32", "float64"]
        dense = [tf.convert_to_tensor(sum_) for sum_ in sums if sum_ is not None]
        return tf.concat([tf.reshape(tf.cast(tensor, "float64"), [-1]) for tensor in dense], 0)

    expected = [6.0] * 6 + [60.0] * 4 + [1, 1, 2, 2, 3, 3] + [600.0] * 2 + [6000.0] * 5 + [6.0]
    for result in on_replicas(compute):
        np.testing.assert_allclose(result, expected)


# --- losses that layers add, and losses of the model's own ------------------------------------------------------------


class Adds(keras.layers.Layer):
    """Adds a loss of its inputs."""

    def __init__(self, loss: Callable[[Any], Any], when: str = "always") -> None:
        super().__init__()
        self._loss = loss
        self._when = when

    def call(self, features: Any, training: bool = False) -> Any:
        if self._when == "always" or (self._when == "training") == bool(training):
            self.add_loss(0.1 * self._loss(features))
        return features


def _mean(features: Any) -> Any:
    return keras.ops.mean(keras.ops.square(features))


def _sum(features: Any) -> Any:
    return 0.1 * keras.ops.sum(keras.ops.square(features))


def adds(*layers: Callable[[], Any]) -> Callable[[], keras.Model]:
    return parity_cases.classifier(layers=lambda: [make() for make in layers])


def zero_at_first() -> keras.layers.Layer:
    return keras.layers.Dense(4, kernel_initializer="zeros")


class LearnsItsWeight(keras.layers.Layer):
    """Adds a mean times one of its weights; without examples on a replica, the mean is NaN."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, features: Any) -> Any:
        self.add_loss(0.1 * self.scale * _mean(features))
        return features


class OwnLoss(keras.Sequential):
    """Computes its loss itself, as users do who need the inputs or the weights in it."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        return keras.ops.mean(losses) + 0.01 * keras.ops.mean(keras.ops.abs(x))


class MoreLoss(keras.Sequential):
    """Adds to the loss that Keras computes."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * keras.ops.mean(y_pred**2)


def own_loss(kind: type[keras.Sequential]) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        model = kind([keras.Input((5,)), keras.layers.Dense(3, kernel_regularizer="l2")])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    return build


DIVISIBLE = {
    "only while training": adds(lambda: Adds(_sum, "training"), lambda: Adds(_mean)),
    "only while evaluating": adds(lambda: Adds(_sum, "evaluating"), lambda: Adds(_mean)),
    "a sum that is zero at first": adds(zero_at_first, lambda: Adds(_sum)),
    "a mean that is zero at first": adds(zero_at_first, lambda: Adds(_mean)),
    "a mean times a weight": adds(LearnsItsWeight),
    "compute_loss of its own": own_loss(OwnLoss),
    "compute_loss that adds": own_loss(MoreLoss),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(DIVISIBLE, of_ci=[*DIVISIBLE][::2]))
def test_losses_beside_keras_own_equal_one_device(name: str) -> None:
    keras.utils.set_random_seed(0)
    model = DIVISIBLE[name]()
    model.run_eagerly = True  # compiled, Keras' own reads of LearnsItsWeight.scale can come after its update
    expected = model.fit(small.data(), verbose=0, validation_data=small.data()).history
    trainer = tfpar.Trainer(DIVISIBLE[name], small.STRATEGIES["mirrored"](), seed=0)
    history = trainer.fit(small.data(), verbose=0, validation_data=small.data()).history
    small.assert_same_history(history, expected)
    small.assert_same_state(trainer.model.get_weights(), model.get_weights(), 1e-5)


def without_targets() -> keras.Model:
    features = keras.Input((5,))
    outputs = Adds(_mean)(keras.layers.Dense(4)(features))
    model = keras.Model(features, outputs)
    model.compile("sgd")
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("as_tuple", [False, True], ids=["x", "(x,)"])
def test_a_model_that_only_adds_losses_needs_no_targets(as_tuple: bool) -> None:
    features = parity_cases.inputs(23)
    dataset = tf.data.Dataset.from_tensor_slices((features,) if as_tuple else features).batch(4)
    keras.utils.set_random_seed(0)
    model = without_targets()
    expected = model.fit(dataset, epochs=2, verbose=0).history
    trainer = tfpar.Trainer(without_targets, small.STRATEGIES["mirrored"](), seed=0)
    small.assert_same_history(trainer.fit(dataset, epochs=2, verbose=0).history, expected)


INDIVISIBLE = {
    "neither mean nor sum": (
        adds(lambda: Adds(lambda features: keras.ops.max(features))),
        r"added with add_loss to 'sequential.*' must be a sum or a mean over the batch",
    ),
    "the square of a sum": (adds(lambda: Adds(lambda features: _sum(features) ** 2)), "must be a sum or a mean"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDIVISIBLE)
def test_losses_that_replicas_cannot_reduce_are_refused_before_the_first_step_and_only_over_replicas(name: str) -> None:
    build, message = INDIVISIBLE[name]
    trainer = tfpar.Trainer(build, small.STRATEGIES["mirrored"]())
    for verb in (trainer.evaluate, trainer.fit):
        with pytest.raises(ValueError, match=message):
            verb(small.data(), verbose=0)
    assert int(trainer.model.optimizer.iterations.numpy()) == 0
    tfpar.Trainer(build, small.STRATEGIES["single_device"]()).fit(small.data().take(1), verbose=0)


@pytest.mark.extended
def test_two_models_share_one_strategy_without_mixing_their_losses() -> None:
    strategy = small.STRATEGIES["mirrored"]()
    builds = (adds(lambda: Adds(_sum), lambda: Adds(_mean)), small.build_model, adds(lambda: Adds(_mean)))
    trainers = [tfpar.Trainer(build, strategy, seed=0) for build in builds]
    for trainer in trainers:
        trainer.fit(small.data(), verbose=0)
    for build, trainer in zip(builds, trainers, strict=True):
        keras.utils.set_random_seed(0)
        model = build()
        model.fit(small.data(), verbose=0)
        expected = model.evaluate(small.data(), verbose=0)
        np.testing.assert_allclose(trainer.evaluate(small.data(), verbose=0), expected, rtol=1e-5)


class Counts(keras.layers.Layer):
    """Counts its calls, in training or not, and draws a random number in each."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", name="calls", trainable=False)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, features: Any) -> Any:
        self.calls.assign_add(1.0)
        return features + 0.0 * keras.random.normal((1,), seed=self.seeds)


def test_the_trial_of_losses_does_not_change_the_model() -> None:
    trainer = tfpar.Trainer(adds(Counts), small.STRATEGIES["mirrored"]())
    trainer.fit(small.data(), verbose=0)
    assert trainer.model.layers[1].calls.numpy() == small.STEPS_PER_EPOCH


# --- every loss, metric and optimizer of Keras ------------------------------------------------------------------------

ALL_LOSSES = (
    "BinaryCrossentropy", "BinaryFocalCrossentropy", "CategoricalCrossentropy", "CategoricalFocalCrossentropy",
    "CategoricalHinge", "CosineSimilarity", "Hinge", "Huber", "KLDivergence", "LogCosh", "MeanAbsoluteError",
    "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson", "SquaredHinge",
)  # fmt: skip
LOSSES = sampled(
    ALL_LOSSES,
    of_ci=("BinaryFocalCrossentropy", "CategoricalCrossentropy", "CosineSimilarity", "MeanSquaredError", "Poisson"),
)
PLAIN_METRICS = (
    "AUC", "BinaryAccuracy", "BinaryCrossentropy", "CategoricalAccuracy", "CategoricalCrossentropy",
    "CategoricalHinge", "CosineSimilarity", "F1Score", "FalseNegatives", "FalsePositives", "KLDivergence",
    "MeanAbsoluteError", "MeanSquaredError", "PearsonCorrelation", "Poisson", "Precision", "R2Score", "Recall",
    "RootMeanSquaredError", "TopKCategoricalAccuracy", "TruePositives", "TrueNegatives",
)  # fmt: skip
ALL_METRICS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN_METRICS},
    "OneHotMeanIoU": {"num_classes": 4},
    "PrecisionAtRecall": {"recall": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
}  # fmt: skip
METRICS = sampled(
    ALL_METRICS,
    of_ci=(
        *("AUC", "CategoricalAccuracy", "F1Score", "MeanSquaredError", "OneHotMeanIoU", "PearsonCorrelation"),
        *("Precision", "PrecisionAtRecall", "R2Score", "TruePositives"),
    ),
)


def every_loss_and_metric() -> keras.Model:
    features = keras.Input((5,))
    outputs = {name: keras.layers.Dense(4, "softmax", name=name)(features) for name in LOSSES}
    model = keras.Model(features, outputs)
    metrics = [getattr(keras.metrics, name)(name=name.lower(), **ALL_METRICS[name]) for name in METRICS]
    model.compile(
        keras.optimizers.SGD(0.01),
        {name: getattr(keras.losses, name)() for name in LOSSES},
        metrics={"MeanSquaredError": metrics},
    )
    return model


def test_every_loss_and_every_metric_of_keras_equals_one_device() -> None:
    features = parity_cases.inputs(13)
    targets = np.eye(4, dtype="float32")[np.random.default_rng(0).integers(0, 4, size=13)] * 0.8 + 0.05
    exact = np.round(targets)
    labels = {name: exact if name == "MeanSquaredError" else targets for name in LOSSES}
    dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(4)
    keras.utils.set_random_seed(0)
    model = every_loss_and_metric()
    expected = model.fit(dataset, verbose=0).history
    trainer = tfpar.Trainer(every_loss_and_metric, small.STRATEGIES["mirrored"](), seed=0)
    small.assert_same_history(trainer.fit(dataset, verbose=0).history, expected)
    for weight, one, other in zip(model.weights, trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5, err_msg=weight.path)


OPTIMIZERS = ("Adafactor", "Ftrl", "Lamb", "Lion", "Muon", "Nadam", "ScheduleFreeAdamW")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_keras_equals_one_device(name: str) -> None:
    """Those whose update is unlike the ones of the parity table."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile(
            getattr(keras.optimizers, name)(learning_rate=0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return model

    keras.utils.set_random_seed(0)
    model = build()
    # If it were built inside the compiled step, as in Keras 3.15, ScheduleFreeAdamW would start from zeros.
    model.optimizer.build(model.trainable_variables)
    model.fit(small.data(), verbose=0)
    trainer = tfpar.Trainer(build, small.STRATEGIES["mirrored"](), seed=0)
    trainer.fit(small.data(), verbose=0)
    small.assert_same_state(small.state(trainer.model), small.state(model), 1e-5)
