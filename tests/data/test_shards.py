"""Shards: the same batches for any number of workers, each example once, and no worker that ends before the others."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import example, write

from tests.support.extent import sampled
from tfpar.data import Sharded, by_example, by_file, join_batches, num_rows, seek, take_rows

NUM_SHARDS = 6


def shuffled(num_examples: int, **settings: Any) -> Sharded:
    dataset = tf.data.Dataset.range(num_examples)
    return by_example(
        dataset, global_batch_size=12, num_shards=NUM_SHARDS, shuffle_buffer=num_examples, seed=3, **settings
    )


def uneven(sizes: list[int], **settings: Any) -> Sharded:
    """Shard s holds 100 s, 100 s + 1, ...; three rows of each in a batch."""

    def make_shard(shard: int) -> tf.data.Dataset:
        return tf.data.Dataset.range(100 * shard, 100 * shard + sizes[shard])

    return Sharded(make_shard, len(sizes), 3 * len(sizes), **settings)


def leaves(batch: Any) -> list[Any]:
    return [leaf.numpy() for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def epoch_of_workers(parts: list[tf.data.Dataset]) -> list[Any]:
    """Steps in unison, as a job takes them, until no worker has rows; the rows joined to global batches."""
    iterators, batches = [iter(part) for part in parts], []
    while True:
        elements = [next(iterator) for iterator in iterators]
        for rows, count in elements:
            assert int(num_rows(rows)) == max(int(count), 1), "a worker without rows gets one stand-in"
        real = [take_rows(rows, 0, count) for rows, count in elements if count > 0]
        if not real:
            return batches
        batches.append(leaves(join_batches(real)))


def assert_equal(actual: list[Any], expected: list[Any], message: str) -> None:
    assert len(actual) == len(expected), message
    for step, (batch, wanted) in enumerate(zip(actual, expected, strict=True)):
        for leaf, wanted_leaf in zip(batch, wanted, strict=True):
            np.testing.assert_array_equal(leaf, wanted_leaf, err_msg=f"{message}, step {step}")


def assert_same_for_workers(
    numbers_of_workers: Sequence[int], build: Callable[[], Sharded], num_epochs: int
) -> list[list[Any]]:
    """The epochs of one worker alone, after those of each number of workers were found to be the same."""
    whole = build().global_batches()
    epochs = [[leaves(batch) for batch in whole] for _ in range(num_epochs)]
    for num_workers in numbers_of_workers:
        sharded = build()
        parts = [sharded.local_batches(rank, num_workers) for rank in range(num_workers)]
        for epoch, expected in enumerate(epochs):
            assert_equal(epoch_of_workers(parts), expected, f"{num_workers} workers, epoch {epoch}")
    return epochs


def test_batches_do_not_depend_on_the_shares_of_workers() -> None:
    sharded = shuffled(50)
    expected = [leaves(batch) for batch in shuffled(50).global_batches()]
    parts = [sharded.local_batches(rank, 3, [1, 4, 1]) for rank in range(3)]
    assert_equal(epoch_of_workers(parts), expected, "shares 1 : 4 : 1")


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    numbers = sampled([1, 2, 3, 6], of_ci=[1, 3])
    first, second = assert_same_for_workers(numbers, lambda: shuffled(50), num_epochs=2)
    flat = [np.concatenate([batch[0] for batch in epoch]).tolist() for epoch in (first, second)]
    assert sorted(flat[0]) == sorted(flat[1]) == list(range(50)), "each example once an epoch"
    assert flat[0] != flat[1], "each epoch has an order of its own"
    assert [len(batch[0]) for batch in first] == [12, 12, 12, 12, 2]


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([7, 0, 1, 3, 4, 0], [10, 4, 1]),  # uneven, two shards without examples, one of them in the middle
        ([0, 0, 1], [1]),  # two of three workers have no examples
        ([3, 3], [6]),
    ],
)
def test_uneven_ends_neither_drop_nor_repeat(sizes: list[int], steps: list[int]) -> None:
    (epoch,) = assert_same_for_workers([len(sizes)], lambda: uneven(sizes), num_epochs=1)
    assert [len(batch[0]) for batch in epoch] == steps
    read = sorted(int(number) for batch in epoch for number in batch[0])
    assert read == sorted(100 * shard + i for shard, size in enumerate(sizes) for i in range(size))
    assert uneven(sizes).cardinality() == len(steps)


def test_sizes_that_are_not_declared_are_taken_from_shards_with_rows() -> None:
    def generate() -> Any:
        yield from (np.full([4, 5], i) for i in range(8))

    numbers = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([4, None], tf.int64))
    sharded = by_example(numbers, global_batch_size=6, num_shards=3)
    assert [batch.shape.as_list() for batch in sharded.global_batches()] == [[6, 4, 5], [2, 4, 5]]
    assert sharded.cardinality() == tf.data.UNKNOWN_CARDINALITY == int(sharded.global_batches().cardinality())


def test_the_stand_in_is_the_first_example_seen_or_that_of_another_shard() -> None:
    sharded = uneven([4, 0, 1, 7])
    rows = [[int(element[0][0]) for element in sharded.local_batches(rank, 4).take(4)] for rank in range(4)]
    assert rows == [[0, 3, 0, 0], [0, 0, 0, 0], [200, 200, 200, 200], [300, 303, 306, 300]]


def test_whole_and_parts_can_be_moved_to_a_position() -> None:
    sharded = shuffled(50)
    whole = sharded.global_batches()
    epochs = [[leaves(batch) for batch in whole] for _ in range(3)]
    for at_epoch, step in [(0, 3), (1, 2)]:
        fresh = sharded.global_batches()
        found = [leaves(batch) for batch in seek(fresh, at_epoch, step)]
        assert_equal(found, epochs[at_epoch][step:], f"whole, epoch {at_epoch} from step {step}")
        parts = [sharded.local_batches(rank, 2) for rank in range(2)]
        found = epoch_of_workers([seek(part, at_epoch, step) for part in parts])
        assert_equal(found, epochs[at_epoch][step:], f"parts, epoch {at_epoch} from step {step}")
        assert_equal(epoch_of_workers(parts), epochs[at_epoch + 1], f"parts, the epoch after {at_epoch}")


def test_a_job_continues_with_another_number_of_workers() -> None:
    sharded = shuffled(50)
    whole = sharded.global_batches()
    expected = [[leaves(batch) for batch in whole] for _ in range(2)][1]
    used = [sharded.local_batches(rank, 2) for rank in range(2)]
    epoch_of_workers(used)
    taken = [[next(iterator)[0] for _ in range(2)] for iterator in map(iter, used)]
    batches = [leaves(join_batches(rows)) for rows in zip(*taken, strict=True)]
    batches += epoch_of_workers([seek(sharded.local_batches(rank, 3), 1, 2) for rank in range(3)])
    assert_equal(batches, expected, "two workers, then three")


def test_pieces_are_changed_by_shard_and_batches_are_finished() -> None:
    def change_batches(batches: tf.data.Dataset, shard: int) -> tf.data.Dataset:
        seeds = tf.data.Dataset.random(seed=shard, rerandomize_each_iteration=True)
        return tf.data.Dataset.zip((batches, seeds)).map(lambda rows, seed: (rows, rows + 1000 * (seed % 1000)))

    def finish(rows: tf.Tensor, changed: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"rows": rows, "noise": changed - rows}

    build = lambda: uneven([7, 3, 1, 3, 4, 0], change_batches=change_batches, finish=finish)  # noqa: E731
    first, second = assert_same_for_workers([2], build, num_epochs=2)
    noise = {int(value) for epoch in (first, second) for batch in epoch for value in batch[0]}
    assert len(noise) > 10, "a number of its own for each piece"
    assert build().element_spec == {name: tf.TensorSpec([None], tf.int64) for name in ("rows", "noise")}


def test_by_file_reads_the_own_files_only(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.tfrecord" for i in range(4)]
    for i, path in enumerate(paths):
        write(path, [example(None, i * 10 + j) for j in range(5)])

    def decode(record: tf.Tensor) -> tf.Tensor:
        return tf.io.parse_single_example(record, {"label": tf.io.FixedLenFeature((), tf.int64)})["label"]

    def build() -> Sharded:
        return by_file(paths, tf.data.TFRecordDataset, global_batch_size=6, num_shards=2, decode=decode)

    whole = [batch.numpy().tolist() for batch in build().global_batches()]
    assert whole[:2] == [[0, 1, 2, 10, 11, 12], [3, 4, 20, 13, 14, 30]], "shard 0 has files 0 and 2"
    assert sorted(itertools.chain(*whole)) == [i * 10 + j for i in range(4) for j in range(5)]
    second = build().local_batches(1, 2)
    for path in paths[::2]:
        path.unlink()
    counts = [(rows.numpy().tolist(), int(count)) for rows, count in second.take(5)]
    assert counts[1] == ([13, 14, 30], 3)
    assert counts[4] == ([10], 0), "another shard's files are not opened for the stand-in"


def make_range(shard: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(4)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Sharded(make_range, 0, 8), ValueError, "must be at least 1, but are 0 and 8"),
        (
            lambda: Sharded(make_range, 8, 60),
            ValueError,
            "must be a multiple of num_shards, but is 60 with 8 shards: use 6 shards, or batches of 64",
        ),
        (lambda: Sharded(lambda shard: [1], 2, 8), TypeError, r"must return a tf.data.Dataset, but returned \[1\]"),
        (
            lambda: Sharded(lambda shard: make_range(0).repeat(), 2, 8),
            ValueError,
            r"shard 0 is infinite: leave out repeat\(\)",
        ),
        (
            lambda: Sharded(make_range, 8, 64).local_batches(0, 3),
            ValueError,
            r"8 shards and 3 workers: use another number of shards \(data.num_shards\), a multiple of 3 that divides",
        ),
        (
            lambda: Sharded(make_range, 8, 64).local_batches(0, 2, [4, 2]),
            ValueError,
            r"the batch shares of the workers, 2 : 1, but there are 8 shards: .* a multiple of 3 that divides",
        ),
        (lambda: Sharded(make_range, 8, 64).local_batches(0, 0), ValueError, "8 shards and 0 workers"),
        (
            lambda: Sharded(make_range, 8, 64).local_batches(2, 2),
            ValueError,
            "rank must be from 0 to 1 for 2 workers, but is 2",
        ),
        (
            lambda: by_file(["a", "b"], tf.data.TFRecordDataset, global_batch_size=8),
            ValueError,
            "2 files and 8 shards: use fewer shards",
        ),
        (
            lambda: by_example(tf.data.Dataset.range(99).shuffle(99, seed=1), global_batch_size=8),
            ValueError,
            "two passes over it begin differently: leave out shuffle",
        ),
    ],
)
def test_invalid_shards_are_refused(build: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_the_source_of_shards_tells_orders_apart_and_not_folders() -> None:
    """Workers compare it: machines may mount the files elsewhere."""

    def of_files(*names: str) -> str:
        shards = by_file(names, tf.data.Dataset.from_tensors, global_batch_size=2, num_shards=2)
        return shards.map(tf.identity).source

    def of_examples(*numbers: int) -> str:
        return by_example(tf.data.Dataset.from_tensor_slices(list(numbers)), global_batch_size=2, num_shards=2).source

    assert of_files("/a/0", "/a/1") == of_files("/b/0", "/b/1") != of_files("/a/1", "/a/0")
    assert of_examples(1, 2) == of_examples(1, 2) != of_examples(2, 1)
    assert Sharded(lambda shard: tf.data.Dataset.range(2), num_shards=1, global_batch_size=2).source == ""
