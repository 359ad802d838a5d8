"""Models, data, trainers and comparisons for tests with several workers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfpar
from tests.reduction import test_indexed_slices as slices
from tests.support import input_cases, parity_cases, small
from tests.support.extent import sampled
from tfpar.parity import relative_difference

EXACT = 1e-9  # in float64


class Trained(NamedTuple):
    """The results of a training: its history, then weights and optimizer."""

    history: dict[str, list[float]]
    state: list[np.ndarray]


def state(model: keras.Model) -> list[np.ndarray]:
    """Return the weights and the optimizer's variables; metrics differ between workers."""
    return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def rows_of_all() -> keras.Model:
    """Return a model whose lookups depend on all examples of a part."""
    model = slices.of_positions(slices.EveryOtherOfAll)
    model.compile("sgd", model.loss)
    return model


def keras_fit(dataset: Any, build: Any = small.build_model, **fit: Any) -> Trained:
    """Return the results of Keras' own `fit` on one device."""
    keras.utils.set_random_seed(0)
    model = build()
    history = model.fit(dataset, **{"epochs": 2, "verbose": 0, **fit}).history
    return Trained(history, state(model))


@functools.cache
def plain_fit() -> Trained:
    """Return the results of Keras for the small model and its data, in float64."""
    return keras_fit(small.data())


