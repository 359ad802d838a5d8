"""The first rows of a batch differ, for trials of a few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar import data

pytestmark = pytest.mark.usefixtures("logical_cpus")

LENGTHS = np.array([6] * 10 + [5, 4, 3, 2, 1])


def tokens() -> np.ndarray:
    return np.where(np.arange(6) < LENGTHS[:, None], np.arange(1, 16)[:, None], 0)


def sorted_by_length(batch: Any) -> list[int]:
    """The lengths of the rows in their order."""
    varied = data.varied_first(batch)
    if isinstance(varied, tf.RaggedTensor):
        return varied.row_lengths().numpy().tolist()
    dense = tf.sparse.to_dense(varied) if isinstance(varied, tf.SparseTensor) else varied
    return np.count_nonzero(dense.numpy(), 1).tolist()


@pytest.mark.parametrize(
    "batch",
    [
        lambda: tf.constant(tokens()),
        lambda: tf.constant(tokens().astype("float32")),
        lambda: tf.RaggedTensor.from_tensor(tokens(), lengths=LENGTHS),
        lambda: tf.sparse.from_dense(tokens()),
    ],
    ids=["integers", "floats", "ragged", "sparse"],
)
def test_the_halves_of_the_first_four_rows_have_other_lengths(batch: Any) -> None:
    lengths = sorted_by_length(batch())
    assert max(lengths[:2]) != max(lengths[2:4])
    assert len(set(lengths[:8])) == 6
    assert sorted(lengths) == sorted(LENGTHS.tolist())


def test_every_tensor_of_a_batch_keeps_its_rows_together() -> None:
    numbers = tf.range(15)
    varied = data.varied_first(({"tokens": tf.constant(tokens()), "none": None}, numbers))
    np.testing.assert_array_equal(varied[0]["tokens"], tokens()[varied[1].numpy()])
    assert varied[0]["none"] is None
    assert sorted(varied[1].numpy().tolist()) == list(range(15))


def test_targets_that_are_ignored_or_missing_come_early() -> None:
    labels, numbers = np.ones((12, 3), "int32"), np.ones((12, 2), "float32")
    labels[10], numbers[11] = -100, np.nan
    inputs, *targets = data.varied_first((tf.ones([12, 4]), tf.constant(labels), tf.constant(numbers)))
    assert inputs.shape == (12, 4)
    assert any((targets[0][:8] == -100).numpy().ravel())
    assert np.isnan(targets[1][:8]).any()


@pytest.mark.parametrize(
    "batch", [lambda: tf.ones([9, 4]), lambda: tf.constant(["a", "b"] * 4), lambda: tf.zeros([3, 0])]
)
def test_a_batch_whose_rows_are_alike_stays_as_it_is(batch: Any) -> None:
    given = batch()
    assert data.varied_first(given) is given
