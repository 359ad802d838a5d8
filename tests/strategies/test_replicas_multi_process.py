"""Models that need more than a sum of dense gradients, over two workers: one device's results, or a clear refusal."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfpar
from tests.reduction.test_indexed_slices import embedding, tokens
from tests.reduction.test_losses_in_call import pairs, weighted, with_endpoint
from tests.support import category_cases, objective_cases, parity_cases, small, verdict_layers, workers
from tests.support import multi_worker_cases as cases
from tests.support.parity_cases import classifier
from tests.support.verdict_layers import MIXING, Centred, Gathers, Similar
from tests.support.verdict_losses import contrast, mean, mean_accuracy, total, two_scalars
from tests.support.verdicts import Applies
from tfpar import config
from tfpar.parity import relative_difference

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("logical_cpus")]

TRAINED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "centred": (classifier(layers=lambda: [Centred()]), small.data),
    "own call": (MIXING["in a model's own call"].build, MIXING["in a model's own call"].data),
    "gathers by itself": (classifier(layers=lambda: [Gathers()]), cases.SHARDED["by example, uneven"]),
    "loss in a layer": (with_endpoint(weighted(), loss=None), pairs),
    "rows": (parity_cases.lookups, lambda: parity_cases._tokens(11)),
    "rows of bfloat16": (embedding("bfloat16"), tokens),
    "rows of float16 scaled": (embedding("mixed_float16"), tokens),
    "scalar loss and metric": (classifier(loss=lambda: mean, metrics=[mean_accuracy]), small.data),
    "scalar loss, sharded": (classifier(loss=lambda: mean), cases.SHARDED["by example, uneven"]),
    "scalar sum, chief without data": (classifier(loss=lambda: total), cases.SHARDED["by file, worker 0 has nothing"]),
    "scalar loss that gathers": (classifier(loss=lambda: contrast), small.data),
    "scalars of two outputs": (two_scalars, parity_cases.two_outputs_data(as_dict=False)),
    "contrastive": (objective_cases.contrastive, objective_cases.views),
}
IN_CI = (
    "gathers by itself", "rows of float16 scaled", "scalar loss and metric", "scalar sum, chief without data",
    "contrastive",
)  # fmt: skip


def of_ci_or_extended(name: str) -> Any:
    return name if name in IN_CI else pytest.param(name, marks=pytest.mark.extended)


@functools.cache
def gathering() -> tfpar.MultiWorker:
    return tfpar.MultiWorker(["CPU:0"], batch_dependent_layers="gather")


def fit(strategy: tfpar.Strategy, build: Callable[[], Any], dataset: Any) -> tuple[Any, Any]:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    return trainer.fit(dataset, epochs=2, verbose=0).history, cases.state(trainer.model)


def train(name: str) -> tuple[Any, Any]:
    build, dataset = TRAINED[name]
    return fit(gathering(), build, dataset())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [of_ci_or_extended(name) for name in TRAINED])
def test_two_workers_equal_one_device(job: workers.Job, name: str) -> None:
    call = job.start(train, name)
    build, dataset = TRAINED[name]
    history, state = fit(tfpar.SingleDevice(), build, dataset())
    for result in call.results():
        small.assert_same_history(result[0], history)
        for actual, expected in zip(result[1], state, strict=True):
            assert relative_difference(actual, expected) <= 1e-5


def predicted_by(strategy: tfpar.Strategy) -> Any:
    build = classifier(layers=lambda: [Similar()])
    return tfpar.Trainer(build, strategy, seed=0).predict(parity_cases.inputs(19), 9, verbose=0)


def predict() -> Any:
    return predicted_by(gathering())


def test_predictions_of_the_whole_batch_equal_one_device(job: workers.Job) -> None:
    call = job.start(predict)
    expected = predicted_by(tfpar.SingleDevice())
    for result in call.results():
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def fit_mean() -> None:
    fit(cases.one_device_each(), MIXING["operation between layers"].build, MIXING["operation between layers"].data())


def test_every_worker_refuses_batch_dependent_layers(job: workers.Job) -> None:
    for result in job.outcomes(fit_mean):
        assert isinstance(result, workers.Raised)
        assert (
            "where an example depends on the others of its batch; set batch_dependent_layers='gather'" in result.message
        )


def evaluated_by(strategy: tfpar.Strategy) -> Any:
    """Fit with validation data, and predict, with a layer that is batch-dependent in inference only."""
    build = classifier(layers=lambda: [Applies(verdict_layers.in_mode(False))])
    trainer = tfpar.Trainer(build, strategy, seed=0)
    history = trainer.fit(small.data(), validation_data=small.data(), verbose=0).history
    return history, trainer.predict(parity_cases.inputs(19), 9, verbose=0)


def evaluate(*, gathers: bool) -> Any:
    return evaluated_by(gathering() if gathers else cases.one_device_each())


@pytest.mark.extended
def test_layers_that_mix_in_inference_are_gathered_there_or_refused_on_every_worker(job: workers.Job) -> None:
    history, outputs = evaluated_by(tfpar.SingleDevice())
    for result in job.run(functools.partial(evaluate, gathers=True)):
        small.assert_same_history(result[0], history)
        np.testing.assert_allclose(result[1], outputs, rtol=1e-5, atol=1e-6)
    for result in job.outcomes(functools.partial(evaluate, gathers=False)):
        assert isinstance(result, workers.Raised)
        assert "'tested' in inference, where an example depends on the others" in result.message


def train_words(source: str, shard_by: str, checkpoints: Path) -> Any:
    return category_cases.train(cases.one_device_each(), source, shard_by, checkpoints)


@pytest.mark.extended
@pytest.mark.parametrize(("source", "shard_by"), category_cases.CASES)
def test_columns_of_words_over_two_workers_and_a_resumption_equal_one_device(
    job: workers.Job, source: str, shard_by: str, tmp_path: Path
) -> None:
    call = job.start(train_words, source, shard_by, tmp_path)
    history, state = category_cases.train(tfpar.SingleDevice(), source, shard_by)
    for result in call.results():
        assert result[0]["loss"][-1] == pytest.approx(history["loss"][-1], rel=1e-5)
        for actual, expected in zip(result[1], state, strict=True):
            assert relative_difference(actual, expected) <= 1e-5


def create_mirrored() -> None:
    tfpar.Mirrored()


def test_mirrored_in_a_worker_of_a_job_is_refused(job: workers.Job) -> None:
    """TensorFlow 2.21 ends the process by SIGSEGV: it lists no device by a local name there."""
    for result in job.outcomes(create_mirrored):
        assert isinstance(result, workers.Raised)
        assert "Use MultiWorker here" in result.message


# --- what one worker alone notices


def one_message(job: workers.Job, function: Callable[..., Any], *arguments: str) -> str:
    """Return the message of the error that both workers raise."""
    first, second = job.outcomes(function, *arguments)
    assert isinstance(first, workers.Raised)
    assert isinstance(second, workers.Raised)
    assert first.message == second.message
    return str(first.message)


def one_layer(base: type[keras.Model] = keras.Model, loss: Any = "mse") -> keras.Model:
    inputs = keras.Input((4,))
    model = base(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
    model.compile("sgd", loss)
    return model


def call_with_invalid_data(kind: str, verb: str) -> None:
    """Call a method with features and targets that are invalid on worker 1."""
    features, targets = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
    if workers.rank() == 1:
        features, targets = {
            "lengths": (features, targets[:7]),
            "empty": (features[:0], targets[:0]),
            "inputs": (features[:, :3], targets),
            "targets": (features, np.ones((8, 3, 1), "float32")),
            "widths": (features, np.ones((8, 2), "float32")),
        }[kind]
    trainer = tfpar.Trainer(one_layer, cases.one_device_each(), seed=0)
    getattr(trainer, verb)(features, targets, batch_size=4, verbose=0)


@pytest.mark.parametrize("verb", ["fit", "evaluate"])
@pytest.mark.parametrize("kind", ["lengths", "empty", "inputs", "targets", "widths"])
def test_all_workers_raise_one_sentence_for_data_that_one_of_them_refuses(
    job: workers.Job, kind: str, verb: str
) -> None:
    assert one_message(job, call_with_invalid_data, kind, verb)


def largest(targets: Any, outputs: Any) -> Any:
    """The largest error of the batch, which is one of worker 1."""
    return ops.max(ops.square(targets - outputs))


class OwnLoss(keras.Model):
    """A model with its own `compute_loss`, which compares examples."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return largest(y, y_pred)


