"""Small datasets in common forms: folders of images, CSV and Parquet files, and a function."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
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


def csv_settings(path: Path, **changes: Any) -> config.Data:
    """Rows in four files with a column of words that is not read."""
    inputs, labels = rows()
    path.mkdir(parents=True, exist_ok=True)
    for shard in range(NUM_FILES):
        own = range(shard * 10, shard * 10 + 10)
        lines = [f'{inputs[i][1]},"a, b",{labels[i]},{inputs[i][0]}' for i in own]
        (path / f"train-{shard}.csv").write_text("eighth,words,answer,number\n" + "\n".join(lines) + "\n\n")
    return config.Data(source="csv", **table_fields(path, changes))


def parquet_settings(path: Path, **changes: Any) -> config.Data:
    """The same rows in four files with row groups of three."""
    inputs, labels = rows()
    path.mkdir(parents=True, exist_ok=True)
    for shard in range(NUM_FILES):
        own = range(shard * 10, shard * 10 + 10)
        columns = {
            "eighth": [inputs[i][1] for i in own],
            "words": ["a, b"] * 10,
            "answer": [labels[i] for i in own],
            "number": [int(inputs[i][0]) for i in own],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), path / f"train-{shard}.parquet", row_group_size=3)
    return config.Data(source="parquet", **table_fields(path, changes))


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


MAKERS = {"image_folder": image_settings, "csv": csv_settings, "parquet": parquet_settings, "python": python_settings}


def numbers(source: str, batches: Sequence[Any]) -> list[int]:
    """What tells the examples of some batches apart: 0 to `ROWS` - 1."""
    if source == "image_folder":
        return [int(image[0, 0, 0]) - 1 for batch in batches for image in np.asarray(batch[0])]
    return [int(row[0]) for batch in batches for row in np.asarray(batch[0])]