def assert_same(actual: Any, expected: Any, tolerance: float = EXACT, name: str = "") -> None:
    """Assert the same structure, and arrays that differ by at most the tolerance, relative to their largest value."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key in expected:
            assert_same(actual[key], expected[key], tolerance, f"{name} {key}")
    elif isinstance(expected, list | tuple) and not all(isinstance(value, float) for value in expected):
        assert len(actual) == len(expected), name
        for index, values in enumerate(zip(actual, expected, strict=True)):
            assert_same(*values, tolerance, f"{name} {index}")
    elif np.asarray(expected).dtype == object:
        np.testing.assert_array_equal(actual, expected, name)
    else:
        assert np.shape(actual) == np.shape(expected), f"{name}: {actual} instead of {expected}"
        difference = relative_difference(np.array(actual), np.array(expected))
        assert difference <= tolerance, f"{name} differs by {difference:.2g}: {actual} instead of {expected}"


plain_sgd = parity_cases.classifier(lambda: keras.optimizers.SGD(0.1))
compiled_by_xla = parity_cases.classifier(jit_compile=True)
eager = parity_cases.classifier(run_eagerly=True)


def mixed_precision() -> keras.Model:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return small.build_model()
    finally:
        keras.config.set_dtype_policy(policy)


def of_width(units: int) -> Callable[[], keras.Model]:
    return parity_cases.classifier(layers=lambda: [keras.layers.Dense(units)])


def failing_after(num_layers: int, fails: bool) -> Callable[[], keras.Model]:
    """A model function that raises after it has built some layers."""

    def build() -> keras.Model:
        for _ in range(num_layers):
            keras.layers.Dense(3).build((8, 4))
        if fails:
            raise KeyError("vocabulary")
        return small.build_model()

    return build


def equal_parts() -> tf.data.Dataset:
    """Ten batches of 8."""
    return parity_cases.batches(80, 8)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return parity_cases.inputs(61), parity_cases.labels(61)


INPUTS = sampled(
    ("PyDataset, two threads", "generator, too many steps", "ragged", "sparse dataset", "None in a list"),
    of_ci=("PyDataset, two threads", "ragged"),
)


def with_input(name: str, strategy: tfpar.Strategy, seed: int) -> tuple[dict[str, list[float]], list[np.ndarray]]:
    """Train on one of the kinds of input of fit; `seed` is that of this worker's Python.

    Keras 3.15 counts an update too many where it runs into the end of the data, so only the weights are compared.
    """
    case = input_cases.CASES[name]
    trainer = tfpar.Trainer(case.model, strategy, seed=0)
    random.seed(seed)
    history = trainer.fit(**case.arguments(), verbose=0).history
    return history, trainer.model.get_weights()


def fine_tuned(model: keras.Model, fit: Callable[..., keras.callbacks.History]) -> Trained:
    """Compile a trained model again outside of any scope, train it, and train it once more with another rate."""
    model.compile(optimizer := keras.optimizers.Adam(0.01), model.loss, metrics=["accuracy"])
    history = fit(small.data(), verbose=0).history
    optimizer.learning_rate = 0.1
    return Trained({**history, "again": fit(small.data(), verbose=0).history["loss"]}, state(model))


def not_finite() -> tf.data.Dataset:
    """Return data with an infinity in the third batch, in a row of the first worker only."""
    features = parity_cases.inputs(40)
    features[17] = np.inf
    return tf.data.Dataset.from_tensor_slices((features, parity_cases.labels(40))).batch(8)


# --- data that workers read in other orders

UNKNOWN_ORDER = (
    "All workers must read the same global batches, of which each takes its part, and whether they do is unknown: the "
    "batches differ, and random operations may change every tensor of them, as in mixup. Read in one order: with a "
    "seed for shuffle and sample_from_datasets, and with deterministic=True for interleave, map and tf.data.Options."
)


def _late(row: tf.Tensor, is_late: tf.Tensor) -> tf.Tensor:
    """Return a number, after a second where it is late; without Python code, which may draw random numbers."""
    start = tf.timestamp()
    end = start + tf.where(is_late, tf.ones_like(start), 0.0)
    (now,) = tf.while_loop(lambda now: now < end, lambda now: (tf.timestamp(),), (start,))
    return row + tf.cast(now < 0, row.dtype)


def _in_rows(order: Any) -> tf.data.Dataset:
    """Return single examples in an order of their numbers."""
    features, labels = parity_cases.inputs(64), parity_cases.labels(64)
    numbers = tf.data.Dataset.from_tensor_slices(np.asarray(order)) if isinstance(order, list) else order
    return numbers.map(lambda number: (tf.gather(features, number), tf.gather(labels, number)))


def _noisy(features: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return features + tf.random.normal(tf.shape(features), dtype=features.dtype), labels


def other_tail(rank: int) -> tf.data.Dataset:
    """Return eight batches, of which the last five are in another order on each worker."""
    tail = np.random.default_rng(rank).permutation(np.arange(24, 64))
    return _in_rows([*range(24), *tail]).batch(8)


def other_orders(rank: int) -> dict[str, tf.data.Dataset]:
    """Return datasets whose order differs between workers, by the reason."""

    def file(number: tf.Tensor) -> tf.data.Dataset:
        rows = tf.data.Dataset.range(32 * number, 32 * number + 32)
        return rows.map(lambda row: _late(row, (number == rank) & (row % 32 == 8)))

    numbers = tf.data.Dataset.range(2).interleave(
        file, cycle_length=2, block_length=8, num_parallel_calls=2, deterministic=False
    )
    unordered = tf.data.Options()
    unordered.deterministic = False
    late = tf.data.Dataset.range(64).map(lambda row: _late(row, row == 20 + rank), num_parallel_calls=2)
    if rank == 1:
        tf.random.uniform([1])
    halves = [tf.data.Dataset.range(start, start + 32) for start in (0, 32)]
    mixed = tf.data.Dataset.sample_from_datasets([_in_rows(half) for half in halves])
    return {
        "a slow file": _in_rows(numbers).batch(8),
        "a slow row": _in_rows(late).batch(8).with_options(unordered),
        "no seed": mixed.batch(8),
        "no seed and random inputs": mixed.map(_noisy).batch(8),
    }


def drawn_batches(rank: int) -> dict[str, tf.data.Dataset]:
    """Return datasets in one order, with random numbers that are other ones on each worker or the same."""

    def mix(features: tf.Tensor, labels: tf.Tensor, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
        share = tf.random.uniform([], dtype=features.dtype, seed=seed)
        labels = tf.one_hot(labels, parity_cases.NUM_CLASSES, dtype=features.dtype)
        return share * features + (1 - share) * features[::-1], share * labels + (1 - share) * labels[::-1]

    def fixed(*batch: Any) -> Any:
        return tuple(tf.argmax(part, -1) if part is batch[1] else part for part in batch)

    return {
        "random inputs": small.data().map(
            lambda x, y: (x + tf.random.normal(tf.shape(x), 0, 1, x.dtype, seed=rank), y)
        ),
        "random targets": small.data().map(lambda x, y: fixed(*mix(x, y, seed=rank))),
        "random targets with one seed": small.data().map(lambda x, y: fixed(*mix(x, y, seed=3))),
    }


# --- callbacks


def deciding(monitor: str = "val_loss") -> list[keras.callbacks.Callback]:
    """Return callbacks that lower the learning rate and end the training before its last epoch."""
    return [
        keras.callbacks.ReduceLROnPlateau(monitor, patience=1, factor=0.5, mode="min", min_delta=0.02),
        keras.callbacks.EarlyStopping(monitor, patience=3, mode="min", min_delta=0.02, restore_best_weights=True),
    ]


class AddsDistance(keras.callbacks.Callback):
    """Adds the entry `distance` to the logs, and changes `val_loss`.

    Args:
        adds: Whether it does on this worker.
    """

    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self._adds = adds

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._adds and logs is not None:
            logs["distance"] = np.float32(abs(epoch - 2) + 1)
            logs["val_loss"] = 2 * logs["val_loss"]


class AddsDistanceOnChief(AddsDistance):
    """The same, as a callback that runs on the chief only."""

    chief_only = True


class Stop(keras.callbacks.Callback):
    """Stop the training at a step of the first epoch, or after an epoch."""

    def __init__(self, is_mine: bool, at_step: int | None = None, at_epoch: int | None = None) -> None:
        super().__init__()
        self.single_batches = at_step is not None
        self._is_mine, self._at_step, self._at_epoch = is_mine, at_step, at_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_mine and batch + 1 == self._at_step:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._is_mine and epoch == self._at_epoch:
            self.model.stop_training = True


ALL_FAILING_HOOKS = (
    *(("train", name) for name in ("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end")),
    *(("train", name) for name in ("on_test_end", "on_epoch_end", "on_train_end")),
    *(("test", name) for name in ("on_test_begin", "on_test_batch_end")),
    *(("predict", name) for name in ("on_predict_begin", "on_predict_batch_end", "on_predict_end")),
)
FAILING_HOOKS = sampled(
    ALL_FAILING_HOOKS,
    of_ci=(
        *(("train", name) for name in ("on_train_begin", "on_train_batch_end", "on_epoch_end")),
        *(("test", "on_test_batch_end"), ("predict", "on_predict_end")),
    ),
)


class Fails(keras.callbacks.Callback):
    """Raises an error in one of its hooks; in none without a name."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        if hook:
            setattr(self, hook, self._fail)

    def _fail(self, *arguments: Any, **settings: Any) -> None:
        raise KeyError("width")


