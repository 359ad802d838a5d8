"""Models with objectives: parity, refusals, resuming, metrics, and training with plain Keras.

That every strategy gives one device's weights for them is a part of the parity table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar
from tests.support import small
from tests.support.objective_cases import gan, pairs_with_noise, vae

pytestmark = [pytest.mark.crossed, pytest.mark.usefixtures("logical_cpus")]


class Line(keras.Model):
    """One Dense layer under a loss that each test chooses."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.settings = settings

    def call(self, features: Any) -> Any:
        return self.dense(features)

    def errors(self, batch: Any, training: bool) -> Any:
        features, targets = batch
        return ops.square(self(features) - targets)

    def objectives(self) -> list[tfpar.Objective]:
        return [tfpar.Objective(**{"name": "error", "loss": self.errors, **self.settings})]


def line(**settings: Any) -> keras.Model:
    model = Line(**settings)
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    features = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    return features, features.sum(1, keepdims=True)


def fit(build: Any, strategy: str = "mirrored", **arguments: Any) -> tfpar.Trainer:
    trainer = tfpar.Trainer(build, small.STRATEGIES[strategy](), seed=0)
    trainer.fit(*rows(), batch_size=8, shuffle=False, verbose=0, **arguments)
    return trainer


class OwnMetrics(Line):
    """Lists its own metrics without the tracker of the loss, as models with a `train_step` often do."""

    @property
    def metrics(self) -> list[keras.Metric]:
        return [metric for metric in self._metrics if metric.name == "error"]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", small.STRATEGIES)
def test_the_entry_loss_exists_and_begins_anew_in_each_epoch_where_a_model_overrides_metrics(strategy: str) -> None:
    def build() -> keras.Model:
        model = OwnMetrics()
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        return model

    expected = fit(line, strategy, epochs=2, validation_data=rows()).model.history.history
    trainer = fit(build, strategy, epochs=2, validation_data=rows())
    assert trainer.model.history.history == expected
    results = trainer.evaluate(*rows(), batch_size=8, verbose=0, return_dict=True)
    assert results["loss"] == results["error"]


def every_variable(trainer: tfpar.Trainer) -> list[np.ndarray]:
    optimizers = [trainer.model.optimizer, trainer.model.discriminator_optimizer]
    return [*trainer.model.get_weights(), *(one.numpy() for optimizer in optimizers for one in optimizer.variables)]


def test_the_optimizer_of_compile_counts_steps_without_weights_and_may_accumulate_gradients() -> None:
    def build() -> keras.Model:
        model = Line(optimizer=keras.optimizers.SGD(0.1))
        model.compile(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
        return model

    trainer = fit(build, epochs=2)
    assert int(trainer.model.optimizer.iterations) == 3  # six steps


@pytest.mark.extended
def test_an_interrupted_training_resumes_with_all_optimizers(tmp_path: Path) -> None:
    class Interrupt(keras.callbacks.Callback):
        single_batches = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == 13:
                trainer.interrupt()

    make = small.STRATEGIES["mirrored"]
    undisturbed = tfpar.Trainer(gan, make(), seed=0)
    history = undisturbed.fit(pairs_with_noise(), epochs=2, verbose=0).history
    trainer = tfpar.Trainer(gan, make(), seed=0)
    trainer.fit(
        pairs_with_noise(), epochs=2, verbose=0, callbacks=[Interrupt()], checkpoints=tfpar.Checkpoints(tmp_path)
    )
    assert trainer.interrupted
    resumed = tfpar.Trainer(gan, make(), seed=1)
    ended = resumed.fit(pairs_with_noise(), epochs=2, verbose=0, checkpoints=tfpar.Checkpoints(tmp_path)).history
    assert ended["generator_loss"][-1] == history["generator_loss"][-1]
    small.assert_same_state(every_variable(resumed), every_variable(undisturbed))


def test_objectives_that_train_no_weight_are_named() -> None:
    def build() -> keras.Model:
        model = Line()
        model.other = layers.Dense(1)  # trainable, and of no objective
        model.other.build((None, 3))
        model(tf.zeros([1, 3]))
        model.dense.trainable = False
        model.settings["layers"] = [model.dense]
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        return model

    with pytest.warns(UserWarning, match="does not have any trainable weights: fit updates its metrics"):
        fit(build)


def test_the_optimizer_of_compile_counts_the_steps_where_it_trains_nothing() -> None:
    trainer = fit(lambda: line(optimizer=keras.optimizers.Adam(0.1)), epochs=2)
    assert int(trainer.model.optimizer.iterations.numpy()) == 6
    assert len(trainer.model.optimizer.variables) == 2, "no slots"


def test_the_moving_average_of_every_optimizer_ends_in_its_weights() -> None:
    def build() -> keras.Model:
        return line(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))

    trainer = fit(build)
    (average,) = [one for one in trainer.model.objectives()[0].optimizer.variables if "average" in one.path][:1]
    np.testing.assert_array_equal(trainer.model.trainable_variables[0].numpy(), average.numpy())


