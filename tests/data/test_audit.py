"""The audit reports examples that workers read twice or never, and no others."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfpar.data import audit, by_example

Context = tf.distribute.InputContext


def sharded_after_batch(context: Context) -> tf.data.Dataset:
    dataset = tf.data.Dataset.range(22).batch(5, drop_remainder=context.num_input_pipelines > 1)
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)


def shuffled_without_a_seed(context: Context) -> tf.data.Dataset:
    dataset = tf.data.Dataset.range(50).shuffle(50, seed=context.input_pipeline_id)
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(5)


def rightly_sharded(context: Context) -> tf.data.Dataset:
    dataset = tf.data.Dataset.range(21).shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.map(lambda number: (tf.fill([3], number), number)).shuffle(21).batch(4)


def noisy(context: Context) -> tf.data.Dataset:
    dataset = tf.data.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.map(lambda number: number + 100 * (context.num_input_pipelines - 1)).batch(2)


def test_a_right_sharding_is_counted_and_reported_as_right() -> None:
    found = audit(rightly_sharded, num_workers=2)
    assert found.ok
    assert (found.examples_per_worker, found.steps_per_worker) == ((11, 10), (3, 3))
    assert str(found).splitlines() == [
        "    worker    examples     steps",
        "         0          11         3",
        "         1          10         3",
        "  together          21",
        " one alone          21",
        "Right: all workers together read the examples of one worker alone, each as often.",
    ]


def test_drops_are_named() -> None:
    found = audit(sharded_after_batch, num_workers=2)
    assert not found.ok
    assert (found.examples_per_worker, found.steps_per_worker) == ((10, 10), (2, 2))
    assert (found.num_examples, found.num_duplicates, found.num_dropped, found.num_unknown) == (22, 0, 2, 0)
    assert found.first_examples == ("missing: 20", "missing: 21")
    assert "WRONG: 2 examples that one worker alone reads are dropped." in str(found)


def test_duplicates_are_named() -> None:
    found = audit(lambda context: tf.data.Dataset.range(6).batch(2), num_workers=3)
    assert (found.num_duplicates, found.num_dropped, found.examples_per_worker) == (12, 0, (6, 6, 6))
    assert found.first_examples == ("too many: 0", "too many: 1", "too many: 2"), "a few, not all"
    assert "WRONG: 12 examples are read in excess" in str(found)


def test_a_different_shuffle_on_each_worker_duplicates_and_drops() -> None:
    found = audit(shuffled_without_a_seed, num_workers=2)
    assert found.num_duplicates == found.num_dropped > 5
    assert found.examples_per_worker == (25, 25), "the counts alone look right"


def test_content_that_one_worker_never_reads_is_called_random() -> None:
    found = audit(noisy, num_workers=2)
    assert (found.num_unknown, found.num_duplicates, found.num_dropped) == (6, 0, 6)
    assert "6 examples differ from all that one worker alone reads: is a random operation without a seed" in str(found)


def test_unequal_steps_and_equal_examples_are_noted() -> None:
    def halves(context: Context) -> tf.data.Dataset:
        whole = tf.data.Dataset.from_tensor_slices([7, 7, 7, 8, 9])
        if context.num_input_pipelines == 1:
            return whole.batch(2)
        return whole.take(4).batch(2) if context.input_pipeline_id == 0 else whole.skip(4).batch(2)

    found = audit(halves, num_workers=2)
    assert found.ok, "equal examples count as often as they occur"
    assert (found.steps_per_worker, found.num_equal) == ((2, 1), 2)
    assert "different numbers of steps" in str(found)
    assert "2 examples equal an earlier one" in str(found)


def test_a_sharded_input_is_right_and_all_workers_take_all_steps() -> None:
    def decode(number: tf.Tensor) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(number + 2), [number, 2])
        return {"r": ragged, "s": tf.sparse.from_dense(tf.one_hot(number % 5, 5)), "t": tf.strings.as_string(number)}

    sharded = by_example(
        tf.data.Dataset.range(13), global_batch_size=6, num_shards=3, shuffle_buffer=6, seed=1, decode=decode
    )
    found = audit(sharded, num_workers=3)
    assert found.ok
    assert (found.examples_per_worker, found.steps_per_worker, found.num_equal) == ((5, 4, 4), (3, 3, 3), 0)


def test_rows_that_differ_only_in_trailing_zeros_or_in_one_part_are_different() -> None:
    inputs = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], dtype="float32")
    dataset = tf.data.Dataset.from_tensor_slices((inputs, [0, 1, 0], [b"a\0", b"a", b""])).batch(2)
    assert audit(dataset, num_workers=1).num_equal == 0


@pytest.mark.parametrize(
    ("dataset", "num_workers", "error", "message"),
    [
        (tf.data.Dataset.range(3).batch(2), 0, ValueError, "num_workers must be at least 1, but is 0"),
        (tf.data.Dataset.range(3).batch(2).repeat(), 2, ValueError, r"has none: leave out repeat\(\)"),
        (lambda context: tf.data.Dataset.range(3).repeat(), 2, ValueError, r"has none: leave out repeat\(\)"),
        ([1, 2], 2, TypeError, r"or a function of tf.distribute.InputContext, received \[1, 2\]"),
    ],
)
def test_impossible_audits_are_refused(dataset: Any, num_workers: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        audit(dataset, num_workers)