class Interrupt(keras.callbacks.Callback):
    """Interrupt a trainer at a step of the whole training."""

    single_batches = True

    def __init__(self, trainer: tfpar.Trainer | None, at_step: int) -> None:
        super().__init__()
        self._trainer, self._at_step = trainer, at_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._trainer is not None and int(self.model.optimizer.iterations.numpy()) == self._at_step:
            self._trainer.interrupt()


class Reused:
    """A trainer that starts again from its initial state, so that one compilation serves many trainings.

    Args:
        strategy: The strategy of the trainer.
        build: Its model function.
    """

    def __init__(self, strategy: tfpar.Strategy, build: Callable[[], keras.Model] = small.build_model) -> None:
        self._trainer = tfpar.Trainer(build, strategy, seed=0)
        self._again = small.Again(self._trainer.model)

    def initial(self) -> tfpar.Trainer:
        """Return the trainer, with weights, optimizer and seeds of a new one."""
        keras.utils.set_random_seed(0)
        self._again.reset()
        return self._trainer


@functools.cache
def one_device_each() -> tfpar.MultiWorker:
    """Return a strategy of one device of each worker."""
    return tfpar.MultiWorker(["CPU:0"])


@functools.cache
def two_devices_each() -> tfpar.MultiWorker:
    """Return a strategy of two devices of each worker."""
    return tfpar.MultiWorker(["CPU:0", "CPU:1"])


@functools.cache
def _reused(dtype: str) -> Reused:
    return Reused(one_device_each())


def initial() -> tfpar.Trainer:
    """Return the small model's trainer on one device of each worker, in its initial state."""
    return _reused(keras.config.floatx()).initial()


def trained(trainer: tfpar.Trainer, dataset: Any, **fit: Any) -> Trained:
    """Train, and return the history and the state."""
    history = trainer.fit(dataset, **{"epochs": 2, "verbose": 0, **fit}).history
    return Trained(history, state(trainer.model))


# --- parameter averaging