def test_a_pair_of_sum_and_weight_is_divided_once() -> None:
    def weighted(model: Line, batch: Any, training: bool) -> Any:
        features, targets = batch
        weights = ops.cast(targets > 0.5, "float32")
        return ops.sum(weights * ops.square(model(features) - targets)), ops.sum(weights)

    class Weighted(Line):
        errors = weighted

    def build() -> keras.Model:
        model = Weighted()
        model.compile(optimizer=keras.optimizers.SGD(0.1))
        return model

    trainers = [fit(build, strategy, epochs=2) for strategy in small.STRATEGIES]
    small.assert_same_history(trainers[1].model.history.history, trainers[0].model.history.history)
    small.assert_same_state(trainers[1].model.get_weights(), trainers[0].model.get_weights(), 1e-6)
    features, targets = rows()
    chosen = targets > 0.5
    outputs = trainers[1].predict(features, verbose=0)
    evaluated = trainers[1].evaluate(features[:8], targets[:8], verbose=0, return_dict=True)
    expected = np.mean(np.square(outputs - targets)[:8][chosen[:8]])
    assert evaluated["error"] == evaluated["loss"] == pytest.approx(expected, rel=1e-5)


def test_rows_that_an_objective_looks_up_eagerly_are_those_of_one_device() -> None:
    class Lookup(Line):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.Sequential([layers.Embedding(4, 1), layers.Flatten(), layers.Dense(1)])

    def build() -> keras.Model:
        model = Lookup()
        model.compile(optimizer=keras.optimizers.Adam(0.1), run_eagerly=True)
        return model

    trainers = [tfpar.Trainer(build, one, seed=0) for one in (tfpar.Mirrored(["CPU:0", "CPU:1"]), tfpar.SingleDevice())]
    for trainer in trainers:
        trainer.fit(np.array([[0, 1]] * 5 + [[2, 1]] * 3), np.ones([8, 1], "float32"), verbose=0)
    small.assert_same_state(*(trainer.model.get_weights() for trainer in trainers), 1e-6)


def test_weights_that_no_objective_trains_stay() -> None:
    def build() -> keras.Model:
        model = gan()
        (discriminators, _) = model.objectives()
        model.objectives = lambda: [discriminators]
        return model

    trainer = tfpar.Trainer(build, tfpar.Mirrored(["CPU:0", "CPU:1"]), seed=0)
    trainer.build(pairs_with_noise())
    before = [weight.numpy() for weight in trainer.model.generator.weights]
    trainer.fit(pairs_with_noise(), verbose=0)
    small.assert_same_state([weight.numpy() for weight in trainer.model.generator.weights], before)


