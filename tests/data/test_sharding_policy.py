"""The sharding policy of `load`: set or selected by `auto`, always with the reason, with the same batches for all."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import FEATURES, example, write

from tfpar import config
from tfpar.data import Sharded, audit, load


def changed(settings: config.Data, **changes: Any) -> config.Data:
    return settings.model_copy(update=changes)


def large_images(path: Path, num_files: int) -> config.Data:
    record = example(tf.io.encode_jpeg(tf.zeros([128, 128, 3], tf.uint8)).numpy(), 1)
    for i in range(num_files):
        write(path / f"train-{i}.tfrecord", [record])
    features = {**FEATURES, "image": config.Feature(dtype="jpeg", shape=(128, 128, 3))}
    return config.Data(source="tfrecord", directory=str(path), features=features, validation_split=None)


def labels(dataset: tf.data.Dataset) -> list[list[int]]:
    return [batch[1].numpy().tolist() for batch in dataset]


@pytest.mark.parametrize(
    ("num_files", "global_batch_size", "sentence"),
    [
        (
            16,
            64,
            "by file, because images of 128 x 128 must be decoded: 16 files in 8 shards, and a worker reads only its "
            "own",
        ),
        (
            3,
            60,
            "by example, because images of 128 x 128 must be decoded and 3 files do not fill 6 shards evenly: 6 "
            "shards of examples, and a worker decodes only its own",
        ),
        (
            1,
            11,
            "by batch, because no number of shards from 2 to 8 divides a global batch of 11: every worker reads all "
            "examples and takes its local batch of each global batch",
        ),
    ],
)
def test_auto_shards_large_encoded_images(
    tmp_path: Path, num_files: int, global_batch_size: int, sentence: str
) -> None:
    loaded = load(large_images(tmp_path, num_files), global_batch_size=global_batch_size, seed=0)
    assert loaded.sharding == sentence
    assert isinstance(loaded.train, Sharded) == (not sentence.startswith("by batch"))


def test_auto_shards_small_examples_by_batch(digits: config.Data, folder: config.Data) -> None:
    expected = (
        "by batch, because decoding one example is cheap: every worker reads all examples and takes its local batch of "
        "each global batch"
    )
    for settings in (digits, folder):
        assert load(settings, global_batch_size=64, seed=0).sharding == expected
    generated = load(config.Data(source="generated", num_examples=9), global_batch_size=3, seed=0)
    assert generated.sharding.startswith("by batch, because the rows are generated and not stored: every worker")


def test_files_of_a_folder_are_sharded(folder: config.Data) -> None:
    settings = changed(folder, shard_by="file", num_shards=4, shuffle_buffer=0)
    loaded = load(settings, global_batch_size=8, seed=0)
    assert loaded.sharding == "by file, as set: 4 files in 4 shards, and a worker reads only its own"
    inputs = [np.rint(batch[0][:, 0] * 40).astype(int).tolist() for batch in loaded.train.global_batches()]
    assert inputs[0] == [0, 1, 10, 11, 20, 21, 30, 31]
    assert sorted(itertools.chain(*inputs)) == list(range(40))
    assert isinstance(loaded.validation, tf.data.Dataset), "validation data are never sharded"
    uneven = load(changed(settings, num_shards=3), global_batch_size=9, seed=0).sharding
    assert "4 files in 3 shards, unevenly, so that the last batches of an epoch are smaller" in uneven


@pytest.mark.extended
@pytest.mark.parametrize("changes", [{"shard_by": "example", "cache": True}])
def test_sharded_digits_are_the_same_for_any_number_of_workers(digits: config.Data, changes: dict[str, Any]) -> None:
    settings = changed(digits, num_shards=4, augmentation=("flip", "shift"), validation_split=None, **changes)

    def sharded() -> Sharded:
        train = load(settings, global_batch_size=64, seed=5).train
        assert isinstance(train, Sharded)
        return train

    dataset = sharded()
    assert dataset.cardinality() == -(-375 // 16), "the largest shard has 375 of 1,497 examples"
    assert audit(dataset, num_workers=2).ok, "augmented alike on all workers"
    whole = dataset.global_batches()
    epochs = [labels(whole) for _ in range(2)]
    assert epochs[0] != epochs[1]
    first = sharded().local_batches(0, 2)
    for expected in epochs:
        own = [(rows[1].numpy().tolist(), int(count)) for rows, count in first.take(10)]
        assert own == [(batch[:32], 32) for batch in expected[:10]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard_by": "file"}, 'a file for each of 8 shards, but the split "train" in .* has 4: set data.num_shards'),
        (
            {"shard_by": "example", "num_shards": 3},
            "global_batch_size = 64 and data.num_shards = 3: set data.num_shards = 2, or .*global_batch_size = 66",
        ),
    ],
)
def test_impossible_shards_are_refused_in_one_sentence(
    folder: config.Data, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(changed(folder, **changes), global_batch_size=64, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "generated", "shard_by": "file"}, 'but data.source = "generated" has none: leave it out'),
        (
            {"shard_by": "batch", "num_shards": 4},
            'data.num_shards = 4 needs sharding by file or by example, received .* "batch"',
        ),
        ({"source": "generated", "num_shards": 4}, 'data.num_shards = 4 .* data.source = "generated": leave it out'),
    ],
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.Run(data=config.Data(**changes))