def averaged_by_hand(average_optimizer: bool) -> list[np.ndarray]:
    """Two models, each trained by Keras on its half of every batch, averaged every four steps and after an epoch."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(small.build_model())
        models[-1].optimizer.build(models[-1].trainable_variables)
    for _ in range(2):
        for step, (features, labels) in enumerate(equal_parts()):
            for model, half in zip(models, (slice(0, 4), slice(4, 8)), strict=True):
                model.train_on_batch(features[half], labels[half])
            if step in (3, 7, 9):
                average([model.trainable_variables for model in models])
            if step in (3, 7, 9) and average_optimizer:
                average([model.optimizer.variables[2:] for model in models])
    return state(models[0])


def average(copies: list[list[keras.Variable]]) -> None:
    for variables in zip(*copies, strict=True):
        mean = sum(variable.numpy() for variable in variables) / len(variables)
        for variable in variables:
            variable.assign(mean)


# --- evaluate and predict


class Outputs(keras.layers.Layer):
    """Several outputs, of several types."""

    def call(self, features: Any) -> dict[str, Any]:
        return {
            "scores": features,
            "kind": keras.ops.argmax(features, axis=-1),
            "is_large": keras.ops.max(features, axis=-1) > 0.5,
            "table": keras.ops.stack([features, -features], axis=1),
            "texts": tf.gather(tf.constant(["", "nul\0", "größer"]), tf.cast(features > 0, "int32") + 1),
            "text": tf.gather(tf.constant(["", "nul\0", "größer"]), keras.ops.argmax(features, axis=-1)),
        }


def many_outputs() -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,))
    model = keras.Model(features, Outputs()(keras.layers.Dense(3)(features)))
    model.compile(loss={"scores": "mse"})
    return model


def evaluate_and_predict(strategy: tfpar.Strategy | None) -> dict[str, Any]:
    """Return the results of `evaluate` and `predict` under a strategy; of Keras itself without one."""
    if strategy is None:
        keras.utils.set_random_seed(0)
        trainer: Any = small.build_model()
        keras.utils.set_random_seed(0)
        outputs = many_outputs()
    else:
        trainer = tfpar.Trainer(small.build_model, strategy, seed=0)
        outputs = tfpar.Trainer(many_outputs, strategy, seed=0)
    features, labels = arrays()
    weighted = parity_cases.weighted(29, 8)
    calls: dict[str, Callable[[], Any]] = {
        "evaluate with weights": lambda: trainer.evaluate(weighted, verbose=0),
        "evaluate 1 row": lambda: trainer.evaluate(features[:1], labels[:1], verbose=0),
        "predict": lambda: trainer.predict(small.data(), verbose=0),
        "predict 3 rows": lambda: trainer.predict(features[:3], verbose=0),
        "predict many outputs": lambda: outputs.predict(features[:21], batch_size=5, verbose=0),
    }
    of_ci = ("evaluate with weights", "predict 3 rows", "predict many outputs")
    return {name: calls[name]() for name in sampled(calls, of_ci)}


# --- shards


def _rows(start: int, stop: int) -> tf.data.Dataset:
    features, labels = parity_cases.inputs(80), parity_cases.labels(80)
    return tf.data.Dataset.from_tensor_slices((features[start:stop], labels[start:stop]))


def _files(*sizes: int) -> tfpar.data.Sharded:
    """Return data with one file per shard; the name of a file is the range of its rows."""
    ends = np.cumsum(sizes)
    names = [f"{end - size},{end}" for size, end in zip(sizes, ends, strict=True)]
    features, labels = parity_cases.inputs(80), parity_cases.labels(80)

    def read_file(name: tf.Tensor) -> tf.data.Dataset:
        start, stop = tf.unstack(tf.strings.to_number(tf.strings.split(name, ","), tf.int64), num=2)
        rows = tf.data.Dataset.range(start, stop)
        return rows.map(lambda row: (tf.constant(features)[row], tf.constant(labels)[row]))

    return tfpar.data.by_file(names, read_file, global_batch_size=8, num_shards=len(sizes))


SHARDED: dict[str, Callable[[], Any]] = {
    "by example, uneven": lambda: tfpar.data.by_example(
        _rows(0, 73), global_batch_size=8, num_shards=4, shuffle_buffer=40, seed=5
    ),
    "by file, uneven": lambda: _files(17, 9, 12, 15),
    "by file, worker 1 ends first": lambda: _files(20, 12, 3, 0),
    "by file, worker 0 has nothing": lambda: _files(0, 0, 11, 6),
}


# Without examples of its own, the chief finds the loss decomposition with an example of another worker.
adds_loss = parity_cases.classifier(layers=lambda: [parity_cases.AddsLoss()])


def sharded_model(kind: str) -> Callable[[], keras.Model]:
    return adds_loss if kind.endswith("nothing") else small.build_model


def with_shards(kind: str, trainer: tfpar.Trainer) -> tuple[Trained, Any, Any]:
    """Train, evaluate and predict with data in shards."""
    history = trainer.fit(SHARDED[kind](), epochs=2, verbose=0, validation_data=SHARDED[kind]()).history
    trained = Trained(history, state(trainer.model))
    evaluated = trainer.evaluate(SHARDED[kind](), verbose=0)
    return trained, evaluated, trainer.predict(SHARDED[kind](), verbose=0)


def normalized() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(5), keras.layers.BatchNormalization(synchronized=True)]
    )
    model.add(keras.layers.Dense(3))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