class Objectives(keras.Model):
    """A model with an objective that compares examples."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def objectives(self) -> list[tfpar.Objective]:
        return [tfpar.Objective("own", self.largest)]

    def largest(self, batch: Any, training: bool) -> Any:
        outputs = self.dense(batch[0])
        return outputs - ops.max(outputs) + 1.0


def with_objective() -> keras.Model:
    model = Objectives()
    model.compile("sgd", "mse")
    return model


COMPARING: dict[str, Callable[[], keras.Model]] = {
    "loss": functools.partial(one_layer, loss=largest),
    "compute_loss": functools.partial(one_layer, OwnLoss),
}


def equal_on_the_chief() -> tf.data.Dataset:
    """Return batches of equal examples on the chief, where a maximum over the batch looks like a mean."""
    features = np.ones((8, 4), "float32")
    features[4:] += np.arange(16).reshape(4, 4)
    return tf.data.Dataset.from_tensor_slices((features, np.zeros((8, 1), "float32"))).batch(8)


def train_with_objective() -> None:
    fit(cases.one_device_each(), with_objective, equal_on_the_chief())


def test_all_workers_refuse_an_objective_that_one_of_them_recognizes(job: workers.Job) -> None:
    """The others waited for its next message until their time limit."""
    assert "must not depend on the other examples" in one_message(job, train_with_objective)


def trained_comparing(kind: str) -> list[np.ndarray]:
    trainer = tfpar.Trainer(COMPARING[kind], cases.one_device_each(), seed=0)
    trainer.fit(equal_on_the_chief(), epochs=2, verbose=0)
    return list(trainer.model.get_weights())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", COMPARING)
def test_a_loss_that_compares_the_rows_of_all_workers_equals_one_device(job: workers.Job, kind: str) -> None:
    keras.utils.set_random_seed(0)
    model = COMPARING[kind]()
    model.fit(equal_on_the_chief(), epochs=2, verbose=0)
    for weights in job.run(trained_comparing, kind):
        for actual, expected in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def train_unreadable(first: int) -> None:
    """Fit data that worker 1 cannot read from one example on."""

    def read(number: tf.Tensor) -> Any:
        readable = number < first if workers.rank() == 1 else True
        with tf.control_dependencies([tf.debugging.Assert(readable, ["data/7.png is broken."])]):
            return tf.ones([4]) * tf.cast(number, tf.float32), tf.ones([1])

    strategy = tfpar.MultiWorker(["CPU:0"])
    strategy.job.user_message = functools.partial(tfpar.data.user_message, settings=config.Data())
    fit(strategy, one_layer, tf.data.Dataset.range(40).map(read).batch(8))


@pytest.mark.few(1)
@pytest.mark.parametrize("first", [3, 20], ids=["in_the_first_batch", "in_a_later_batch"])
def test_the_others_name_the_worker_that_cannot_read_its_data_and_the_reason(job: workers.Job, first: int) -> None:
    chiefs, own = job.outcomes(train_unreadable, first)
    assert chiefs.kind == "ValueError"
    assert re.fullmatch(r"Worker 1 \(127\.0\.0\.1:\d+\) failed: data/7\.png is broken\.", chiefs.message)
    assert own.kind == "InvalidArgumentError"
    if first > 8:
        job.kill()  # no collective operation works after a failure inside of a step
