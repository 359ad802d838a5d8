"""The section `[data]` of a run: its fields, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from tfpar.config import toml
from tfpar.config.sections import Count, ImportPath, OrNone, Section, Text
from tfpar.messages.received import excerpt

Share = Annotated[float, Field(gt=0, lt=1)]
Names = Annotated[tuple[Text, ...], Field(min_length=1, strict=False)]
Pixels = Annotated[tuple[Count, ...], Field(min_length=2, max_length=2, strict=False)]


class Feature(Section):
    """A feature of a TFRecord example.

    >>> Feature(dtype="jpeg", shape=(224, 224, 3)).shape
    (224, 224, 3)
    """

    dtype: Literal["float32", "float64", "int32", "int64", "string", "jpeg", "png"] = Field(
        description="Type of the stored values; jpeg and png are encoded images, decoded to `shape`."
    )
    shape: tuple[Count, ...] = Field(
        (), strict=False, description="Shape of one example, [] for a scalar; images: [height, width, channels]."
    )


class Data(Section):
    """The source of the examples, and their preprocessing.

    >>> Data(name="mnist", augmentation=("shift",)).source
    'tfds'
    """

    source: Literal["tfds", "tfrecord", "image_folder", "table", "python", "generated", "python_source"] = Field(
        "tfds",
        description="A TensorFlow Datasets name, a folder of TFRecord files, of images by class, or of tables (CSV, "
        "Parquet, Feather, JSON lines), a function of your own, generated rows, or the bytes of Python's own library.",
    )
    name: Text = Field("digits", description="TensorFlow Datasets name; digits is embedded and needs no download.")
    directory: OrNone[Text] = Field(
        None,
        description="Folder of the files; tfds: its data_dir; python_source: a folder in place of Python's library.",
    )
    train_split: Text = Field(
        "train",
        description="tfds: a split such as train[:80%]; image_folder: a sub-folder; other files: a sub-folder, a file "
        'name or its beginning, or a pattern such as train-*.csv. "." is the folder itself.',
    )
    validation_split: OrNone[Text] = Field("test", description="Like train_split; none trains without validation.")
    validation_share: OrNone[Share] = Field(
        None, description="Fraction of train_split that is held out for validation, in place of validation_split."
    )
    features: dict[str, Feature] = Field({}, description="tfrecord: the features of one example, by their key.")
    input_key: Text = Field("image", description="Feature that the model receives.")
    label_key: Text = Field("label", description="Feature or column that the model predicts.")
    num_classes: OrNone[Annotated[int, Field(ge=2)]] = Field(
        None, description="tfrecord, table, python: number of classes, labels 0 to num_classes - 1."
    )
    class_names: OrNone[Names] = Field(
        None, description="image_folder: the folders of the classes, none: all; table: the words for labels."
    )
    image_size: Pixels = Field((256, 256), description="image_folder: height and width that images are resized to.")
    color_mode: Literal["rgb", "grayscale", "rgba"] = Field("rgb", description="image_folder: channels of an image.")
    interpolation: Literal[
        "bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5", "gaussian", "mitchellcubic"
    ] = Field("bilinear", description="image_folder: how images are resized.")
    crop_to_aspect_ratio: bool = Field(False, description="image_folder: resize the largest window of image_size.")
    pad_to_aspect_ratio: bool = Field(False, description="image_folder: resize all of the image, black around it.")
    columns: OrNone[Names] = Field(None, description="table: input columns; none: all but label_key.")
    category_columns: OrNone[Names] = Field(
        None,
        description="table: input columns of words or whole numbers that are categories, each a one-hot vector over "
        "those of the training rows. With label_key among them, its sorted words are the classes.",
    )
    missing_value: OrNone[float] = Field(
        None, description="table: the number for an empty cell of an input column; none refuses empty cells."
    )
    column_names: OrNone[Names] = Field(None, description="table: the columns of CSV files without a header line.")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(
        ",", description="table: the character between two cells of CSV files."
    )
    function: OrNone[ImportPath] = Field(
        None, description="python: import path of a function that returns one dataset, or two: (train, validation)."
    )
    arguments: dict[str, Any] = Field({}, description="python: the keyword arguments of the function.")
    num_examples: int = Field(10_000_000, ge=1, description="generated: rows of the training split.")
    num_features: int = Field(10, ge=1, description="generated: columns of one row.")
    noise: float = Field(0.1, ge=0, description="generated: standard deviation of the noise on the labels.")
    context_bytes: int = Field(
        128, ge=1, description="python_source: bytes of one example; the model predicts the next byte of each."
    )
    shuffle_buffer: int = Field(10_000, ge=0, description="Size of the shuffle buffer, in examples; 0 keeps the order.")
    augmentation: tuple[Literal["flip", "shift", "brightness"], ...] = Field(
        (), strict=False, description="Random changes to training images, in this order."
    )
    normalization: Literal["none", "unit", "standard"] = Field(
        "unit",
        description="unit: integers to [0, 1]; standard: mean 0 and deviation 1 of each channel or column, measured on "
        "the training split.",
    )
    cache: bool = Field(False, description="Keep the examples in memory after the first epoch.")
    shard_by: Literal["auto", "file", "example", "batch"] = Field(
        "auto",
        description="What a worker reads: its own files, its own examples, or all examples for its local batches.",
    )
    num_shards: OrNone[Count] = Field(
        None, description="Number of shards of the files or examples; none: up to 8, a divisor of the global batch."
    )


# Settings that a source does not read are refused, because they would silently have no effect.
_FILES = ("tfrecord", "image_folder", "table")
_READERS: dict[str, tuple[str, ...]] = {
    "name": ("tfds",),
    "directory": ("tfds", *_FILES, "python_source"),
    "train_split": ("tfds", *_FILES, "python_source"),
    "validation_share": ("image_folder", "table", "python"),
    "features": ("tfrecord",),
    "input_key": ("tfds", "tfrecord"),
    "label_key": ("tfds", "tfrecord", "table"),
    "num_classes": ("tfrecord", "table", "python"),
    "class_names": ("image_folder", "table"),
    **dict.fromkeys(("image_size", "color_mode", "interpolation"), ("image_folder",)),
    **dict.fromkeys(("crop_to_aspect_ratio", "pad_to_aspect_ratio"), ("image_folder",)),
    **dict.fromkeys(("columns", "category_columns", "missing_value", "column_names", "delimiter"), ("table",)),
    **dict.fromkeys(("function", "arguments"), ("python",)),
    **dict.fromkeys(("num_examples", "num_features", "noise"), ("generated",)),
    "context_bytes": ("python_source",),
    "augmentation": ("tfds", "tfrecord", "image_folder", "python"),
    "cache": ("tfds", *_FILES, "python", "python_source"),
}


def problems(data: Data) -> Iterator[str]:
    """Yield a sentence for each broken rule between fields: the keys with their values, the rule, the way out.

    Args:
        data: The section, whose fields are each valid.

    >>> list(problems(Data(cache=True)))
    []
    """
    for key, sources in _READERS.items():
        if data.source not in sources and _is_set(data, key):
            yield (
                f"data.{key} = {toml.show(data.model_dump()[key])} is read only from data.source "
                f'{" or ".join(sources)}, received "{data.source}": leave it out, or change the source.'
            )
    yield from _source_problems(data)
    yield from _split_problems(data)
    yield from _image_problems(data)
    yield from _label_problems(data)
    yield from _sharding_problems(data)


def _is_set(data: Data, key: str) -> bool:
    return bool(getattr(data, key) != Data.model_fields[key].default)


def _source_problems(data: Data) -> Iterator[str]:
    if data.source in _FILES and data.directory is None:
        yield f'data.source = "{data.source}" needs data.directory: set it to the folder that holds the files.'
    if data.source == "python" and data.function is None:
        yield 'data.source = "python" needs data.function: set it to an import path such as "my_data.load".'
    if not data.delimiter.isascii() or data.delimiter in '"\r\n\0':  # pyarrow takes one byte
        yield (
            f"data.delimiter = {toml.show(data.delimiter)} must be one ASCII character, no quotation mark and no end "
            'of a line: write the files with another one, such as ";".'
        )
    if data.source == "tfrecord":
        for role in ("input_key", "label_key"):
            key = getattr(data, role)
            if key not in data.features:
                section = excerpt(f"data.features.{key}")
                yield f"data.{role} = {toml.show(key)} is not declared: add [{section}], or change data.{role}."
    if data.source == "python_source" and data.normalization != "none":
        normalization = f'data.normalization = "{data.normalization}"'
        yield f'{normalization} is for measured values, but data.source = "python_source" gives bytes: set "none".'
    if data.source == "generated" and data.normalization == "standard":
        yield (
            'data.normalization = "standard" is for stored data, but data.source = "generated" gives rows of mean 0 '
            'and deviation 1: set "none".'
        )


def _split_problems(data: Data) -> Iterator[str]:
    if data.validation_share is not None and _is_set(data, "validation_split"):
        yield (
            f"data.validation_share = {data.validation_share} replaces data.validation_split, received "
            f"data.validation_split = {toml.show(data.validation_split)} too: leave one of them out."
        )
    elif data.source in ("generated", "python") and data.validation_split not in (None, "test"):
        yield (
            f"data.validation_split = {toml.show(data.validation_split)} names stored data, but data.source = "
            f'"{data.source}" has none of that name: leave it out, or set "none" to train without validation.'
        )


def _image_problems(data: Data) -> Iterator[str]:
    for key, feature in data.features.items():
        if feature.dtype in ("jpeg", "png") and (len(feature.shape) != 3 or feature.shape[2] not in (1, 3)):
            yield (
                f"{excerpt(f'data.features.{key}')}.shape = {toml.show(feature.shape)} must be [height, width, "
                f'channels] with 1 or 3 channels, as its dtype is "{feature.dtype}".'
            )
    if data.crop_to_aspect_ratio and data.pad_to_aspect_ratio:
        yield "data.crop_to_aspect_ratio and data.pad_to_aspect_ratio exclude each other: set one of them."


def _label_problems(data: Data) -> Iterator[str]:
    if data.class_names is not None and data.num_classes is not None:
        yield (
            f"data.num_classes = {data.num_classes} is for labels that are numbers, and data.class_names names "
            f"{len(data.class_names)} classes: leave one of them out."
        )
    for key in ("class_names", "columns", "category_columns", "column_names"):
        names = getattr(data, key) or ()
        if len(set(names)) < len(names):
            yield f"data.{key} = {toml.show(names)} has a name twice: name each once."
    if data.class_names is not None and len(data.class_names) < 2:
        yield f"data.class_names = {toml.show(data.class_names)} must name at least 2 classes."
    categories = data.category_columns or ()
    missing = [name for name in categories if name not in (*(data.columns or categories), data.label_key)]
    if missing:
        yield f"data.category_columns names {toml.show(missing[0])}, which is not in data.columns: add it there."
    if data.label_key in categories and (data.class_names is not None or data.num_classes is not None):
        key = "num_classes" if data.class_names is None else "class_names"
        yield (
            f"data.label_key = {toml.show(data.label_key)} is in data.category_columns, so that its words are the "
            f"classes, and data.{key} = {toml.show(getattr(data, key))} sets them too: leave one of them out."
        )
    if data.label_key in (data.columns or ()):
        yield (
            f"data.label_key = {toml.show(data.label_key)} is in data.columns too, and would predict itself: "
            "remove it there."
        )


def _sharding_problems(data: Data) -> Iterator[str]:
    unsupported = {"generated": ("file", "example"), "python": ("file",)}
    if data.shard_by in unsupported.get(data.source, ()):
        units = "examples" if data.source == "generated" else "files"
        way_out = "leave it out" if data.source == "generated" else 'set "example", or leave it out'
        yield (
            f'data.shard_by = "{data.shard_by}" needs stored {units}, but data.source = "{data.source}" has none: '
            f"{way_out}."
        )
    if data.num_shards is not None and (data.shard_by == "batch" or data.source == "generated"):
        yield (
            f"data.num_shards = {data.num_shards} needs sharding by file or by example, received data.shard_by = "
            f'"{data.shard_by}" and data.source = "{data.source}": leave it out, or set data.shard_by = "file" or '
            '"example" for stored data.'
        )
