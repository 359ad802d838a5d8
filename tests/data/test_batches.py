"""Class weights equal Keras' own, and a batch is cut into parts that add up to it."""

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from tfpar.data import as_dataset, class_weights, num_rows, split_batch, with_equal_rows

CLASSES = np.array([0, 2, 1, 2, 0, 1])


@pytest.mark.parametrize("labels", [CLASSES, CLASSES[:, None], CLASSES.astype("float32"), np.eye(3)[CLASSES]])
def test_weights_equal_those_of_keras_fit(labels: Any) -> None:
    x = np.random.default_rng(0).normal(size=[6, 4]).astype("float32")
    class_weight = {0: 0.5, 1: 3.0}  # class 2 is not listed and weighs 1
    loss = "categorical_crossentropy" if labels.shape[-1] == 3 else "sparse_categorical_crossentropy"

    def trained(**keywords: Any) -> list[Any]:
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3, "softmax", kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(1.0), loss)
        model.fit(epochs=1, verbose=0, shuffle=False, **keywords)
        return model.get_weights()

    dataset = tf.data.Dataset.from_tensor_slices((x, labels)).batch(6)
    expected = trained(x=x, y=labels, batch_size=6, class_weight=class_weight)
    for found, wanted in zip(trained(x=class_weights(dataset, class_weight)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("class_weight", [{1: 0.1}, {1: 2}, {0: np.float64(0.1), 1: 0.7}])
@pytest.mark.parametrize("as_arrays", [False, True])
def test_weights_have_the_type_of_keras(as_arrays: bool, class_weight: dict[int, Any]) -> None:
    x, y = np.zeros([3, 1]), np.array([0, 1, 1])
    given = (x, y) if as_arrays else (tf.data.Dataset.from_tensors((x, y)),)
    keras.config.set_floatx("float64")
    try:
        ((_, _, found),) = as_dataset(*given, class_weight=class_weight)
        adapter = get_data_adapter(*given, class_weight=class_weight, shuffle=False)
        ((_, _, wanted),) = adapter.get_tf_dataset()
    finally:
        keras.config.set_floatx("float32")
    assert found.dtype == wanted.dtype or not wanted.dtype.is_floating
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("shape", [[3], [3, 2]])
def test_a_sample_weight_is_multiplied(shape: list[int]) -> None:
    dataset = tf.data.Dataset.from_tensors((tf.zeros([3]), tf.constant([0, 1, 1]), tf.fill(shape, 2.0)))
    (_, _, weights), *_ = class_weights(dataset, {0: 1.0, 1: 5.0})
    np.testing.assert_array_equal(
        weights, np.broadcast_to(np.array([2, 10, 10]).reshape([3] + [1] * (len(shape) - 1)), shape)
    )


@pytest.mark.parametrize(
    ("element", "class_weight", "message"),
    [
        ((tf.zeros([2]), tf.zeros([2])), {}, "at least one class"),
        ((tf.zeros([2]), tf.zeros([2])), {-1: 1.0}, "-1: 1.0"),
        ((tf.zeros([2]), tf.zeros([2])), {0: -1.0}, "0: -1.0"),
        ((tf.zeros([2]),), {0: 1.0}, "needs batches"),
        ((tf.zeros([2]), {"a": tf.zeros([2])}), {0: 1.0}, "one output"),
    ],
)
def test_impossible_class_weights_are_refused(element: Any, class_weight: dict[int, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_weights(tf.data.Dataset.from_tensors(element), class_weight)


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(7, [4, 3]), (1, [1, 0]), (2, [1, 0, 1, 0]), (6, [2, 1, 2, 1]), (9, [3, 2, 2, 2]), (5, [5]), (0, [0, 0])],
)
def test_parts_are_consecutive_and_differ_by_at_most_one_row(rows: int, sizes: list[int], static: bool) -> None:
    data = np.arange(rows * 2).reshape(rows, 2)
    signature = tf.TensorSpec([rows if static else None, 2], tf.int64)
    split = tf.function(lambda batch: split_batch(batch, len(sizes)), input_signature=[signature])
    parts = split(tf.constant(data, tf.int64))
    assert [len(part) for part in parts] == sizes
    np.testing.assert_array_equal(np.concatenate(parts), data)
    shapes = [shape.as_list() for shape in split.get_concrete_function().output_shapes]
    assert shapes == [[size if static else None, 2] for size in sizes], "a static batch has static parts"


def test_a_cut_into_workers_then_replicas_is_one_cut_into_all() -> None:
    for rows in range(20):
        workers = split_batch(tf.range(rows), 2)
        direct = split_batch(tf.range(rows), 6)
        for worker in range(2):
            own = tf.concat(direct[worker * 3 : worker * 3 + 3], axis=0)
            np.testing.assert_array_equal(own, workers[worker], err_msg=f"{rows} rows, worker {worker}")


@pytest.mark.parametrize("shares", [(3, 1), (1, 5, 2), (50, 1), (1, 100, 1, 100)])
def test_parts_have_their_shares_and_no_part_is_empty(shares: tuple[int, ...]) -> None:
    split = tf.function(lambda batch: split_batch(batch, len(shares), shares))
    for rows in (*range(len(shares), 12), 50, 202):
        parts = [part.numpy().tolist() for part in split(tf.range(rows))]
        assert list(itertools.chain(*parts)) == list(range(rows))
        assert all(parts), f"{rows} rows"
        assert parts == [part.numpy().tolist() for part in split_batch(tf.range(rows), len(shares), shares)]
    if rows % sum(shares) == 0:
        assert [len(part) for part in parts] == [share * rows // sum(shares) for share in shares]


@pytest.mark.parametrize("rows", [1, 5])
def test_structure_ragged_sparse_and_none_are_preserved(rows: int) -> None:
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(rows * 2), [2] * rows)
    sparse = tf.sparse.from_dense(tf.range(1, rows * 3 + 1, dtype=tf.int32)[:, None] * tf.ones([1, 2], tf.int32))
    sparse = tf.sparse.reshape(sparse, [rows, 6])
    dataset = tf.data.Dataset.from_tensors({"r": ragged, "more": (sparse, tf.range(rows))}).repeat(2)
    for parts in dataset.map(lambda batch: split_batch((batch, None), 2)):
        assert [part[1] for part in parts] == [None, None]
        joined = tf.concat([part[0]["r"] for part in parts], axis=0)
        assert joined.to_list() == ragged.to_list()
        dense = tf.concat([tf.sparse.to_dense(part[0]["more"][0]) for part in parts], axis=0)
        np.testing.assert_array_equal(dense, tf.sparse.to_dense(sparse))
        assert [int(part[0]["r"].nrows()) for part in parts] == [len(part[0]["more"][1]) for part in parts]


@pytest.mark.parametrize(
    ("batch", "num_parts", "message"),
    [
        (tf.zeros([2]), 0, "num_parts must be at least 1, but is 0"),
        ((tf.zeros([2]), tf.zeros([])), 2, "scalar"),
        ((tf.zeros([2]), tf.zeros([3])), 2, r"same number of rows, but have \[2, 3\]"),
    ],
)
def test_impossible_splits_of_a_batch_are_refused(batch: Any, num_parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(batch, num_parts)


def test_the_rows_of_a_batch_are_those_of_its_first_tensor() -> None:
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(3), tf.constant([2, 1], tf.int32))
    sparse = tf.sparse.from_dense(tf.zeros([4, 5]))
    batches = [(None, {"a": tf.zeros([3, 2])}), ragged, sparse, tf.zeros([0, 2])]
    assert [int(num_rows(batch)) for batch in batches] == [3, 2, 4, 0]
    assert {num_rows(batch).dtype for batch in batches} == {tf.int64}
    with pytest.raises(ValueError, match=r"at least one tensor, but is \(None, None\)"):
        num_rows((None, None))


def test_different_numbers_of_rows_are_refused_without_a_batch() -> None:
    with pytest.raises(ValueError, match="Received 3, 2 rows in inputs, targets"):
        with_equal_rows((tf.zeros([3, 1]), tf.zeros([2])))


def test_ragged_and_sparse_tensors_of_equal_rows_stay_as_they_are() -> None:
    leaves = [tf.ragged.constant([[1.0], []]), tf.sparse.from_dense([[0.0, 1.0], [0.0, 0.0]])]
    ((first, *others),) = tf.data.Dataset.from_tensors((tf.ones([2, 1]), *leaves)).map(lambda *b: with_equal_rows(b))
    assert first.shape == (2, 1)
    assert [*map(type, others)] == [*map(type, leaves)]
