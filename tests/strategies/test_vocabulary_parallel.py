"""The loss and the metrics of a last layer in shards: those of one device, and no device has all scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tests.properties.test_parity import computing_in
from tfpar._compat.variables.sharded_memory import is_sharded
from tfpar.reduction.vocabulary import gathered_classes

pytestmark = pytest.mark.usefixtures("logical_cpus")

TOKENS, LENGTH, CLASSES = 9, 5, 11
sparse, dense = keras.losses.SparseCategoricalCrossentropy, keras.losses.CategoricalCrossentropy
accuracy, crossentropy = keras.metrics.SparseCategoricalAccuracy, keras.metrics.SparseCategoricalCrossentropy


def language_model(loss: Any, metrics: list[Any], activation: str | None = None, last: Any = None) -> keras.Model:
    tokens = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Embedding(TOKENS, 6, mask_zero=True)(tokens)
    hidden = keras.layers.LayerNormalization()(hidden)
    # Large weights: probabilities that Keras would clip.
    scale = keras.initializers.RandomNormal(stddev=10.0)
    outputs = keras.layers.Dense(CLASSES, activation, kernel_initializer=scale, name="classes")(hidden)
    model = keras.Model(tokens, outputs if last is None else last(outputs))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, weighted_metrics=metrics)
    return model


def tied(**options: Any) -> keras.Model:
    """The table of the tokens is the kernel of the last layer."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(CLASSES, 6, mask_zero=True, name="table", **options)
    hidden = keras.layers.LayerNormalization()(table(tokens))
    hidden = keras.layers.Masking()(keras.layers.Dense(6, "tanh")(hidden))
    model = keras.Model(tokens, table(hidden, reverse=True))
    model.compile(keras.optimizers.Adam(0.05), sparse(from_logits=True), weighted_metrics=[accuracy()])
    return model


def own_loss(labels: Any, outputs: Any) -> Any:
    return keras.ops.logsumexp(outputs, -1) - keras.ops.max(outputs, -1) + 0 * keras.ops.cast(labels, outputs.dtype)


CASES: dict[str, Callable[[], keras.Model]] = {
    "sparse": lambda: language_model(sparse(from_logits=True), [accuracy(), crossentropy(from_logits=True)]),
    "ignore_class, summed": lambda: language_model(
        sparse(from_logits=True, ignore_class=2, reduction="sum"), [crossentropy(from_logits=True, ignore_class=2)]
    ),
    "softmax": lambda: language_model(sparse(), [accuracy(), crossentropy()], "softmax"),
    "softmax as a layer": lambda: language_model(sparse(), [accuracy()], last=keras.layers.Activation("softmax")),
    "tied": tied,
    "soft cap, not tied": lambda: tied(tie_weights=False, logit_soft_cap=3.0),
    "dense, label_smoothing": lambda: language_model(
        dense(from_logits=True, label_smoothing=0.1, reduction="mean_with_sample_weight"),
        [keras.metrics.CategoricalAccuracy()],
    ),
}


OF_ONE_TABLE = ("tied", "soft cap, not tied")  # what several stages read stays whole


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with computing_in("float64"):
        yield


def batches(name: str) -> tf.data.Dataset:
    """Uneven batches with sample weights, and zeros that the mask leaves out."""
    random = np.random.default_rng(0)
    labels: Any = random.integers(0, CLASSES, (13, LENGTH))
    if name.startswith("dense"):
        labels = np.eye(CLASSES)[labels]
    arrays = random.integers(0, TOKENS, (13, LENGTH)), labels, random.uniform(size=(13, LENGTH))
    return tf.data.Dataset.from_tensor_slices(arrays).batch(5)


def trained(build: Callable[[], keras.Model], name: str, strategy: tfpar.Strategy) -> Any:
    trainer = tfpar.Trainer(build, strategy, seed=0)
    history = trainer.fit(batches(name), epochs=2, verbose=0).history
    logs = trainer.evaluate(batches(name), verbose=0, return_dict=True)
    return history, logs, [variable.numpy() for variable in trainer.model.weights], trainer


def assert_equal(found: Any, expected: Any) -> None:
    keras.tree.map_structure(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), found[:3], expected[:3]
    )


STRATEGIES = {
    "shards": lambda: tfpar.TensorParallel(3),
    "replicas of shards": lambda: tfpar.Hybrid(tfpar.TensorParallel(2), num_replicas=2),
    "stages of shards": lambda: tfpar.Pipeline(2, 3, num_shards=2),
    "loop over stages of shards": lambda: tfpar.Pipeline(2, 8, "zero_bubble", num_shards=2),
    "replicas of a stage of shards": lambda: tfpar.Hybrid(tfpar.Pipeline(1, 2, num_shards=2), num_replicas=2),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "shards") for name in CASES),
        ("softmax", "replicas of shards"),
        *((name, "stages of shards") for name in CASES if name not in OF_ONE_TABLE),
        *((name, "replicas of a stage of shards") for name in CASES),
        ("softmax", "loop over stages of shards"),
    ],
)
def test_equals_one_device_and_never_gathers(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(CASES[name], name, tfpar.SingleDevice())
    note = gathered_classes.note_shards

    def spoilt(whole: tf.Tensor, shards: Any) -> tf.Tensor:
        return note(whole * np.nan if whole.shape[-1] == CLASSES else whole, shards)

    monkeypatch.setattr(gathered_classes, "note_shards", spoilt)
    found = trained(CASES[name], name, STRATEGIES[strategy]())
    sharded = {weight.name: weight.value.sizes for weight in found[3].model.weights if is_sharded(weight)}
    sizes = (4, 4, 3) if strategy == "shards" else (6, 5)
    assert sizes in sharded.values()
    if name == "tied":
        assert sharded["embeddings"] == sizes
    assert_equal(found, expected)


def test_an_own_loss_gathers() -> None:
    def build() -> keras.Model:
        return language_model(own_loss, [accuracy()])

    found = trained(build, "own", tfpar.TensorParallel(2))
    assert_equal(found, trained(build, "own", tfpar.SingleDevice()))
    labels = batches("own").map(lambda tokens, *_: tokens)
    one = tfpar.Trainer(build, tfpar.SingleDevice(), seed=0)
    one.model.set_weights(found[2])
    np.testing.assert_allclose(found[3].predict(labels, verbose=0), one.predict(labels, verbose=0), rtol=1e-9)