def test_plain_keras_trains_the_same_class() -> None:
    keras.utils.set_random_seed(0)
    assert set(gan().fit(pairs_with_noise(), verbose=0).history) == {"discriminator_loss", "generator_loss", "loss"}


@pytest.mark.parametrize(
    ("loss", "received"),
    [
        (lambda batch, training: ops.mean(batch[0]), r"that of 'error' returned shape \(\)"),
        (lambda batch, training: None, "returned NoneType"),
        (lambda batch, training: (batch[0], batch[1]), "returned tuple"),
    ],
)
def test_a_loss_that_is_no_value_per_example_is_refused(loss: Any, received: str) -> None:
    with pytest.raises(ValueError, match=f"must return one value per example.*{received}"):
        fit(lambda: line(loss=loss))


def test_a_loss_that_mixes_examples_is_refused_under_replicas() -> None:
    def centered(batch: Any, training: bool) -> Any:
        return ops.square(batch[0] - ops.mean(batch[0], axis=0))

    with pytest.raises(ValueError, match="'error' has other values on two parts of a batch"):
        fit(lambda: line(loss=centered))
    fit(lambda: line(loss=centered), "single_device")


def test_a_loss_that_draws_is_not_taken_for_one_that_mixes() -> None:
    generator = keras.random.SeedGenerator(0)

    def noisy(batch: Any, training: bool) -> Any:
        return ops.square(batch[0] - keras.random.normal(ops.shape(batch[0]), seed=generator))

    fit(lambda: line(loss=noisy))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": 3}, "name of a tfpar.Objective must be a string, received 3"),
        ({"loss": 0.5}, "loss of a tfpar.Objective must be a function of"),
        ({"layers": "generator"}, "layers of a tfpar.Objective must be Keras layers, received 'generator'"),
        ({"optimizer": "adam"}, "optimizer of a tfpar.Objective must be a Keras optimizer, received 'adam'"),
    ],
)
def test_wrong_kinds_of_argument_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tfpar.Trainer(lambda: line(**settings))


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, r"must return a list of tfpar\.Objective, received None"),
        (["loss"], TypeError, r"must return a list of tfpar\.Objective"),
        ([], ValueError, "at least one objective"),
        ([tfpar.Objective("a", print), tfpar.Objective("a", print)], ValueError, "with different names"),
    ],
)
def test_wrong_lists_of_objectives_are_refused(returned: Any, error: type[Exception], message: str) -> None:
    class Wrong(Line):
        def train_step(self, batch: Any) -> Any:
            return {}

        def objectives(self) -> Any:
            return returned

    def build() -> keras.Model:
        model = Wrong()
        model.compile()
        return model

    with pytest.raises(error, match=message):
        tfpar.Trainer(build)


def test_an_optimizer_created_at_every_call_is_refused() -> None:
    class Forgetful(Line):
        def objectives(self) -> list[tfpar.Objective]:
            return [tfpar.Objective("error", self.errors, optimizer=keras.optimizers.Adam())]

    def build() -> keras.Model:
        model = Forgetful()
        model.compile()
        return model

    with pytest.raises(ValueError, match=r"must return the same optimizers each time.*Create it in __init__"):
        tfpar.Trainer(build)


def test_a_pipeline_refuses_objectives() -> None:
    with pytest.raises(ValueError, match=r"A pipeline trains with the loss of compile.*GAN has objectives"):
        tfpar.Trainer(gan, tfpar.Pipeline(2, 2))


def test_metrics_that_a_loss_updates_count_every_example_once() -> None:
    few = tf.data.Dataset.from_tensor_slices(next(iter(pairs_with_noise()))).batch(1)  # fewer examples than replicas
    histories = [
        tfpar.Trainer(vae, small.STRATEGIES[strategy](), seed=0).fit(few, verbose=0).history
        for strategy in small.STRATEGIES
    ]
    small.assert_same_history(*histories)
    assert set(histories[0]) == {"loss", "reconstruction", "divergence"}
