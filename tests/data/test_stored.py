"""Order, sharding, held-out examples and resuming with image folders, tables and functions."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stored
import tensorflow as tf
from conftest import assert_same, epoch, refusal

from tfpar import config
from tfpar.data import Sharded, audit, load, seek

SOURCES = list(stored.MAKERS)
NO_FILES = ("python", "file")  # refused, as tests/config/test_config.py holds


def settings(source: str, path: Path, **changes: Any) -> config.Data:
    return stored.MAKERS[source](path, **changes)


def batches(data: Any) -> list[Any]:
    return epoch(data.global_batches() if isinstance(data, Sharded) else data)


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_every_example_is_read_once_and_in_an_order_of_each_epoch(source: str, tmp_path: Path) -> None:
    loaded = load(settings(source, tmp_path), global_batch_size=16, seed=0)
    epochs = [stored.numbers(source, batches(loaded.train)) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(stored.ROWS))
    assert epochs[0] != epochs[1]
    assert loaded.num_classes == 3
    assert loaded.validation is None
    assert loaded.num_train_examples == (None if source in ("csv", "json lines") else stored.ROWS)
    labels = [0] * 12 + [1] * 14 + [2] * 14 if source == "image_folder" else [i % 3 for i in range(stored.ROWS)]
    for batch in batches(loaded.train):
        numbers = stored.numbers(source, [batch])
        assert batch[-1].tolist() == [labels[number] for number in numbers], "labels stay with their inputs"
    again = load(settings(source, tmp_path / "again", cache=True), global_batch_size=16, seed=0)
    assert stored.numbers(source, batches(again.train)) == epochs[0], "fixed by the seed, not by the folder or a cache"


@pytest.mark.parametrize("source", SOURCES)
def test_without_a_buffer_the_order_is_that_of_the_files(source: str, tmp_path: Path) -> None:
    loaded = load(settings(source, tmp_path, shuffle_buffer=0), global_batch_size=16, seed=0)
    assert stored.numbers(source, batches(loaded.train)) == list(range(stored.ROWS))


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_a_fresh_pipeline_after_seek_equals_the_uninterrupted_one(source: str, tmp_path: Path) -> None:
    own = settings(source, tmp_path, validation_split="test" if source == "python" else None)

    def build() -> tf.data.Dataset:
        return load(own, global_batch_size=7, seed=5).train

    dataset = build()
    epochs = [epoch(dataset) for _ in range(3)]
    for at_epoch, step in [(0, 2), (1, 3)]:
        fresh = build()
        assert_same(epoch(seek(fresh, at_epoch, step)), epochs[at_epoch][step:], f"epoch {at_epoch} from step {step}")
        assert_same(epoch(fresh), epochs[at_epoch + 1], f"the epoch after {at_epoch}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("source", "shard_by"),
    [(source, shard_by) for source in SOURCES for shard_by in ("file", "example") if (source, shard_by) != NO_FILES],
)
def test_workers_with_shards_of_files_or_examples_read_the_examples_of_one_worker(
    source: str, shard_by: Any, tmp_path: Path
) -> None:
    loaded = load(settings(source, tmp_path, shard_by=shard_by, num_shards=2), global_batch_size=8, seed=1)
    assert isinstance(loaded.train, Sharded)
    assert loaded.sharding.startswith(f"by {shard_by}, as set")
    found = audit(loaded.train, num_workers=2)
    assert found.ok, found
    assert found.examples_per_worker == (20, 20)
    # The parts of two workers, side by side, are the batches of one.
    whole = batches(loaded.train)
    assert sorted(stored.numbers(source, whole)) == list(range(stored.ROWS))
    parts = [loaded.train.local_batches(rank, 2) for rank in range(2)]
    for batch, *rows in zip(whole, *parts, strict=False):
        parts_of_batch = [(tf.nest.flatten(part), int(count)) for part, count in rows]
        joined = np.concatenate([leaves[0].numpy()[:count] for leaves, count in parts_of_batch])
        np.testing.assert_array_equal(joined, batch[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("source", SOURCES)
def test_a_share_holds_out_examples_that_are_never_trained_on(source: str, tmp_path: Path) -> None:
    changes = {"validation_share": 0.3, "validation_split": "test"}
    own = settings(source, tmp_path, **changes)
    loaded = load(own, global_batch_size=8, seed=0)
    train, held_out = (stored.numbers(source, batches(data)) for data in (loaded.train, loaded.validation))
    assert sorted([*train, *held_out]) == list(range(stored.ROWS))
    assert 6 <= len(held_out) <= 18
    divided = load(own.model_copy(update={"shard_by": "example", "num_shards": 2}), global_batch_size=8, seed=0)
    assert sorted(stored.numbers(source, batches(divided.train))) == sorted(train), "the same rows are held out"


def test_rows_are_standardized_by_the_training_rows_alone(tmp_path: Path) -> None:
    source = "python"
    changes = {"validation_share": 0.3, "validation_split": "test"}
    plain = load(settings(source, tmp_path, **changes), global_batch_size=64, seed=0)
    standard = load(settings(source, tmp_path, **changes, normalization="standard"), global_batch_size=64, seed=0)
    ((rows, _),) = batches(plain.train)
    ((scaled, _),) = batches(standard.train)
    mean, deviation = rows.mean(axis=0), rows.std(axis=0)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(axis=0), 1, rtol=1e-5)
    ((held_out, _),), ((other, _),) = batches(plain.validation), batches(standard.validation)
    np.testing.assert_allclose(other, (held_out - mean) / deviation, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source", ["csv"])
@pytest.mark.parametrize(
    ("split", "expected"),
    [("train-1", range(10, 20)), ("train-[23]*", range(20, 40)), ("part", range(40)), (".", range(40))],
)
def test_a_split_is_a_file_a_pattern_a_folder_or_the_folder_itself(
    source: str, split: str, expected: range, tmp_path: Path
) -> None:
    folder = tmp_path / "part" if split == "part" else tmp_path
    own = settings(source, folder, train_split=split)
    own = own.model_copy(update={"directory": str(tmp_path)})
    train = load(own, global_batch_size=8, seed=0).train
    assert sorted(stored.numbers(source, batches(train))) == list(expected)
    with pytest.raises(FileNotFoundError, match='no table files of split "other"'):
        load(own.model_copy(update={"train_split": "other"}), global_batch_size=8, seed=0)
    message = "data.directory must be a folder of table files, but /no/where is not a folder: correct the path."
    with pytest.raises(FileNotFoundError, match=message):
        load(own.model_copy(update={"directory": "/no/where"}), global_batch_size=8, seed=0)


@pytest.mark.crossed
@pytest.mark.parametrize("source", stored.TABLES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"columns": ("numbre",)},
            r'data.columns = "numbre" is no column of .*train-0.*: did you mean "number"\? There',
        ),
        ({"label_key": "anser"}, 'data.label_key = "anser" is no column of .*: did you mean "answer"'),
        ({"class_names": ("no", "yes")}, r'row \d+: the label "maybe" of column "answer" is no class'),
    ],
)
def test_columns_and_labels_that_are_not_there_are_named(
    source: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(settings(source, tmp_path, **changes), global_batch_size=8, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", stored.TABLES)
def test_numbers_are_predicted_where_nothing_names_classes(source: str, tmp_path: Path) -> None:
    own = settings(source, tmp_path, class_names=None, label_key="eighth", columns=("number",), shuffle_buffer=0)
    loaded = load(own, global_batch_size=40, seed=0)
    ((inputs, labels),) = batches(loaded.train)
    assert loaded.num_classes is None
    assert (inputs.dtype, labels.dtype, labels.shape) == (np.float32, np.float32, (40, 1))
    np.testing.assert_array_equal(labels, inputs / 8)
    own = own.model_copy(update={"label_key": "number", "columns": ("eighth",), "num_classes": 40})
    assert batches(load(own, global_batch_size=40, seed=0).train)[0][1].tolist() == list(range(40))
    sentence = refusal(own.model_copy(update={"num_classes": 4}))
    assert re.search(r"label 4 of .* must be an integer in 0 to 3, as data.num_classes = 4", sentence), sentence


def test_validation_of_another_shape_is_refused(tmp_path: Path) -> None:
    own = settings("python", tmp_path, function="test_stored.two_shapes")
    with pytest.raises(ValueError, match=r"but those of the validation dataset .* \(3,\) .* \(2,\)"):
        load(own, global_batch_size=8, seed=0)


def two_shapes() -> tuple[tf.data.Dataset, tf.data.Dataset]:
    other = tf.data.Dataset.from_tensors((tf.zeros([3]), tf.constant(0)))
    return stored.examples(), other
