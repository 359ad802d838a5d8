"""An operation that fails inside of a step: the error names it, as that of one device does."""

from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfpar

pytestmark = pytest.mark.usefixtures("logical_cpus")

NUM_TOKENS, NUM_CLASSES, NUM_EXAMPLES, BATCH = 10, 5, 64, 16

STRATEGIES: dict[str, Callable[[], tfpar.Strategy]] = {
    "one device": tfpar.SingleDevice,
    "replicas": lambda: tfpar.Mirrored(2),
    "pipeline": lambda: tfpar.Pipeline(2, num_microbatches=4),
}


def build() -> keras.Model:
    layers = keras.layers
    tokens = keras.Input((8,), dtype="int32")
    values = layers.Flatten()(layers.Embedding(NUM_TOKENS, 4)(tokens))
    for _ in range(3):
        values = layers.Dense(8, activation="relu")(values)
    model = keras.Model(tokens, layers.Dense(NUM_CLASSES)(values))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def examples() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.arange(NUM_EXAMPLES * 8).reshape(NUM_EXAMPLES, 8) % NUM_TOKENS
    return tokens.astype("int32"), (np.arange(NUM_EXAMPLES) % NUM_CLASSES).astype("int32")


@pytest.fixture(params=STRATEGIES.values(), ids=STRATEGIES.keys())
def trainer(request: pytest.FixtureRequest) -> tfpar.Trainer:
    return tfpar.Trainer(build, request.param(), seed=0)


@pytest.mark.few(2)
def test_a_label_out_of_range_is_named_also_in_a_later_step_of_a_call(trainer: tfpar.Trainer) -> None:
    tokens, labels = examples()
    labels[NUM_EXAMPLES - 3] = 77
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="^The labels of a sparse cross-entropy are the numbers of classes, from 0 to 4 for a last layer of 5 "
        r"units, received a label value of 77 which is outside the valid range\. Number the classes from 0, or give "
        r"the last layer one unit for each class\.$",
    ):
        trainer.fit(tokens, labels, batch_size=BATCH, shuffle=False, steps_per_call=4, verbose=0)


def test_a_label_out_of_range_is_named_where_shards_divide_the_classes() -> None:
    def build_wide() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    labels = np.arange(16)
    labels[9] = 64
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"^The labels of .* 0 to 63 .* a label value of 64"):
        tfpar.Trainer(build_wide, tfpar.TensorParallel(2)).fit(np.ones((16, 4)), labels, batch_size=8, verbose=0)


@pytest.mark.few(1)
def test_an_index_out_of_range_is_named_in_each_method(trainer: tfpar.Trainer) -> None:
    tokens, labels = examples()
    wrong = tokens.copy()
    wrong[40, 3] = 77
    trainer.fit(tokens, labels, batch_size=BATCH, verbose=0)
    for call in (
        lambda: trainer.fit(wrong, labels, batch_size=BATCH, verbose=0),
        lambda: trainer.evaluate(wrong, labels, batch_size=BATCH, verbose=0),
        lambda: trainer.predict(wrong, batch_size=BATCH, verbose=0),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"= 77 is not in \[0, 10\)"):
            call()


def test_the_failing_batch_of_a_generator_is_run_again() -> None:
    tokens, labels = examples()

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first in range(0, NUM_EXAMPLES, BATCH):
            label = labels[first : first + BATCH].copy()
            label[3] = 50 + first if first == 2 * BATCH else label[3]
            yield tokens[first : first + BATCH], label

    trainer = tfpar.Trainer(build, STRATEGIES["pipeline"](), seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 82"):
        trainer.fit(batches(), steps_per_epoch=4, verbose=0)


def test_the_search_for_the_error_changes_no_weight() -> None:
    tokens, labels = examples()
    trainer = tfpar.Trainer(build, STRATEGIES["pipeline"](), seed=0)
    trainer.fit(tokens, labels, batch_size=BATCH, verbose=0)
    before = trainer.model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="label value of 77"):
        trainer.fit(tokens[:BATCH], np.full(BATCH, 77), batch_size=BATCH, verbose=0)
    for weight, earlier in zip(trainer.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, earlier)


class SumToOne(keras.layers.Layer):
    """Rows that must sum to 1."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_near(tf.reduce_sum(inputs, -1), tf.ones([tf.shape(inputs)[0]]), message="no sum of 1")
        return 2.0 * inputs


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["replicas", "pipeline"])
def test_a_layer_may_assert_something_of_its_inputs(kind: str) -> None:
    def build_asserting() -> keras.Model:
        layers = keras.layers
        hidden = [layers.Dense(4, activation="tanh") for _ in range(2)]
        model = keras.Sequential([keras.Input((4,)), SumToOne(), *hidden, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    rows = np.random.default_rng(0).random((32, 4)).astype("float32")
    rows /= rows.sum(-1, keepdims=True)
    found = [
        tfpar.Trainer(build_asserting, STRATEGIES[name](), seed=0).fit(rows, rows[:, :1], batch_size=8, verbose=0)
        for name in ("one device", kind)
    ]
    np.testing.assert_allclose(found[1].history["loss"], found[0].history["loss"], rtol=1e-6)
    trainer = tfpar.Trainer(build_asserting, STRATEGIES[kind](), seed=0)
    with pytest.raises(ValueError, match=r"'sum_to_one\w*' does not run on 2, 3 and 5: no sum of 1"):
        trainer.fit(2.0 * rows, rows[:, :1], batch_size=8, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_call_inside_of_a_function_is_refused(method: str) -> None:
    tokens, labels = examples()
    trainer = tfpar.Trainer(build, tfpar.SingleDevice(), seed=0)
    data = (tokens,) if method == "predict" else (tokens, labels)
    with pytest.raises(RuntimeError, match=rf"^{method} runs steps from Python, .*inside of a tf.function or a graph"):
        tf.function(lambda: getattr(trainer, method)(*data, verbose=0), autograph=False)()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["replicas", "pipeline"])
def test_fit_inside_of_a_tape_is_refused_and_runs_where_the_tape_stops(kind: str) -> None:
    tokens, labels = examples()
    trainer = tfpar.Trainer(build, STRATEGIES[kind](), seed=0)
    with tf.GradientTape() as tape:
        with pytest.raises(RuntimeError, match=r"^fit was called inside of a tf.GradientTape, .*tape.stop_recording"):
            trainer.fit(tokens, labels, verbose=0)
        with tape.stop_recording():
            trainer.fit(tokens, labels, verbose=0)
        if not trainer.strategy.engine.cuts_model:
            trainer.predict(tokens, verbose=0)
