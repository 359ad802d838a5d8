"""Small datasets of scikit-learn in common file formats, for the configurations of `configs/`.

    python -m tfpar.trainers.samples [folder]

writes into the folder, by default `samples`:

    digits/{train,test}/{0, ..., 9}/*.png   1,797 images of 8x8 pixels, a folder for each digit (image_folder.toml)
    breast_cancer/*.csv                     569 rows of 30 columns in 4 files, diagnosis in words (table.toml)
    diabetes/*.parquet                      442 rows of 10 columns in 4 files, a number (table_regression.toml)
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfpar.commands import command_line

if TYPE_CHECKING:
    import tensorflow as tf

NUM_FILES = 4
TEST_EVERY = 6  # as the digits of tfpar.data


def digits() -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return datasets of single examples for training and testing; `configs/python.toml` names this function.

    Returns:
        Two datasets of images `[8, 8, 1]`, uint8, and labels, int32.
    """
    import tensorflow as tf

    images, labels = _digits()
    is_test = np.arange(len(labels)) % TEST_EVERY == 0
    train, test = (tf.data.Dataset.from_tensor_slices((images[own], labels[own])) for own in (~is_test, is_test))
    return train, test


def write_digits(directory: Path) -> None:
    """Write the digits as PNG images to `train` and `test` in a directory, with a folder for each digit."""
    from PIL import Image  # comes with matplotlib

    for number, (image, label) in enumerate(zip(*_digits(), strict=True)):
        folder = directory / ("train" if number % TEST_EVERY else "test") / str(int(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(folder / f"{number:04}.png")


def write_breast_cancer(directory: Path) -> None:
    """Write 569 rows about breast tumours as CSV files; the column `diagnosis` contains words."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    words = [str(table.target_names[label]) for label in table.target]
    rows = [[*values, word] for values, word in zip(table.data.tolist(), words, strict=True)]
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_FILES):
        with (directory / f"part-{number}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([[*table.feature_names, "diagnosis"], *rows[number::NUM_FILES]])


def write_diabetes(directory: Path) -> None:
    """Write 442 rows about diabetes patients as Parquet files; the column `progression` contains a number."""
    import pyarrow
    import pyarrow.parquet
    from sklearn.datasets import load_diabetes

    patients = load_diabetes(scaled=False)
    columns = {str(name): patients.data[:, index] for index, name in enumerate(patients.feature_names)}
    table = pyarrow.table({**columns, "progression": patients.target})
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(NUM_FILES):
        own = table.take(list(range(number, table.num_rows, NUM_FILES)))
        pyarrow.parquet.write_table(own, directory / f"part-{number}.parquet", row_group_size=50)


def _digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    table = load_digits()
    return (table.images * (255 / 16)).round().astype("uint8")[..., None], table.target.astype("int32")


def main(arguments: Sequence[str]) -> int:
    """Write all samples.

    Args:
        arguments: The folder to write into, or nothing; or `--help`.

    Returns:
        The exit code, 0.
    """
    parser = argparse.ArgumentParser("python -m tfpar.trainers.samples", description="Write small datasets.")
    parser.add_argument("folder", nargs="?", default="samples", help="the folder to write into; by default samples")
    directory = Path(parser.parse_args(arguments).folder)
    write_digits(directory / "digits")
    write_breast_cancer(directory / "breast_cancer")
    write_diabetes(directory / "diabetes")
    print(f"Samples are in {directory}.")
    return 0


if __name__ == "__main__":
    command_line.run_plain(lambda: main(sys.argv[1:]))
