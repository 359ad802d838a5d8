"""CSV and Parquet files: cells that cannot be read are named by file, line and column, and memory stays small."""

import gzip
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import epoch, refusal

from tfpar import config
from tfpar.data import load


def read(settings: config.Data) -> list[Any]:
    return epoch(load(settings, global_batch_size=64, seed=0).train)


def plain(path: Path, **changes: Any) -> config.Data:
    """One CSV file `train.csv` of x, y and the label."""
    fields = {"directory": str(path), "validation_split": None, "normalization": "none", "shuffle_buffer": 0}
    return config.Data(**{"source": "csv", **fields, **changes})


@pytest.mark.parametrize("late", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        ("1,two,3", {}, 'the cell "two" of column "y" is not a finite number: correct it, or leave the column out'),
        ("1,nan,3", {}, 'the cell "nan" of column "y" is not a finite number'),
        ("1,1e39,3", {}, 'the cell "1e39" of column "y" is not a finite number'),
        ("1,,3", {}, 'the cell "" of column "y" is empty: fill it, or set data.missing_value.'),
        ("1,2,", {"missing_value": 0.0}, 'the cell "" of column "label" is empty: remove the row.'),
        ("1,2,x", {}, 'the cell "x" of column "label" is not a finite number: correct it, or set data.class_names.'),
        ("1,2,7", {"num_classes": 4}, 'the cell "7" of column "label" must be an integer in 0 to 3, as data.num_cl'),
        ("1,2,1.5", {"num_classes": 4}, 'the cell "1.5" of column "label" must be an integer in 0 to 3'),
        ("1,2", {}, "the row has 2 cells, but there are 3 columns: correct the row, or data.delimiter."),
        ("1,2,3,4", {"columns": ("x",)}, "the row has 4 cells, but there are 3 columns"),
        ('1,"2,3', {}, "a quoted cell does not end in this line: write each row in one line, or remove the quote."),
    ],
)
def test_a_row_that_cannot_be_read_is_named_by_file_line_and_cell(
    line: str, changes: dict[str, Any], message: str, late: bool, tmp_path: Path
) -> None:
    good = ["1,2,3"] * (3000 if late else 2)  # later than what a check of the first row reads
    path = tmp_path / "train.csv"
    path.write_text("\n".join(["x,y,label", *good, "", line, "1,2,3"]) + "\n")
    sentence = refusal(plain(tmp_path, **changes))
    assert sentence.startswith(f"{path}, line {len(good) + 3}: {message}"), sentence
    assert "\n" not in sentence


