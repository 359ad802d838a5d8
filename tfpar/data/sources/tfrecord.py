"""Folders of TFRecord files with declared features."""

import re
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpar import config
from tfpar.data.batching.autotuning import without_autotuning
from tfpar.data.sources.files import EXAMPLES_IN_A_ROW, FILES_AT_ONCE, split_files
from tfpar.data.sources.split import Split, check

_STORED_TYPES = {
    "float32": tf.float32,
    "float64": tf.float32,
    "int32": tf.int64,
    "int64": tf.int64,
    "string": tf.string,
    "jpeg": tf.string,
    "png": tf.string,
}
_IMAGES = {"jpeg": tf.io.decode_jpeg, "png": tf.io.decode_png}


def read(settings: config.Data, split: str) -> Split:
    """Read one split of a folder of TFRecord files; check the first record of each file.

    Args:
        settings: Uses `directory`, `features`, `input_key`, `label_key` and `num_classes`.
        split: A sub-folder of the directory, or the beginning of file names in it.

    Raises:
        FileNotFoundError: If there is no such folder, split or file.
        ValueError: If a file is not a TFRecord file, or a record does not match the declared features.
    """
    _check_declaration(settings)
    paths = files(settings, split)
    for path in paths:
        _check_first_record(settings, path)

    def decode(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = parse(record, settings.features)
        return values[settings.input_key], values[settings.label_key]

    return Split(
        stored=_records(paths),
        decode=decode,
        num_examples=None,
        num_classes=settings.num_classes,
        origin=f'split "{split}" in {settings.directory}',
        read_files=lambda num_shards, shard: _records(paths[shard::num_shards]),
        num_files=len(paths),
        encoded=settings.features[settings.input_key].dtype in _IMAGES,
    )


def files(settings: config.Data, split: str) -> list[Path]:
    """List the files of a split."""
    return split_files(settings, split, "TFRecord")


def _records(paths: list[Path]) -> tf.data.Dataset:
    names = [str(path) for path in paths]

    def read_file(name: tf.Tensor) -> tf.data.Dataset:
        compression = tf.where(tf.strings.regex_full_match(name, r".*\.gz"), "GZIP", "")
        return tf.data.TFRecordDataset(name, compression_type=compression)

    return tf.data.Dataset.from_tensor_slices(names).interleave(
        read_file,
        cycle_length=min(FILES_AT_ONCE, len(names)),
        block_length=EXAMPLES_IN_A_ROW,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    )


def parse(record: tf.Tensor, features: dict[str, config.Feature]) -> dict[str, tf.Tensor]:
    """Parse a serialized `tf.train.Example` into its declared features, and decode images.

    Args:
        record: A string scalar.
        features: The declared features. An Example stores only float32, int64 and bytes; other types are cast.

    Returns:
        A tensor for each feature, of the declared dtype (images: uint8) and shape.
    """
    parsed = tf.io.parse_single_example(record, {key: _stored(feature) for key, feature in features.items()})
    return {key: _value(key, parsed[key], feature) for key, feature in features.items()}


def _stored(feature: config.Feature) -> Any:
    shape = () if feature.dtype in _IMAGES else feature.shape
    return tf.io.FixedLenFeature(shape, _STORED_TYPES[feature.dtype])


def _value(key: str, stored: tf.Tensor, feature: config.Feature) -> tf.Tensor:
    if feature.dtype not in _IMAGES:
        return tf.cast(stored, feature.dtype) if feature.dtype != "string" else stored
    image = _IMAGES[feature.dtype](stored, channels=feature.shape[2])
    size = tf.strings.reduce_join(tf.strings.as_string(tf.shape(image)), separator=" x ")
    declared = " x ".join(map(str, feature.shape))
    sentence = tf.strings.join([f"Images of {key} must be {declared} as data.features declares, but one is ", size])
    return tf.ensure_shape(check(tf.reduce_all(tf.shape(image) == feature.shape), sentence, image), feature.shape)


def _check_declaration(settings: config.Data) -> None:
    declared = ", ".join(settings.features) or "none"
    for field, key in (("input_key", settings.input_key), ("label_key", settings.label_key)):
        if key not in settings.features:
            raise ValueError(f'data.{field} is "{key}", but data.features declares: {declared}.')
    for key, feature in settings.features.items():
        if feature.dtype in _IMAGES and (len(feature.shape) != 3 or feature.shape[2] not in (1, 3)):
            raise ValueError(
                f"The shape of an encoded image must be [height, width, 1 or 3], but data.features.{key}.shape is "
                f"{list(feature.shape)}."
            )


def _check_first_record(settings: config.Data, path: Path) -> None:
    try:
        record = next(iter(without_autotuning(_records([path]).take(1))), None)
        if record is not None:
            parse(record, settings.features)
    except tf.errors.DataLossError as error:
        raise ValueError(corruption(path) or str(error)) from error
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"{mismatch(error.message) or error.message} The file is {path}.") from error


def corruption(path: Path) -> str | None:
    """Describe the first corrupt record of a file; return None if there is none."""
    num_records = 0
    try:
        for _ in _records([path]):
            num_records += 1
    except tf.errors.DataLossError:
        if num_records == 0:
            return f"{path} is no TFRecord file, or its first record is corrupt: remove or replace the file."
        return f"{path} is corrupt after {num_records} whole records: remove, repair or replace the file."
    return None


def mismatch(message: str) -> str | None:
    """Explain TensorFlow's message about a record that lacks a feature, or has it in another type or shape."""
    if missing := re.search(r"Feature: (\S+) \(data type: (\w+)\) is required but could not be found", message):
        key, dtype = missing.groups()
        return f'data.features declares "{key}" ({dtype}), but a record lacks it: correct data.features or the files.'
    if different := re.search(r"Key: ([^\s.]+)\.\s*(.+?)(?:\n|\[\[|\[Op|$)", message):
        key, detail = different.groups()
        return f'A record does not hold "{key}" as data.features declares it ({detail.strip(" .")}): correct either.'
    return None
