"""The inputs of Keras' fit other than a `tf.data.Dataset` of dense batches, each case a model and its data."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.sparse
import tensorflow as tf

from tests.support import parity_cases

NUM_EXAMPLES, BATCH_SIZE, NUM_BATCHES = 37, 8, 5
FEATURES, LABELS = parity_cases.inputs(NUM_EXAMPLES), parity_cases.labels(NUM_EXAMPLES)
WEIGHTS = np.linspace(0.0, 2.0, NUM_EXAMPLES)
MOSTLY_ZERO = np.where(np.abs(FEATURES) > 0.5, FEATURES, 0.0)


class Rows(keras.utils.PyDataset):
    """Batches of 8, the last of 5, that note how they are called.

    Args:
        arrays: What is cut into batches: a structure of arrays, or None.
        shuffles_itself: Whether the order changes at the end of every epoch.
        endless: Whether the number of batches is unknown.
    """

    def __init__(self, arrays: Any = None, shuffles_itself: bool = False, endless: bool = False, **options: Any):
        super().__init__(**options)
        self._arrays = (FEATURES, LABELS) if arrays is None else arrays
        self._shuffles_itself, self._endless = shuffles_itself, endless
        self._order = np.arange(NUM_EXAMPLES)
        self.calls: list[Any] = []

    @property
    def num_batches(self) -> int | None:
        return None if self._endless else NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        self.calls.append(index)
        rows = self._order[index % NUM_BATCHES * BATCH_SIZE :][:BATCH_SIZE]
        return keras.tree.map_structure(lambda array: None if array is None else array[rows], self._arrays)

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        if self._shuffles_itself:
            np.random.shuffle(self._order)


def generate(arrays: Any = None, times: int = 1) -> Iterator[Any]:
    rows = Rows(arrays)
    for _ in range(times):
        yield from (rows[index] for index in range(NUM_BATCHES))


def dataset(*arrays: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH_SIZE)


def with_none() -> tf.data.Dataset:
    return dataset(FEATURES, LABELS).map(lambda features, labels: ((features, None), labels))


def sparse() -> tf.SparseTensor:
    return tf.sparse.from_dense(MOSTLY_ZERO)


def tokens() -> tf.RaggedTensor:
    rng = np.random.default_rng(0)
    return tf.ragged.constant([rng.integers(1, 11, rng.integers(1, 6)) for _ in range(NUM_EXAMPLES)], dtype="int32")


def frame() -> pd.DataFrame:
    return pd.DataFrame(FEATURES.astype("float64"), columns=list("abcde"))


def loader(**options: Any) -> Any:
    import torch

    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.tensor(FEATURES), torch.tensor(LABELS))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE, **options)


def tensors() -> dict[str, Any]:
    import torch

    return {"x": torch.tensor(FEATURES), "y": torch.tensor(LABELS)}


# --- models, each for its kind of input


def _compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def dense_model() -> keras.Model:
    return parity_cases.classifier()()


def frame_model() -> keras.Model:
    """A model for labels with two axes, for which Keras 3.15 does not trace the functions of a model again."""
    return dense_model()


def sparse_model() -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,), sparse=True)
    hidden = keras.layers.Dense(4, "tanh")(features)
    return _compiled(keras.Model(features, keras.layers.Dense(parity_cases.NUM_CLASSES)(hidden)))


class OfRows(keras.layers.Layer):
    """A layer for sparse or for ragged rows only."""

    def call(self, rows: Any) -> Any:
        if isinstance(rows, tf.SparseTensor):
            return tf.sparse.to_dense(rows.with_values(rows.values * 2))
        return rows.with_values(rows.values % 10 + 1).to_tensor(shape=[None, 5])

    def compute_output_shape(self, shape: Any) -> Any:
        return shape[0], 5


def own_sparse_model() -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,), sparse=True)
    return _compiled(keras.Model(features, keras.layers.Dense(parity_cases.NUM_CLASSES)(OfRows()(features))))


def own_ragged_model() -> keras.Model:
    embedded = [OfRows(), keras.layers.Embedding(11, 4), keras.layers.Flatten()]
    return _compiled(keras.Sequential([*embedded, keras.layers.Dense(parity_cases.NUM_CLASSES)]))


def ragged_model() -> keras.Model:
    pooled = [keras.layers.Embedding(11, 4), keras.layers.GlobalAveragePooling1D()]
    return _compiled(keras.Sequential([*pooled, keras.layers.Dense(parity_cases.NUM_CLASSES)]))


class AddIfThere(keras.layers.Layer):
    """The sum of two inputs, of which the second may be absent."""

    def call(self, features: Any, more: Any = None) -> Any:
        return features if more is None else features + more

    def compute_output_shape(self, features_shape: Any, more_shape: Any = None) -> Any:
        return features_shape


def optional_model() -> keras.Model:
    features = keras.Input((parity_cases.NUM_FEATURES,), name="features")
    more = keras.Input((parity_cases.NUM_FEATURES,), name="more", optional=True)
    hidden = keras.layers.Dense(4, "tanh")(AddIfThere()(features, more))
    return _compiled(keras.Model([features, more], keras.layers.Dense(parity_cases.NUM_CLASSES)(hidden)))


def optional_by_name() -> keras.Model:
    """In the order of the names the optional input comes first."""
    features = keras.Input((parity_cases.NUM_FEATURES,), name="features")
    added = keras.Input((parity_cases.NUM_FEATURES,), name="added", optional=True)
    hidden = keras.layers.Dense(4, "tanh")(AddIfThere()(features, added))
    inputs = {"added": added, "features": features}
    return _compiled(keras.Model(inputs, keras.layers.Dense(parity_cases.NUM_CLASSES)(hidden)))


# --- cases


class Case(NamedTuple):
    """One call of fit: the model, and the arguments, which are created for each call.

    `keras_takes` is False where Keras 3.15 fails on it.
    """

    model: Callable[[], keras.Model]
    arguments: Callable[[], dict[str, Any]]
    keras_takes: bool = True


def _dense(**arguments: Any) -> Case:
    """A case of the dense model; values that are functions are called for each fit."""
    return Case(dense_model, lambda: {name: value() if callable(value) else value for name, value in arguments.items()})


def _arrays(model: Callable[[], keras.Model], x: Any, **more: Any) -> Case:
    common = {"y": LABELS, "batch_size": BATCH_SIZE, "shuffle": False, "epochs": 2}
    return Case(model, lambda: {"x": x() if callable(x) else x, **common, **more})


CASES: dict[str, Case] = {
    "PyDataset": _dense(x=Rows, epochs=3),
    "PyDataset in order": _dense(x=Rows, epochs=2, shuffle=False),
    "PyDataset of lists": _dense(x=lambda: Rows([FEATURES, LABELS]), epochs=2),
    "PyDataset with weights": _dense(x=lambda: Rows((FEATURES, LABELS, WEIGHTS)), epochs=2),
    "PyDataset, class weight": _dense(x=Rows, epochs=2, class_weight={0: 0.5, 2: 3.0}),
    "PyDataset, two threads": _dense(x=lambda: Rows(workers=2), epochs=2),
    "PyDataset, two processes": _dense(x=lambda: Rows(workers=2, use_multiprocessing=True, max_queue_size=2), epochs=2),
    "PyDataset that shuffles itself": _dense(x=lambda: Rows(shuffles_itself=True), epochs=3, shuffle=False),
    "PyDataset, steps": _dense(x=Rows, epochs=4, steps_per_epoch=2),
    "PyDataset, two threads, steps": _dense(x=lambda: Rows(workers=2), epochs=4, steps_per_epoch=3, shuffle=False),
    "PyDataset, too many steps": _dense(x=Rows, epochs=2, steps_per_epoch=7),
    "endless PyDataset": _dense(x=lambda: Rows(endless=True), epochs=2, steps_per_epoch=4),
    "endless PyDataset, two threads": _dense(x=lambda: Rows(endless=True, workers=2), epochs=2, steps_per_epoch=4),
    "PyDataset validates": _dense(x=Rows, epochs=2, validation_data=lambda: Rows(workers=2)),
    "PyDataset validates in steps": _dense(x=Rows, epochs=2, validation_data=Rows, validation_steps=2),
    "generator": _dense(x=lambda: generate(times=3), epochs=3, steps_per_epoch=5),
    "generator, steps across": _dense(x=lambda: generate(times=2), epochs=3, steps_per_epoch=3),
    "generator with weights": _dense(x=lambda: generate((FEATURES, LABELS, WEIGHTS))),
    "generator that ends": _dense(x=generate, epochs=2),
    "generator, too many steps": _dense(x=generate, epochs=3, steps_per_epoch=4),
    "generator validates": _dense(x=Rows, validation_data=generate, validation_steps=3),
    "DataLoader": _dense(x=loader, epochs=2),
    "DataLoader, shuffled": _dense(x=lambda: loader(shuffle=True), epochs=3),
    "torch tensors": Case(dense_model, lambda: {**tensors(), "batch_size": 8, "shuffle": False}),
    "pandas": _arrays(frame_model, frame, y=pd.Series(LABELS), sample_weight=pd.Series(WEIGHTS)),
    "pandas, split": _arrays(frame_model, frame, y=pd.DataFrame({"label": LABELS}), validation_split=0.3),
    "Arrow table": _arrays(dense_model, lambda: pa.Table.from_pandas(frame())),
    "lists of arrays": _arrays(dense_model, [FEATURES], y=[LABELS]),
    "float64 with weights": _arrays(dense_model, FEATURES.astype("float64"), sample_weight=WEIGHTS),
    "steps make the batch size": _dense(x=FEATURES, y=LABELS, shuffle=False, epochs=2, steps_per_epoch=3),
    "array steps": _arrays(dense_model, FEATURES, epochs=4, steps_per_epoch=2),
    "dataset steps": _dense(x=lambda: dataset(FEATURES, LABELS), epochs=4, steps_per_epoch=2),
    "dataset steps that divide": _dense(x=lambda: dataset(FEATURES[:32], LABELS[:32]), epochs=4, steps_per_epoch=2),
    "dataset, too many steps": _dense(x=lambda: dataset(FEATURES, LABELS), epochs=2, steps_per_epoch=7),
    "dataset of unknown length, steps": _dense(
        x=lambda: dataset(FEATURES, LABELS).filter(lambda features, labels: True), epochs=4, steps_per_epoch=5
    ),
    "too many validation steps": _dense(
        x=lambda: dataset(FEATURES, LABELS), validation_data=lambda: dataset(FEATURES, LABELS), validation_steps=7
    ),
    "sparse": _arrays(sparse_model, sparse),
    "sparse, own layer": _arrays(own_sparse_model, sparse),
    "ragged, own layer": _arrays(own_ragged_model, tokens),
    "sparse for a dense model": _arrays(dense_model, sparse),
    "sparse dataset": Case(sparse_model, lambda: {"x": dataset(sparse(), LABELS), "epochs": 2}),
    "scipy, split": _arrays(sparse_model, lambda: scipy.sparse.csr_matrix(MOSTLY_ZERO), validation_split=0.3),
    "scipy generator": Case(sparse_model, lambda: {"x": generate((scipy.sparse.csr_matrix(MOSTLY_ZERO), LABELS))}),
    "scipy PyDataset": Case(
        sparse_model, lambda: {"x": Rows((scipy.sparse.csr_matrix(MOSTLY_ZERO), LABELS))}, keras_takes=False
    ),
    "ragged": _arrays(ragged_model, tokens),
    "ragged, split": _arrays(ragged_model, tokens, validation_split=0.3),
    "ragged dataset": Case(ragged_model, lambda: {"x": dataset(tokens(), LABELS), "epochs": 2}),
    "ragged generator": Case(
        ragged_model, lambda: {"x": ((tokens()[i * 8 :][:8], LABELS[i * 8 :][:8]) for i in range(NUM_BATCHES))}
    ),
    "None in a list": _arrays(optional_model, [FEATURES, None], validation_split=0.3),
    "None in a dict": _arrays(optional_model, {"features": FEATURES, "more": None}),
    "None first in a dict": _arrays(optional_by_name, {"added": None, "features": FEATURES}),
    "None in a dataset": Case(optional_model, lambda: {"x": with_none(), "epochs": 2}),
    "None in a generator": Case(optional_model, lambda: {"x": generate(((FEATURES, None), LABELS))}),
    "None in a PyDataset": Case(optional_model, lambda: {"x": Rows(((FEATURES, None), LABELS))}, keras_takes=False),
}
NEED_TORCH = {"DataLoader", "DataLoader, shuffled", "torch tensors"}
HAS_TORCH = importlib.util.find_spec("torch") is not None

# The number of epochs in which Keras' data end before the steps; the last is an empty epoch of Keras.
WARNINGS = {
    "PyDataset, steps": 1,
    "PyDataset, two threads, steps": 2,
    "PyDataset, too many steps": 2,
    "generator, steps across": 0,
    "generator that ends": 1,
    "generator, too many steps": 2,
    "array steps": 1,
    "dataset steps": 1,
    "dataset, too many steps": 2,
    "dataset of unknown length, steps": 2,
    "too many validation steps": 1,
}


def seed() -> None:
    """Return the random states that `keras.utils.set_random_seed` sets and a fit uses."""
    random.seed(0)
    np.random.seed(0)
    tf.random.set_seed(0)
