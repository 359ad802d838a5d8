"""Shuffled global batches from all kinds of arrays that Keras accepts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same, epoch

from tfpar.data import from_arrays


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("num_rows", "batch_size"), [(1, 1), (5, 2), (6, 2), (3, 8), (1001, 2), (1000, 1)])
def test_every_row_comes_once_in_each_epoch(num_rows: int, batch_size: int, shuffle: bool) -> None:
    dataset = from_arrays(np.arange(num_rows), batch_size=batch_size, shuffle=shuffle, seed=0)
    for _ in range(2):
        batches = [batch[0] for batch in epoch(dataset)]
        rows = np.concatenate(batches)
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1), "only the last may be small"
        np.testing.assert_array_equal(np.sort(rows) if shuffle else rows, np.arange(num_rows))
        assert int(dataset.cardinality()) == len(batches), "the number of batches is known before the first epoch"


def test_rows_of_inputs_labels_and_weights_stay_together() -> None:
    x = np.arange(50)
    dataset = from_arrays({"a": x, "b": [x * 2, (x * 3,)]}, (x * 4,), x * 5.0, batch_size=8, shuffle=True, seed=1)
    for inputs, labels, weights in dataset:
        row = inputs["a"].numpy()
        for found, factor in [
            (inputs["b"][0], 2),
            (inputs["b"][1][0], 3),
            (labels[0], 4),
            (weights[0], 5),
        ]:
            np.testing.assert_array_equal(found, row * factor)


def test_a_list_is_a_structure_and_only_floats_change_their_type() -> None:
    x = [np.zeros([4, 2], np.float64), np.zeros([4], np.uint8)]
    spec = from_arrays(x, np.array(["a"] * 4), batch_size=2, shuffle=False, seed=0).element_spec
    assert spec == (
        (tf.TensorSpec([2, 2], tf.float32), tf.TensorSpec([2], tf.uint8)),
        tf.TensorSpec([2], tf.string),
    )


def test_the_seed_fixes_all_epochs_and_epochs_differ() -> None:
    def two_epochs(seed: int) -> list[Any]:
        dataset = from_arrays(np.arange(100), batch_size=10, shuffle=True, seed=seed)
        return [epoch(dataset), epoch(dataset)]

    first, again, other = two_epochs(1), two_epochs(1), two_epochs(2)
    for wanted, found in zip(first, again, strict=True):
        assert_same(found, wanted, "the same seed")
    orders = {np.concatenate([batch[0] for batch in batches]).tobytes() for batches in first + other}
    assert len(orders) == 4, "each epoch of each seed has an order of its own"


def batches() -> Iterator[Any]:
    yield np.zeros([2, 3]), np.zeros(2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"x": np.zeros(4), "y": np.zeros(3)},
            ValueError,
            r"same number of examples, but their first axes are \[4, 3\]",
        ),
        ({"x": np.zeros([0, 3])}, ValueError, "no examples"),
        ({"x": []}, ValueError, "no examples: received no array. Pass a dataset"),
        ({"x": None}, ValueError, "no examples: received no array. Pass a dataset"),
        ({"x": np.zeros(4), "batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
        ({"x": np.zeros(4), "sample_weight": np.ones(4)}, ValueError, "y is None"),
        ({"x": np.float32(1)}, TypeError, "x must be an array"),
        ({"x": np.zeros(4), "y": [0, 1, 0, 1]}, TypeError, r"y\[0\] must be an array .* Convert it with numpy.asarray"),
        ({"x": batches}, TypeError, r"x must be an array .* Call it: batches\(\) is a generator of batches"),
        ({"x": zip([1], [2], strict=True)}, TypeError, "x must be an array .* Make it a generator of batches"),
        ({"x": {"a": "text"}}, TypeError, r"x\['a'\] must be an array"),
        ({"x": np.array([1, None])}, TypeError, "dtype is object"),
        ({"x": np.array(1.0)}, ValueError, "first axis over the examples"),
    ],
)
def test_bad_arrays_get_one_sentence(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        from_arrays(**{"batch_size": 2, "shuffle": True, "seed": 0, **arguments})
    assert "\n" not in str(caught.value)
