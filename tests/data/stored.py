"""Small datasets in common forms: folders of images, tables in each format, and a function."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import tensorflow as tf
from PIL import Image

from tfpar import config

NUM_FILES = 4
ROWS = 40  # of all files together
CLASSES = ("no", "yes", "maybe")


def image_settings(path: Path, **changes: Any) -> config.Data:
    """Three classes with 12, 14 and 14 images of 6x4, each of one colour that no other has."""
    colours = iter(range(1, ROWS + 1))
    for name, count in zip(("cat", "dog", "eel"), (12, 14, 14), strict=True):
        folder = path / "train" / name
        folder.mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (6, 4), (next(colours), 100, 200)).save(folder / f"{number:02}.png")
    fields = {"directory": str(path), "image_size": (4, 6), "validation_split": None, "normalization": "none"}
    return config.Data(source="image_folder", **{**fields, **changes})


def rows() -> tuple[list[list[float]], list[str]]:
    """Row i holds i and i / 8, its label is a word."""
    return [[float(i), i / 8] for i in range(ROWS)], [CLASSES[i % 3] for i in range(ROWS)]


def write_table(name: str, path: Path, columns: dict[str, Any]) -> Path:
    """Write one file of a format, its ending set; Parquet files have row groups of three. Return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_name(f"{path.name}.{ENDINGS[name]}")
    table = pyarrow.table(columns)
    if name == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    elif name == "feather":
        pyarrow.feather.write_feather(table, str(path))
    elif name == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


ENDINGS = {"csv": "csv", "parquet": "parquet", "feather": "feather", "json lines": "jsonl"}
TABLES = tuple(ENDINGS)


def table_settings(name: str, path: Path, **changes: Any) -> config.Data:
    """Rows in four files with a column of words that is not read."""
    inputs, labels = rows()
    for shard in range(NUM_FILES):
        own = range(shard * 10, shard * 10 + 10)
        columns = {
            "eighth": [inputs[i][1] for i in own],
            "words": ["a, b"] * 10,
            "answer": [labels[i] for i in own],
            "number": [int(inputs[i][0]) for i in own],
        }
        write_table(name, path / f"train-{shard}", columns)
    return config.Data(source="table", **table_fields(path, changes))


def table_fields(path: Path, changes: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "directory": str(path),
        "columns": ("number", "eighth"),
        "label_key": "answer",
        "class_names": CLASSES,
        "validation_split": None,
        "normalization": "none",
    }
    return {**fields, **changes}


def examples(num_examples: int = ROWS) -> tf.data.Dataset:
    """What `python_settings` reads: the same rows again."""
    inputs, labels = rows()
    pairs = (tf.constant(inputs), tf.constant([CLASSES.index(label) for label in labels]))
    return tf.data.Dataset.from_tensor_slices(pairs).take(num_examples)


def python_settings(path: Path, **changes: Any) -> config.Data:
    fields = {"function": "stored.examples", "num_classes": 3, "normalization": "none"}
    return config.Data(source="python", **{**fields, **changes})


MAKERS: dict[str, Callable[..., config.Data]] = {
    "image_folder": image_settings,
    **{name: partial(table_settings, name) for name in TABLES},
    "python": python_settings,
}


def numbers(source: str, batches: Sequence[Any]) -> list[int]:
    """What tells the examples of some batches apart: 0 to `ROWS` - 1."""
    if source == "image_folder":
        return [int(image[0, 0, 0]) - 1 for batch in batches for image in np.asarray(batch[0])]
    # The columns of a table come in the order of their names: eighth, number.
    return [int(row[0]) for batch in batches for row in np.asarray(batch[1 if source in TABLES else 0])]
