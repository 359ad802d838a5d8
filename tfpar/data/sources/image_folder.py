"""Folders of images with a sub-folder for each class, as for `keras.utils.image_dataset_from_directory`.

photos/train/cat/1.jpg          data.directory = "photos"
photos/train/dog/a/2.png        classes in the order of their names: cat 0, dog 1
photos/test/cat/3.jpg           or, without a folder for validation, data.validation_share = 0.2
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfpar import config
from tfpar.data.sources import files
from tfpar.data.sources.held_out import name_hash
from tfpar.data.sources.split import Split, close_to
from tfpar.messages import received
from tfpar.messages.reasons import reason_of

FORMATS = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
# First bytes of the formats that TensorFlow does not decode to a number of channels.
OTHER_CHANNELS = {1: (b"BM", b"GIF"), 4: (b"\xff\xd8", b"GIF")}
UNREADABLE = re.compile(r"DecodeImage|decode_image|Invalid (JPEG|PNG|GIF|BMP) data|Unknown image file format")

Labelled = list[tuple[Path, int]]


def read(settings: config.Data) -> tuple[Split, Split | None]:
    """List the training and validation images, which are decoded to uint8 `[height, width, channels]`.

    They are resized as by Keras, and rounded.

    Args:
        settings: Uses the splits, `class_names`, `image_size`, `color_mode`, `interpolation`, `crop_to_aspect_ratio`,
            `pad_to_aspect_ratio` and `shuffle_buffer`.

    Raises:
        FileNotFoundError: If a folder is missing or has no images.
        ValueError: If folders do not match the classes.
    """
    folder = _folder(settings, settings.train_split)
    class_names = _class_names(settings, folder)
    train, validation = _list(folder, class_names), None
    origin = f"images in {folder}"
    if settings.validation_share is not None:
        train, held_out = _hold_out(train, settings.validation_share)
        validation = _split(settings, held_out, class_names, f"validation share of the {origin}")
    elif settings.validation_split is not None:
        other = _folder(settings, settings.validation_split)
        if settings.class_names is None:
            _check_classes(other, class_names)
        validation = _split(settings, _list(other, class_names), class_names, f"images in {other}")
    if settings.shuffle_buffer:
        # In the order of names, a shuffle buffer smaller than the folder would hold few classes at a time.
        train.sort(key=lambda labelled: name_hash(str(labelled[0].relative_to(folder))))
    return _split(settings, train, class_names, origin), validation


def corruption(settings: config.Data) -> str | None:
    """Read all images and describe the first that cannot be decoded; return None if there is none."""
    for split in read(settings):
        for path, _ in () if split is None else split.stored:
            try:
                _decode(settings, path)
            except tf.errors.InvalidArgumentError as error:
                name, reason = path.numpy().decode(), reason_of(error)
                return f"{name} cannot be decoded as an image ({reason}): remove or replace the file."
    return None


def _folder(settings: config.Data, split: str) -> Path:
    folder = files.directory(settings, "images")
    inside = folder / split
    if not os.path.isdir(inside):
        names = ", ".join(_sub_folders(folder)) or "none"
        raise FileNotFoundError(
            f"A split of images must be a folder of class folders, but {received.path(folder, received.COLUMNS)} has "
            f"no folder {received.toml(split)}; its folders are: {received.excerpt(names)}. If these are the classes, "
            'set data.train_split = "." and data.validation_share, such as 0.2; else correct the name of the split.'
        )
    return inside


def _sub_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _class_names(settings: config.Data, folder: Path) -> tuple[str, ...]:
    sub_folders = _sub_folders(folder)
    missing = [name for name in settings.class_names or () if name not in sub_folders]
    if missing:
        raise ValueError(
            f'data.class_names must be folders in {folder}, but "{missing[0]}" is not one of them: '
            f"{close_to(missing[0], sub_folders)}"
        )
    class_names = settings.class_names or tuple(sub_folders)
    if len(class_names) < 2:
        raise ValueError(
            f"{folder} must hold a folder for each of at least 2 classes, but it holds: "
            f"{', '.join(sub_folders) or 'none'}. Move the images into such folders, or correct data.directory."
        )
    return class_names


def _check_classes(folder: Path, class_names: Sequence[str]) -> None:
    unknown = [name for name in _sub_folders(folder) if name not in class_names]
    if unknown:
        raise ValueError(
            f'The folder "{unknown[0]}" in {folder} is no class of the training images: '
            f"{close_to(unknown[0], class_names)}"
        )


def _list(folder: Path, class_names: Sequence[str]) -> Labelled:
    images = [(path, label) for label, name in enumerate(class_names) for path in _images(folder / name)]
    if not images:
        raise FileNotFoundError(
            f"{folder} holds no images in its class folders {', '.join(class_names)}: their names must end in one of "
            f"{', '.join(FORMATS)}."
        )
    return images


def _images(folder: Path) -> list[Path]:
    """List all images below a folder, sorted by name, without hidden files such as those of macOS."""
    return sorted(
        Path(parent) / name
        for parent, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(FORMATS) and not name.startswith(".")
    )


def _hold_out(images: Labelled, share: float) -> tuple[Labelled, Labelled]:
    """Hold out a share of every class: the images with the lowest hashes of their names."""
    held_out: set[Path] = set()
    for label in {label for _, label in images}:
        own = sorted((path for path, other in images if other == label), key=lambda path: name_hash(path.name))
        held_out.update(own[: round(share * len(own))])
    train = [image for image in images if image[0] not in held_out]
    validation = [image for image in images if image[0] in held_out]
    if not (train and validation):
        raise ValueError(
            f"data.validation_share = {share} of {len(images)} images leaves none to "
            f"{'validate' if train else 'train'} on: change the share, or add images."
        )
    return train, validation


def _split(settings: config.Data, images: Labelled, class_names: tuple[str, ...], origin: str) -> Split:
    def read_files(num_shards: int, shard: int) -> tf.data.Dataset:
        own = images[shard::num_shards]
        paths, labels = [str(path) for path, _ in own], [label for _, label in own]
        return tf.data.Dataset.from_tensor_slices((tf.constant(paths, tf.string), tf.constant(labels, tf.int32)))

    def decode(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _decode(settings, path), label

    return Split(
        stored=read_files(1, 0),
        decode=decode,
        num_examples=len(images),
        num_classes=len(class_names),
        origin=origin,
        read_files=read_files,
        num_files=len(images),
        encoded=True,
        class_names=class_names,
    )


def _decode(settings: config.Data, path: tf.Tensor) -> tf.Tensor:
    channels = CHANNELS[settings.color_mode]
    contents = tf.io.read_file(path)
    image = tf.cond(
        tf.reduce_any(
            [tf.strings.substr(contents, 0, len(start)) == start for start in OTHER_CHANNELS.get(channels, ())]
        ),
        lambda: _converted(tf.io.decode_image(contents, 3, expand_animations=False), channels),
        lambda: tf.io.decode_image(contents, channels, expand_animations=False),
    )
    image.set_shape([None, None, channels])
    resized = tf.cast(_resized(settings, image), tf.float32)
    pixels = tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
    return tf.ensure_shape(pixels, [*settings.image_size, channels])


def _converted(rgb: tf.Tensor, channels: int) -> tf.Tensor:
    """Convert RGB to grayscale, or add an opaque fourth channel."""
    if channels == 1:
        return tf.image.rgb_to_grayscale(rgb)
    return tf.concat([rgb, tf.fill([*tf.unstack(tf.shape(rgb)[:2]), 1], tf.constant(255, tf.uint8))], axis=2)


def _resized(settings: config.Data, image: tf.Tensor) -> Any:
    height, width = settings.image_size
    if settings.pad_to_aspect_ratio:
        return tf.image.resize_with_pad(image, height, width, method=settings.interpolation)
    if settings.crop_to_aspect_ratio:
        rows, columns = tf.unstack(tf.shape(image)[:2])
        crop_rows = tf.clip_by_value(tf.cast(tf.cast(columns * height, tf.float32) / width, tf.int32), 1, rows)
        crop_columns = tf.clip_by_value(tf.cast(tf.cast(rows * width, tf.float32) / height, tf.int32), 1, columns)
        image = tf.image.crop_to_bounding_box(
            image, (rows - crop_rows) // 2, (columns - crop_columns) // 2, crop_rows, crop_columns
        )
    return tf.image.resize(image, settings.image_size, method=settings.interpolation)
