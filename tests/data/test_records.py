"""Folders of TFRecord files: splits, order, and one sentence for every mistake."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import FEATURES, epoch, example, write

from tfpar import config
from tfpar.data import load, user_message


def changed(settings: config.Data, **changes: Any) -> config.Data:
    return settings.model_copy(update=changes)


def rows(dataset: tf.data.Dataset, scale: int) -> list[int]:
    return [round(float(row[0] * scale)) for x, _ in epoch(dataset) for row in x]


def test_all_examples_of_all_files_are_read(folder: config.Data) -> None:
    loaded = load(folder, global_batch_size=7, seed=0)
    assert sorted(rows(loaded.train, 40)) == list(range(40))
    assert rows(loaded.validation, 5) == list(range(5)), "compressed files are read as well, in order"
    assert loaded[2:5] == (None, 4, (3,))
    assert loaded.train.element_spec[1].dtype == tf.int32, "labels have the declared type"


def test_sub_folders_are_splits_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "fit" / "part-1", [example([1.0] * 3, 1)])
    write(tmp_path / "fit" / "part-0", [example([0.0] * 3, 0)])
    (tmp_path / "fit" / "_SUCCESS").touch()
    settings = config.Data(
        source="tfrecord",
        directory=str(tmp_path),
        features=FEATURES,
        train_split="fit",
        validation_split=None,
        shuffle_buffer=0,
    )
    loaded = load(settings, global_batch_size=2, seed=0)
    assert rows(loaded.train, 1) == [0, 1]
    assert loaded.validation is None


@pytest.mark.parametrize(("dtype", "encode"), [("png", tf.io.encode_png), ("jpeg", tf.io.encode_jpeg)])
def test_encoded_images_are_decoded(tmp_path: Path, dtype: Any, encode: Any) -> None:
    pixels = tf.fill([4, 5, 3], tf.constant(100, tf.uint8))
    write(tmp_path / "train.tfrecord", [example(encode(pixels).numpy(), 1)])
    settings = config.Data(
        source="tfrecord",
        directory=str(tmp_path),
        features={**FEATURES, "image": config.Feature(dtype=dtype, shape=(4, 5, 3))},
        validation_split=None,
        normalization="none",
    )
    loaded = load(settings, global_batch_size=2, seed=0)
    assert loaded.input_shape == (4, 5, 3)
    ((images, _),) = epoch(loaded.train)
    np.testing.assert_allclose(images[0], pixels, atol=2)

    other_shape = {**FEATURES, "image": config.Feature(dtype=dtype, shape=(8, 8, 3))}
    with pytest.raises(ValueError, match=r"Images of image must be 8 x 8 x 3 .* but one is 4 x 5 x 3"):
        load(changed(settings, features=other_shape), global_batch_size=2, seed=0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"directory": "/no/where"}, FileNotFoundError, "must be a folder .* but /no/where is not a folder"),
        ({"train_split": "fit"}, FileNotFoundError, 'no TFRecord files of split "fit".* there are: test, train'),
        ({"train_split": "t"}, FileNotFoundError, "there are: test, train"),
        ({"label_key": "class"}, ValueError, 'label_key is "class", but data.features declares: image, label'),
        (
            {"features": {**FEATURES, "name": config.Feature(dtype="string")}},
            ValueError,
            r'declares "name" \(string\), but a record lacks it: .*train-0',
        ),
        (
            {"features": {**FEATURES, "label": config.Feature(dtype="float32")}, "num_classes": None},
            ValueError,
            'does not hold "label" as data.features declares it',
        ),
        (
            {"features": {**FEATURES, "image": config.Feature(dtype="float32", shape=(4,))}},
            ValueError,
            'does not hold "image" as data.features declares it',
        ),
        (
            {"features": {**FEATURES, "image": config.Feature(dtype="png", shape=(4,))}},
            ValueError,
            r"\[height, width, 1 or 3\], but data.features.image.shape is \[4\]",
        ),
        ({"augmentation": ("flip",)}, ValueError, "Augmentation changes images"),
        ({"input_key": "label"}, ValueError, '"unit" is for images .* but the inputs are int32: set it to "none"'),
        ({"label_key": "image"}, ValueError, "must be single integers, but are float32"),
    ],
)
def test_settings_that_do_not_fit_get_one_sentence(
    folder: config.Data, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        load(changed(folder, **changes), global_batch_size=7, seed=0)
    assert "\n" not in str(caught.value)


def test_an_empty_data_set_gets_one_sentence(folder: config.Data) -> None:
    write(Path(folder.directory) / "nothing.tfrecord", [])
    with pytest.raises(ValueError, match=r'split "nothing" in .* holds no examples'):
        load(changed(folder, train_split="nothing"), global_batch_size=7, seed=0)


def test_float_images_outside_the_unit_range_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.tfrecord", [example([0.0, 200.0], 1)])
    settings = config.Data(
        source="tfrecord",
        directory=str(tmp_path),
        features={**FEATURES, "image": config.Feature(dtype="float32", shape=(1, 2, 1))},
        validation_split=None,
    )
    with pytest.raises(ValueError, match='from 0 to 200: set it to "standard" or "none"'):
        load(settings, global_batch_size=1, seed=0)


@pytest.mark.parametrize("label", [4, -1])
def test_a_label_out_of_range_is_named(folder: config.Data, label: int) -> None:
    write(Path(folder.directory) / "train-9.tfrecord", [example([0.0] * 3, 0), example([0.0] * 3, label)])
    loaded = load(folder, global_batch_size=7, seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        epoch(loaded.train)
    expected = f"Labels must be from 0 to 3 for 4 classes, but the data contain the label {label}. "
    assert str(user_message(caught.value, folder)) == expected + "Set data.num_classes, or correct the data."


def test_a_record_that_lacks_a_feature_later_on_is_explained(folder: config.Data) -> None:
    write(Path(folder.directory) / "train-9.tfrecord", [example([0.0] * 3, 0), example([0.0] * 3, None)])
    loaded = load(folder, global_batch_size=7, seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        epoch(loaded.train)
    assert 'declares "label" (int64), but a record lacks it' in str(user_message(caught.value, folder))


def test_a_file_that_is_no_record_file_is_named_before_the_first_step(folder: config.Data) -> None:
    victim = Path(folder.directory) / "train-1.tfrecord"
    victim.write_text("this is plain text, and long enough for a header")
    with pytest.raises(ValueError, match=f"{victim} is no TFRecord file"):
        load(folder, global_batch_size=7, seed=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["train-2.tfrecord", "test.tfrecord.gz"])
def test_a_file_cut_short_is_named(folder: config.Data, name: str) -> None:
    victim = Path(folder.directory) / name
    if victim.suffix == ".gz":
        noise = np.random.default_rng(0).normal(size=[500, 3])
        write(victim, [example(list(row), 1) for row in noise])
    loaded = load(folder, global_batch_size=7, seed=0)
    victim.write_bytes(victim.read_bytes()[:-30])
    with pytest.raises(tf.errors.OpError) as caught:
        epoch(loaded.validation if victim.suffix == ".gz" else loaded.train)
    assert f"{victim} is corrupt after" in str(user_message(caught.value, folder))


def test_a_file_that_vanishes_is_named(folder: config.Data) -> None:
    loaded = load(folder, global_batch_size=7, seed=0)
    victim = Path(folder.directory) / "train-2.tfrecord"
    victim.unlink()
    with pytest.raises(tf.errors.NotFoundError) as caught:
        epoch(loaded.train)
    assert f"{victim} is missing" in str(user_message(caught.value, folder))
