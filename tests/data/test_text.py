"""Source files as text: each byte is predicted once, held-out files stay held out, and epochs can be repeated."""

import collections
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from conftest import assert_same, epoch

from tfpar import config
from tfpar.data import Sharded, audit, load, user_message
from tfpar.data.sources import python_source

CONTEXT_BYTES = 7


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder of forty files in packages, file i of 10 i bytes."""
    generator = np.random.default_rng(0)
    for i in range(40):
        path = tmp_path / f"package_{i % 3}" / f"module_{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(generator.integers(0, 256, 10 * i).astype(np.uint8).tobytes())
    return tmp_path


def settings(folder: Path, **changes: object) -> config.Data:
    fields = {"source": "python_source", "directory": str(folder), "context_bytes": CONTEXT_BYTES}
    return config.Data(**{**fields, "normalization": "none", **changes})


def windows(dataset: tf.data.Dataset | Sharded) -> list[bytes]:
    """Every window of an epoch, its bytes and the one after them."""
    batches = epoch(dataset.global_batches() if isinstance(dataset, Sharded) else dataset)
    return [bytes([*row, after[-1]]) for inputs, labels in batches for row, after in zip(inputs, labels, strict=True)]


# What is read


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_byte_of_a_file_but_its_first_and_a_short_rest_is_predicted_once(sources: Path, split: str) -> None:
    expected: list[bytes] = []
    for path in python_source.files(settings(sources), split):
        content = path.read_bytes()
        starts = range(0, len(content) - CONTEXT_BYTES, CONTEXT_BYTES)
        expected += [content[start : start + CONTEXT_BYTES + 1] for start in starts]
    found = load(settings(sources, train_split=split), global_batch_size=16, seed=0)
    assert sorted(windows(found.train)) == sorted(expected)
    assert found.num_train_examples == len(expected) > 50
    assert int(found.train.cardinality()) == -(-len(expected) // 16)


def test_labels_are_the_inputs_one_byte_later() -> None:
    standard = config.Data(source="python_source", normalization="none", shuffle_buffer=0)
    found = load(standard, global_batch_size=8, seed=0)
    inputs, labels = next(iter(found.train))
    assert found.input_shape == (128,)
    assert (inputs.shape, labels.shape) == ((8, 128), (8, 128))
    assert (inputs.dtype, labels.dtype) == (tf.int32, tf.int32)
    np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])


def test_the_standard_library_is_read_without_its_tests_and_a_tenth_is_held_out() -> None:
    standard = config.Data(source="python_source", normalization="none")
    train, test = python_source.files(standard, "train"), python_source.files(standard, "test")
    names = {path.name for path in (*train, *test)}
    assert {"argparse.py", "inspect.py", "socket.py"} <= names
    for path in (*train, *test):
        assert not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts), path
    assert 0.05 < len(test) / (len(train) + len(test)) < 0.15


def test_a_file_stays_in_its_split_when_others_come(sources: Path) -> None:
    before = {split: python_source.files(settings(sources), split) for split in ("train", "test")}
    for name in ("another.py", "package_0/one_more.py", "tests/test_more.py", "notes.txt"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).write_text("x")
    after = {split: python_source.files(settings(sources), split) for split in ("train", "test")}
    assert len(before["train"]) + len(before["test"]) == 40
    assert not set(before["train"]) & set(before["test"])
    new = {path.name for split in after for path in set(after[split]) - set(before[split])}
    assert new == {"another.py", "one_more.py"}
    for split, paths in before.items():
        assert [path for path in after[split] if path in paths] == paths, "the order of the others stays too"


def test_shares_of_a_split_follow_each_other(sources: Path) -> None:
    whole = python_source.files(settings(sources), "train")
    parts = [python_source.files(settings(sources), f"train[{share}]") for share in (":30%", "30%:60%", "60%:")]
    assert parts[0] + parts[1] + parts[2] == whole
    assert all(parts)


# In which order


def test_each_epoch_has_another_order_that_the_seed_repeats(sources: Path) -> None:
    first, second, other_seed = (load(settings(sources), global_batch_size=16, seed=seed).train for seed in (3, 3, 4))
    epochs = [epoch(first), epoch(first)]
    assert_same([epoch(second), epoch(second)][1], epochs[1], "the second epoch")
    assert windows(first) != windows(other_seed)
    orders = [[inputs.tobytes() for inputs, _ in batches] for batches in epochs]
    assert orders[0] != orders[1]


@pytest.mark.extended
def test_workers_with_shards_of_files_together_read_the_files_of_one_worker(sources: Path) -> None:
    alone = load(settings(sources), global_batch_size=16, seed=0)
    divided = load(settings(sources, shard_by="file", num_shards=2), global_batch_size=16, seed=0)
    assert isinstance(divided.train, Sharded)
    assert collections.Counter(windows(divided.train)) == collections.Counter(windows(alone.train))
    assert audit(divided.train, 2).ok


# Entropy


def test_unigram_entropy_is_that_of_the_byte_frequencies_of_all_batches() -> None:
    assert python_source.unigram_entropy([(None, np.arange(128)), (None, np.arange(128, 256))]) == pytest.approx(8)
    assert python_source.unigram_entropy([(None, np.array([[0, 1], [1, 1]]))]) == pytest.approx(0.8113, abs=1e-4)
    assert python_source.unigram_entropy([(None, np.zeros(5, int))]) == 0


# What is refused


@pytest.mark.parametrize("split", ["validation", "train[10]", "train[:10]", "train[:10%", "train+test"])
def test_a_split_that_cannot_be_read_is_refused_with_those_that_can(sources: Path, split: str) -> None:
    with pytest.raises(ValueError, match=r'must be "train" or "test", or a share of one such as "train\[:10%\]"'):
        load(settings(sources, train_split=split), global_batch_size=16, seed=0)


def test_a_folder_without_sources_and_files_without_a_window_are_refused(tmp_path: Path, sources: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must be in .*nothing, but none was found there: set data\.directory"):
        load(settings(tmp_path / "nothing"), global_batch_size=16, seed=0)
    with pytest.raises(ValueError, match=r"holds the 401 bytes of one window: take a larger part .* or lower"):
        load(settings(sources, context_bytes=400), global_batch_size=16, seed=0)


def test_a_file_that_goes_away_is_named(sources: Path) -> None:
    found = load(settings(sources, shuffle_buffer=0), global_batch_size=16, seed=0)
    gone = python_source.files(settings(sources), "train")[-1]
    gone.unlink()
    with pytest.raises(tf.errors.NotFoundError) as raised:
        epoch(found.train)
    assert user_message(raised.value, settings(sources)) == (
        f"The data file {gone} is missing: restore it, or prepare the dataset again."
    )