def test_a_label_that_no_class_has_is_named_with_the_class_that_is_near(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("x,label\n1, setosa\n2,versicolour\n")
    sentence = refusal(plain(tmp_path, class_names=("setosa", "versicolor")))
    expected = f'{tmp_path / "train.csv"}, line 3: the cell "versicolour" of column "label" is none of '
    assert sentence == expected + 'data.class_names: did you mean "versicolor"? There are: setosa, versicolor.'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", b"", "begins with an empty line or is an empty file: write the names of its columns there."),
        ("train.csv", b"x,label\n", r'split "train" in .* holds no examples'),
        ("train.csv", b"x,x,label\n1,2,3\n", 'has more than one column "x": name each once.'),
        ("train.csv", b"label\n1\n", 'has no column except the label "label": add an input column.'),
        ("train.csv", "größe,label\n1,2\n".encode("latin-1"), "is not UTF-8 text: save it as UTF-8."),
    ],
)
def test_files_that_are_no_tables_get_one_sentence(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    sentence = refusal(plain(tmp_path))
    assert re.search(message, sentence), sentence


def test_files_with_other_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train-0.csv").write_text("x,label\n1,2\n")
    (tmp_path / "train-1.csv").write_text("label,x\n1,2\n")
    sentence = refusal(plain(tmp_path))
    assert sentence.startswith("All files of a split must have the same columns in the same order, but")
    assert "train-1.csv has label, x and" in sentence


def test_delimiters_quotes_marks_compression_and_missing_values_are_read(tmp_path: Path) -> None:
    text = '\ufeff"x";words;label\r\n1;"a;b";2\r\n;;4\r\n'
    with gzip.open(tmp_path / "train.csv.gz", "wb") as file:
        file.write(text.encode())
    ((inputs, labels),) = read(plain(tmp_path, delimiter=";", columns=("x",), missing_value=-1.0))
    assert inputs.tolist() == [[1.0], [-1.0]]
    assert labels.tolist() == [[2.0], [4.0]]


def test_a_compressed_file_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.csv.gz"
    noise = np.random.default_rng(0).normal(size=5000)
    path.write_bytes(gzip.compress(("x,label\n" + "".join(f"{value},1\n" for value in noise)).encode())[:-30])
    assert refusal(plain(tmp_path)).startswith(f"{path} is corrupt (Compressed file ended before")


def test_files_without_a_header_have_the_columns_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("\ufeff1,2,0\n3,4,1\n", encoding="utf-8")
    ((inputs, labels),) = read(plain(tmp_path, column_names=("x", "y", "label"), columns=("y", "x"), num_classes=2))
    assert inputs.tolist() == [[2.0, 1.0], [4.0, 3.0]]
    assert labels.tolist() == [0, 1]


def parquet(path: Path, table: dict[str, Any], **changes: Any) -> config.Data:
    pyarrow.parquet.write_table(pyarrow.table(table), path / "train.parquet", row_group_size=2)
    fields = {"directory": str(path), "validation_split": None, "normalization": "none", "shuffle_buffer": 0}
    return config.Data(source="parquet", **{**fields, **changes})


@pytest.mark.parametrize(
    ("table", "changes", "message"),
    [
        ({"x": [1.0, None, 3.0]}, {}, 'row 2: the cell of column "x" is empty: fill it, or set data.missing_value.'),
        ({"x": [1.0, 2.0, float("inf")]}, {}, 'row 3: the cell of column "x" is inf, not a finite number'),
        (
            {"label": [1, None, 3]},
            {"missing_value": 0.0},
            'row 2: the cell of column "label" is empty: remove the row.',
        ),
        ({"label": [0, 1, 5]}, {"num_classes": 2}, 'row 3: the label 5 of column "label" must be an integer in 0 to 1'),
        ({"label": ["a", "b", None]}, {"class_names": ("a", "b")}, 'row 3: the cell of column "label" is empty'),
        (
            {"label": ["a", "b", "bb"]},
            {"class_names": ("a", "b")},
            'row 3: the label "bb" of column "label" is none of',
        ),
        ({"x": ["a", "b", "c"]}, {}, 'The column "x" of .* must hold numbers, but its type is string: leave it out of'),
        ({"label": ["a", "b", "c"]}, {}, 'The column "label" of .* but its type is string: set data.class_names.'),
        ({"x": [[1], [2], [3]]}, {}, "its type is list<"),
    ],
)
def test_cells_of_parquet_files_are_named_by_file_row_and_column(
    table: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = parquet(tmp_path, {"x": [1.0, 2.0, 3.0], "label": [0, 1, 1], **table}, **changes)
    sentence = refusal(settings)
    assert re.search(message, sentence), sentence
    assert str(tmp_path / "train.parquet") in sentence
    assert "\n" not in sentence


def test_numbers_of_all_types_and_dictionaries_are_read(tmp_path: Path) -> None:
    table = {
        "x": pyarrow.array([1, None, 3], pyarrow.int8()),
        "flag": [True, False, True],
        "label": pyarrow.array(["b", "a", "b"]).dictionary_encode(),
    }
    settings = parquet(tmp_path, table, class_names=("a", "b"), missing_value=7.0)
    ((inputs, labels),) = read(settings)
    assert inputs.tolist() == [[1, 1], [7, 0], [3, 1]]
    assert labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_that_is_no_parquet_file_is_named(whole: bool, tmp_path: Path) -> None:
    settings = parquet(tmp_path, {"x": [1.0], "label": [1]})
    path = tmp_path / "train.parquet"
    path.write_bytes(b"some text" if whole else path.read_bytes()[:-9])
    assert refusal(settings).startswith(f"{path} is no Parquet file, or it is corrupt (")


def test_without_pyarrow_one_sentence_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = parquet(tmp_path, {"x": [1.0], "label": [1]})
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r'needs the Python package pyarrow .*: run "pip install pyarrow"'):
        load(settings, global_batch_size=4, seed=0)


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_rows_are_streamed(source: str, tmp_path: Path) -> None:
    """200,000 rows of 8 columns are 6.4 MB as float32; Python and NumPy hold a part of them at a time."""
    num_rows = 200_000
    columns = {f"x{place}": np.arange(num_rows) % 1000 for place in range(8)} | {"label": np.arange(num_rows) % 2}
    if source == "csv":
        rows = "\n".join(",".join([str(row % 1000)] * 8 + [str(row % 2)]) for row in range(num_rows))
        (tmp_path / "train.csv").write_text(",".join(columns) + "\n" + rows + "\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet", row_group_size=10_000)
    settings = plain(tmp_path, num_classes=2, source=source)
    loaded = load(settings, global_batch_size=8192, seed=0)
    tracemalloc.start()
    num_read = sum(len(labels) for _, labels in loaded.train)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_read == num_rows
    assert peak < 3e6, f"{peak / 1e6:.1f} MB"
