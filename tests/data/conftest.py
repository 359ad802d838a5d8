"""Fixtures of the data tests: prepared digits, folders of TFRecord files, and epochs as plain lists."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfpar
from tfpar import config
from tfpar.data import load, user_message

# TensorFlow starts once a session, some tests here start it while they are collected, and other tests need devices.
tfpar.use_logical_cpus(4)

FEATURES = {
    "image": config.Feature(dtype="float32", shape=(3,)),
    "label": config.Feature(dtype="int32"),
}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> config.Data:
    """Return settings of the digits in a separate folder."""
    return config.Data(directory=str(tmp_path_factory.mktemp("tfds")))


def example(image: Sequence[float] | bytes | None, label: float | None) -> bytes:
    """One serialized `tf.train.Example`; None leaves a feature out."""
    feature = {}
    if isinstance(image, bytes):
        feature["image"] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image]))
    elif image is not None:
        feature["image"] = tf.train.Feature(float_list=tf.train.FloatList(value=image))
    if isinstance(label, float):
        feature["label"] = tf.train.Feature(float_list=tf.train.FloatList(value=[label]))
    elif label is not None:
        feature["label"] = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write(path: Path, records: Sequence[bytes]) -> None:
    """Writes one TFRecord file, compressed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path), "GZIP" if path.suffix == ".gz" else "") as writer:
        for record in records:
            writer.write(record)


@pytest.fixture
def folder(tmp_path: Path) -> config.Data:
    """Settings of a folder with 40 training examples in four files and 5 for testing; example i holds i everywhere."""
    for shard in range(4):
        rows = range(shard * 10, shard * 10 + 10)
        write(tmp_path / f"train-{shard}.tfrecord", [example([i / 40] * 3, i % 4) for i in rows])
    write(tmp_path / "test.tfrecord.gz", [example([i / 5] * 3, i % 4) for i in range(5)])
    return config.Data(source="tfrecord", directory=str(tmp_path), features=FEATURES, num_classes=4)


def epoch(dataset: tf.data.Dataset) -> list[Any]:
    """One epoch as a list of flat lists of arrays."""
    return [[leaf.numpy() for leaf in tf.nest.flatten(batch)] for batch in dataset]


def refusal(settings: config.Data, split: str = "train") -> str:
    """The sentence that refuses a dataset, whether `load` raises it or reading a split explains it."""
    try:
        loaded = load(settings, global_batch_size=64, seed=0)
    except (ValueError, OSError) as error:
        return str(error)
    with pytest.raises(tf.errors.OpError) as caught:
        epoch(getattr(loaded, split))
    return str(user_message(caught.value, settings))


def assert_same(actual: list[Any], expected: list[Any], message: str) -> None:
    """Two epochs must hold the same batches, bit for bit."""
    assert len(actual) == len(expected), f"{message}: {len(actual)} batches instead of {len(expected)}"
    for step, (batch, wanted) in enumerate(zip(actual, expected, strict=True)):
        for leaf, wanted_leaf in zip(batch, wanted, strict=True):
            np.testing.assert_array_equal(leaf, wanted_leaf, err_msg=f"{message}, step {step}")


Build = Callable[[], tf.data.Dataset]
