"""Large scores of a last layer in pieces: the losses and metrics compute them again by chunks, as one device."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tests.strategies.test_vocabulary_parallel import CASES, accuracy, assert_equal, sparse, trained
from tfpar.reduction import gathered_classes, row_scores

pytestmark = pytest.mark.usefixtures("logical_cpus")


@pytest.fixture(autouse=True)
def chunks_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A chunk has as many rows as the inputs have columns, 6 of 25."""
    for name, value in (("LEAST_CLASSES", 1), ("LEAST_BYTES", 0), ("CHUNK_BYTES", 1)):
        monkeypatch.setattr(row_scores, name, value)
    with computing_in("float64"):
        yield


def spoil_scores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the scores of all rows, whole and in pieces, by NaN; return a list to which these are added."""
    note, found = gathered_classes.note_pieces, []

    def spoilt(whole: tf.Tensor, pieces: Any) -> tf.Tensor:
        if pieces.computed is None:
            return note(whole, pieces)
        found.append(whole)
        return note(whole * np.nan, pieces._replace(tensors=[one * np.nan for one in pieces.tensors]))

    monkeypatch.setattr(gathered_classes, "note_pieces", spoilt)
    return found


@pytest.mark.extended
@pytest.mark.parametrize("name", ["ignore_class, summed", "tied", "soft cap, not tied"])
def test_equals_one_device_and_scores_of_all_rows_are_never_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(CASES[name], name, tfpar.SingleDevice())
    spoilt = spoil_scores(monkeypatch)
    assert_equal(trained(CASES[name], name, tfpar.TensorParallel(3)), expected)
    assert spoilt


@pytest.mark.extended
def test_scores_of_examples_without_positions_are_never_read_either(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    features, labels, weights = random.normal(size=(13, 6)), random.integers(0, 11, 13), random.uniform(size=13)

    def fitted(strategy: tfpar.Strategy) -> Any:
        def build() -> keras.Model:
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(11)])
            model.compile(keras.optimizers.Adam(0.05), sparse(from_logits=True), weighted_metrics=[accuracy()])
            return model

        trainer = tfpar.Trainer(build, strategy, seed=0)
        history = trainer.fit(features, labels, 5, 2, 0, sample_weight=weights, shuffle=False).history
        logs = trainer.evaluate(features, labels, batch_size=5, verbose=0, return_dict=True)
        return history, logs, [variable.numpy() for variable in trainer.model.weights]

    expected = fitted(tfpar.SingleDevice())
    spoilt = spoil_scores(monkeypatch)
    assert_equal(fitted(tfpar.TensorParallel(3)), expected)
    assert spoilt


@pytest.mark.extended
def test_scores_that_take_few_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(CASES["softmax"], "softmax", tfpar.SingleDevice())
    # The pieces of 4 classes take more for 25 positions, and less for the 15 of the last batch.
    monkeypatch.setattr(row_scores, "LEAST_BYTES", 25 * 4 * tf.float64.size)
    assert_equal(trained(CASES["softmax"], "softmax", tfpar.TensorParallel(3)), expected)


@pytest.mark.extended
def test_a_step_takes_a_third_of_the_memory_of_gathered_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scores, "CHUNK_BYTES", 1 << 20)
    num_positions, num_classes = 512, 20_000  # scores of 82 MB
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(num_positions, 8)), random.integers(0, num_classes, num_positions)

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(num_classes)])
        model.compile("sgd", sparse(from_logits=True), metrics=[accuracy()])
        return model

    def peak_bytes() -> int:
        trainer = tfpar.Trainer(build, tfpar.TensorParallel(2), seed=0)
        trainer.fit(features[:2], labels[:2], verbose=0)  # creates what stays
        gc.collect()
        before_bytes = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        trainer.fit(features, labels, batch_size=num_positions, verbose=0)
        return int(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before_bytes)

    computed_again_bytes = peak_bytes()
    monkeypatch.setattr(gathered_classes, "read_in_pieces", contextlib.nullcontext)
    gathered_bytes = peak_bytes()
    assert gathered_bytes > num_positions * num_classes * tf.float64.size
    assert computed_again_bytes < gathered_bytes / 3


def test_gradients_of_weights_in_half_precision_lose_no_addends() -> None:
    @tf.function
    def gradient() -> list[tf.Tensor]:
        scores = row_scores.RowScores(tf.ones([4096, 1], tf.float16), (tf.ones([1, 3], tf.float16),), tf.matmul)
        return row_scores.gradients(scores, tf.ones_like, [], 3)

    np.testing.assert_array_equal(gradient()[1], [[4096, 4096, 4096]])


@pytest.mark.extended
def test_metrics_of_scores_that_are_not_finite_are_those_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_scores(monkeypatch)
    random = np.random.default_rng(0)
    kernel, bias = random.normal(size=(6, 11)), np.where(np.arange(11) < 4, -np.inf, 0.0)  # of the first device
    features, labels = random.normal(size=(3, 5, 6)), random.integers(4, 11, (3, 5))

    def evaluated(strategy: tfpar.Strategy, bias: np.ndarray) -> Any:
        def build() -> keras.Model:
            model = keras.Sequential([keras.Input((5, 6)), keras.layers.Dense(11)])
            metrics = [accuracy(), keras.metrics.SparseTopKCategoricalAccuracy(3)]
            model.compile("sgd", sparse(from_logits=True), metrics=metrics)
            return model

        trainer = tfpar.Trainer(build, strategy, seed=0)
        trainer.model.set_weights([kernel, bias])
        return trainer.evaluate(tf.data.Dataset.from_tensors((features, labels)), verbose=0)

    with computing_in("float32"):  # of TensorFlow's `in_top_k`
        for one in (bias, np.zeros(11)):
            found, expected = (evaluated(each, one) for each in (tfpar.TensorParallel(3), tfpar.SingleDevice()))
            np.testing.assert_allclose(found, expected, rtol=1e-6)
            assert np.isfinite(expected).all()
