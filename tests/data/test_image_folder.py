"""Folders of images: Keras' conventions and pixels, every format, and one sentence for every mistake."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import stored
import tensorflow as tf
from conftest import epoch
from PIL import Image

from tfpar.data import load, user_message

FORMATS = ("png", "jpg", "bmp", "gif")


def photo(shape: tuple[int, ...] = (20, 30, 3)) -> np.ndarray:
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    return np.stack([rows * 9, columns * 6, rows + columns], axis=2).astype("uint8")


def save(path: Path, image: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(photo() if image is None else image).save(path)
    return path


def photos(path: Path, **changes: Any) -> Any:
    """Two classes with an image of 20x30 each, read in the order of their names."""
    for name in ("b", "a"):
        save(path / "train" / name / f"{name}.png")
    fields = {"directory": str(path), "validation_split": None, "normalization": "none", "shuffle_buffer": 0}
    return stored.config.Data(source="image_folder", **{**fields, **changes})


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"interpolation": "nearest"},
        {"interpolation": "bicubic"},
        {"crop_to_aspect_ratio": True},
        {"pad_to_aspect_ratio": True},
        {"color_mode": "grayscale"},
        {"color_mode": "rgba"},
    ],
    ids=str,
)
def test_images_are_those_of_keras_rounded(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = photos(tmp_path, image_size=(13, 11), **changes)
    ((images, labels),) = epoch(load(settings, global_batch_size=4, seed=0).train)
    expected = keras.utils.image_dataset_from_directory(
        tmp_path / "train", image_size=(13, 11), shuffle=False, verbose=False, **changes
    )
    ((keras_images, keras_labels),) = epoch(expected)
    assert images.dtype == np.uint8
    np.testing.assert_array_equal(images, np.clip(np.round(keras_images), 0, 255))
    np.testing.assert_array_equal(labels, keras_labels)
    assert expected.class_names == ["a", "b"]


@pytest.mark.parametrize("color_mode", ["grayscale", "rgb", "rgba"])
def test_every_format_is_read_with_the_asked_channels(color_mode: Any, tmp_path: Path) -> None:
    flat = np.full((8, 8, 3), 100, np.uint8)
    for ending in FORMATS:
        for name in ("a", "b"):
            save(tmp_path / "train" / name / f"x.{ending.upper()}", flat)
    settings = photos(tmp_path, image_size=(8, 8), color_mode=color_mode)
    (tmp_path / "train" / "a" / "a.png").unlink()
    (tmp_path / "train" / "b" / "b.png").unlink()
    ((images, _),) = epoch(load(settings, global_batch_size=64, seed=0).train)
    channels = {"grayscale": 1, "rgb": 3, "rgba": 4}[color_mode]
    assert images.shape == (8, 8, 8, channels)
    expected = [100] * min(channels, 3) + [255] * (channels == 4)
    np.testing.assert_allclose(images, np.broadcast_to(expected, images.shape), atol=2)


def test_hidden_files_and_other_files_are_left_out_and_sub_folders_are_searched(tmp_path: Path) -> None:
    settings = photos(tmp_path, class_names=("b", "a"), shard_by="batch")
    save(tmp_path / "train" / "a" / "deep" / "er" / "x.jpeg")
    (tmp_path / "train" / "a" / "._a.png").write_text("what macOS leaves")
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".git").mkdir()
    loaded = load(settings, global_batch_size=4, seed=0)
    assert loaded.num_train_examples == 3
    assert loaded.class_names == ("b", "a"), "the order that is asked for"
    assert epoch(loaded.train)[0][1].tolist() == [0, 1, 1]
    assert loaded.input_shape == (256, 256, 3)


def test_a_share_is_held_out_of_every_class(tmp_path: Path) -> None:
    settings = stored.image_settings(tmp_path, validation_share=0.5, validation_split="test")
    ((_, labels),) = epoch(load(settings, global_batch_size=64, seed=0).validation)
    assert np.bincount(labels).tolist() == [6, 7, 7]
    held_out = set(stored.numbers("image_folder", epoch(load(settings, global_batch_size=64, seed=1).validation)))
    save(tmp_path / "train" / "cat" / "one_more.png", np.full((4, 6, 3), 99, np.uint8))
    larger = set(stored.numbers("image_folder", epoch(load(settings, global_batch_size=64, seed=1).validation)))
    assert len(held_out ^ larger) <= 2, "one more image moves few others"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"directory": "/no/where"}, FileNotFoundError, "must be a folder of images, but /no/where is not a folder"),
        (
            {"train_split": "fit"},
            FileNotFoundError,
            r'has no folder "fit"; its folders are: test, train\. If these are the classes, set data\.train_split',
        ),
        ({"class_names": ("a", "bee")}, ValueError, '"bee" is not one of them: correct or remove it. There are: a, b'),
        ({"validation_split": "test"}, ValueError, 'folder "aa" in .*test is no class of the training images: did you'),
        (
            {"train_split": "train/a"},
            ValueError,
            "must hold a folder for each of at least 2 classes, but it holds: none",
        ),
        ({"train_split": "empty"}, FileNotFoundError, r"holds no images in its class folders x, y: .* \.bmp, \.gif"),
        ({"validation_share": 0.01, "validation_split": "test"}, ValueError, "of 2 images leaves none to validate on"),
    ],
)
def test_folders_that_do_not_fit_get_one_sentence(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    settings = photos(tmp_path, **changes)
    if "empty" in changes.values():
        for name in ("x", "y"):
            (tmp_path / "empty" / name).mkdir(parents=True)
    save(tmp_path / "test" / "aa" / "1.png")
    with pytest.raises(error, match=message) as caught:
        load(settings, global_batch_size=4, seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.few(2)
@pytest.mark.parametrize("content", [b"", b"this is text", "cut short"])
def test_an_image_that_cannot_be_decoded_is_named_by_its_file(content: Any, tmp_path: Path) -> None:
    settings = photos(tmp_path)
    victim = save(tmp_path / "train" / "b" / "z.png")
    victim.write_bytes(victim.read_bytes()[:60] if content == "cut short" else content)
    loaded = load(settings, global_batch_size=1, seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        epoch(loaded.train)
    sentence = user_message(caught.value, settings)
    assert sentence is not None
    assert sentence.startswith(f"{victim} cannot be decoded as an image (")
    assert sentence.endswith("): remove or replace the file.")
    first = tmp_path / "train" / "a" / "a.png"
    first.write_bytes(b"this is text")
    with pytest.raises(ValueError, match=f"{first} cannot be decoded as an image"):
        load(settings, global_batch_size=1, seed=0)


def test_large_images_are_sharded_by_file_automatically(tmp_path: Path) -> None:
    settings = stored.image_settings(tmp_path, image_size=(128, 128))
    loaded = load(settings, global_batch_size=8, seed=0)
    assert loaded.sharding.startswith("by file, because images of 128 x 128 must be decoded: 40 files in 8 shards")
