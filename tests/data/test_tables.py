"""Tables: raw columns of each format, categories, errors with file, row and column, and memory that stays small."""

import gzip
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import stored
from conftest import refusal

from tfpar import config
from tfpar.data import Loaded, audit, load
from tfpar.data.sources import table

COLORS = ("red", "blue", "grün", "red")
ROWS = 40


def settings(path: Path, **changes: Any) -> config.Data:
    """Tables whose files begin with `train`, in the order of the rows."""
    fields = {"directory": str(path), "validation_split": None, "normalization": "none", "shuffle_buffer": 0}
    return config.Data(source="table", **{**fields, **changes})


def written(path: Path, text: str | bytes, name: str = "train.csv", **changes: Any) -> config.Data:
    """One file of text."""
    (path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return settings(path, **changes)


def with_categories(name: str, path: Path, **changes: Any) -> config.Data:
    """Four files of ten rows with numbers, words and codes, and one to validate with others than training rows have."""
    columns = {
        "number": [i / 4 for i in range(ROWS)],
        "color": [COLORS[i % 4] for i in range(ROWS)],
        "code": [i % 5 - 1 for i in range(ROWS)],
        "label": [("yes", "no", "maybe")[i % 3] for i in range(ROWS)],
    }
    for shard in range(4):
        stored.write_table(
            name, path / f"train-{shard}", {key: cells[shard * 10 :][:10] for key, cells in columns.items()}
        )
    new = {"number": [1.0, 2.0], "color": ["pink", "blue"], "code": [7, -1], "label": ["no", "yes"]}
    stored.write_table(name, path / "test-0", new)
    return settings(path, **{"validation_split": "test", "category_columns": ("color", "code", "label"), **changes})


def only_batch(batches: Any) -> tuple[dict[str, Any], Any]:
    ((columns, labels),) = list(batches)
    return {name: cells.numpy() for name, cells in columns.items()}, labels.numpy()


def loaded_whole(own: config.Data) -> Loaded:
    return load(own, global_batch_size=64, seed=0)


@pytest.mark.parametrize("name", stored.TABLES)
def test_raw_columns_keep_their_names_and_types_and_labels_of_words_are_classes(name: str, tmp_path: Path) -> None:
    loaded = loaded_whole(with_categories(name, tmp_path, normalization="standard"))
    columns, labels = only_batch(loaded.train)
    assert {key: cells.shape for key, cells in columns.items()} == dict.fromkeys(("number", "color", "code"), (ROWS, 1))
    assert columns["number"].dtype == np.float32
    np.testing.assert_array_equal(columns["number"][:, 0], np.arange(ROWS) / 4)
    assert [word.decode() for word in columns["color"][:4, 0]] == list(COLORS)
    codes = ["-1", "0", "1", "2", "3"] if name == "csv" else [-1, 0, 1, 2, 3]
    assert [cell.decode() if name == "csv" else int(cell) for cell in columns["code"][:5, 0]] == codes
    assert loaded.class_names == ("maybe", "no", "yes")
    assert labels[:3].tolist() == [2, 1, 0]
    number, color, code = loaded.columns or ()
    assert (number.mean, number.variance) == pytest.approx((4.875, columns["number"].var()))
    assert color.vocabulary == ("blue", "grün", "red")
    assert list(code.vocabulary or ()) == sorted(codes)
    held_out, held_out_labels = only_batch(loaded.validation)
    assert held_out["color"].tolist() == [[b"pink"], [b"blue"]], "unknown words stay raw"
    assert held_out_labels.tolist() == [1, 2]
    assert loaded.num_train_examples == ROWS


@pytest.mark.few(1)
@pytest.mark.parametrize("shard_by", ["file", "example"])
def test_workers_read_the_words_of_their_shards(shard_by: Any, tmp_path: Path) -> None:
    own = with_categories("parquet", tmp_path, shard_by=shard_by, num_shards=2, shuffle_buffer=100)
    loaded = load(own, global_batch_size=8, seed=1)
    assert audit(loaded.train, num_workers=2).ok
    assert loaded.train.cardinality() == 5


def test_rows_that_are_held_out_are_not_measured(tmp_path: Path) -> None:
    own = with_categories("csv", tmp_path)
    for shard in range(4):
        columns = {"number": [float(i) for i in range(10)], "color": [f"color {shard} {i}" for i in range(10)]}
        stored.write_table("csv", tmp_path / f"train-{shard}", {**columns, "label": ["no", "yes"] * 5})
    changes = {"validation_split": "test", "validation_share": 0.3, "normalization": "standard"}
    loaded = loaded_whole(own.model_copy(update={**changes, "category_columns": ("color", "label")}))
    train, _ = only_batch(loaded.train)
    held_out, _ = only_batch(loaded.validation)
    number, color = loaded.columns or ()
    assert number.mean == pytest.approx(train["number"].mean())
    assert set(color.vocabulary or ()) == {word.decode() for word in train["color"][:, 0]}
    assert len(train["color"]) + len(held_out["color"]) == ROWS
    assert loaded.num_train_examples == len(train["color"])


def test_means_of_large_numbers_are_exact(tmp_path: Path) -> None:
    rows = "".join(f"{16_000_000 + row % 3},5,0\n" for row in range(3000))
    loaded = loaded_whole(written(tmp_path, "x,y,label\n" + rows, normalization="standard"))
    x, constant = loaded.columns or ()
    assert (x.mean, x.variance) == pytest.approx((16_000_001, 2 / 3), rel=1e-12)
    assert (constant.mean, constant.variance) == (5.0, 1.0)


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        ("1,two,3", {}, ', row N: the cell "two" of column "y" is not a number: correct it, leave the column out of'),
        (
            "1,nan,3",
            {},
            ', row N: the cell of column "y" is nan, not a finite number: fill it, or set data.missing_val',
        ),
        ("1,,3", {}, ', row N: the cell of column "y" is empty: fill it, or set data.missing_value.'),
        ("1,2,", {"missing_value": 0.0}, ', row N: the cell of column "label" is empty: remove the row.'),
        ("1,2,x", {}, ', row N: the cell "x" of column "label" is not a number: correct it, set data.class_names, or'),
        ("1,2,7", {"num_classes": 4}, ', row N: the label 7 of column "label" must be an integer in 0 to 3, as data.n'),
        (
            "1,2",
            {},
            " cannot be read (CSV parse error: Row #N: Expected 3 columns, got 2: 1,2): repair or remove the f",
        ),
        (
            ",2,3",
            {"category_columns": ("x",)},
            ', row N: the cell of column "x" is empty: fill it, with a word such as',
        ),
        (
            "1,2,bb",
            {"class_names": ("3", "b")},
            ', row N: the label "bb" of column "label" is no class: did you mean "b',
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named_by_file_row_and_column(
    line: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    good = ["1,2,3"] * 2
    own = written(tmp_path, "\n".join(["x,y,label", *good, "", line, "1,2,3"]) + "\n", **changes)
    sentence = refusal(own)
    assert sentence.startswith(f"{tmp_path / 'train.csv'}{message.replace('N', str(len(good) + 2), 1)}"), sentence
    assert "\n" not in sentence


def test_a_cell_in_a_later_block_of_a_file_is_named(tmp_path: Path) -> None:
    """pyarrow reads blocks of a megabyte."""
    sentence = refusal(written(tmp_path, "x,y,label\n" + "1.25,2,3\n" * 200_000 + "1,two,3\n"))
    assert sentence.startswith(f'{tmp_path / "train.csv"}, row 200002: the cell "two" of column "y" is not'), sentence


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", b"", "cannot be read .*Empty CSV file"),
        ("train.csv", b"x,label\n", r'split "train" in .* holds no examples'),
        ("train.csv", b"x,x,label\n1,2,3\n", "multiple columns named x"),
        ("train.csv", b"label\n1\n", 'has no column except the label "label": add an input column.'),
        ("train.csv", b"x,y\n1,2\n", 'data.label_key = "label" is no column of .*train.csv'),
        ("train.csv", "größe,label\n1,2\n".encode("latin-1"), "is not UTF-8 text: save it as UTF-8."),
        (
            "train.csv.gz",
            gzip.compress(b"x,label\n" + bytes(range(48, 58)) * 999, mtime=0)[:-9],
            "cannot be read .Truncated compr",
        ),
        ("train.parquet", b"some text", "cannot be read"),
        ("train.jsonl", b'{"x": 1, "label": 0}\n{"x": \n', "cannot be read .JSON parse error"),
        ("train.jsonl", b'{"x": 1, "label": 0}\n{"label": 1}\n', 'row 2: the cell of column "x" is empty'),
        ("train.xlsx", b"PK", "The name of a table must end with one of .csv"),
    ],
)
def test_files_that_are_no_tables_get_one_sentence(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    sentence = refusal(written(tmp_path, content, name))
    assert re.search(message, sentence), sentence
    assert "\n" not in sentence
    assert name in sentence or "holds no examples" in sentence


def test_delimiters_quotes_marks_compression_and_missing_values_are_read(tmp_path: Path) -> None:
    text = gzip.compress('\ufeff"x";words;label\r\n1;"a;\nb";2\r\n;;4\r\n'.encode())
    changes = {"delimiter": ";", "columns": ("x",), "missing_value": -1.0}
    columns, labels = only_batch(loaded_whole(written(tmp_path, text, "train.csv.gz", **changes)).train)
    assert columns["x"].tolist() == [[1.0], [-1.0]]
    assert labels.tolist() == [[2.0], [4.0]]


def test_files_without_a_header_have_the_columns_that_are_named(tmp_path: Path) -> None:
    changes = {"column_names": ("x", "y", "label"), "columns": ("y", "x"), "num_classes": 2}
    own = written(tmp_path, "\ufeff1,2,0\n3,4,1\n", **changes)
    columns, labels = only_batch(loaded_whole(own).train)
    assert (columns["x"].tolist(), columns["y"].tolist()) == ([[1.0], [3.0]], [[2.0], [4.0]])
    assert labels.tolist() == [0, 1]
    own = written(tmp_path, "1,2,0\n3,,1\n", **changes)
    assert "train.csv, row 2: the cell of column" in refusal(own)


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({"x": [1.0, None, 3.0]}, {}, 'row 2: the cell of column "x" is empty: fill it, or set data.missing_value.'),
        ({"x": ["a", "b", "c"]}, {}, 'The column "x" of .* must hold numbers, but its type is string: leave it out of'),
        ({"label": ["a", "b", "c"]}, {}, 'The column "label" of .* but its type is string: set data.class_names, or'),
        (
            {"x": [1.5, 2.0, 3.0]},
            {"category_columns": ("x",)},
            "must hold words or whole numbers, but its type is double",
        ),
    ],
)
def test_cells_of_parquet_files_are_named_by_file_row_and_column(
    columns: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = stored.write_table("parquet", tmp_path / "train", {"x": [1.0, 2.0, 3.0], "label": [0, 1, 1], **columns})
    sentence = refusal(settings(tmp_path, **changes))
    assert re.search(message, sentence), sentence
    assert str(path) in sentence
    assert "\n" not in sentence


def test_numbers_of_all_types_and_dictionaries_are_read(tmp_path: Path) -> None:
    columns = {
        "x": pyarrow.array([1, None, 3], pyarrow.int8()),
        "flag": [True, False, True],
        "label": pyarrow.array(["b", "a", "b"]).dictionary_encode(),
    }
    stored.write_table("parquet", tmp_path / "train", columns)
    loaded = loaded_whole(settings(tmp_path, class_names=("a", "b"), missing_value=7.0))
    found, labels = only_batch(loaded.train)
    assert found["x"].tolist() == [[1], [7], [3]]
    assert found["flag"].tolist() == [[1], [0], [1]]
    assert labels.tolist() == [1, 0, 1]


def test_a_column_that_is_no_category_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = with_categories("csv", tmp_path)
    misspelt = refusal(own.model_copy(update={"category_columns": ("colour", "label")}))
    assert 'data.category_columns = "colour" is no input column of' in misspelt
    assert 'did you mean "color"?' in misspelt
    monkeypatch.setattr(table, "MAX_CATEGORIES", 4)
    assert refusal(own) == (
        'A column of data.category_columns must have at most 4 different values, and "code" has more: leave it out of '
        "the inputs."
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (['data.category_columns=["a"]'], 'data.category_columns = ["a"] is read only from data.source table'),
        (['data.source="table"', 'data.category_columns=["a", "a"]'], "has a name twice"),
        (['data.source="table"', 'data.columns=["b"]', 'data.category_columns=["a"]'], "which is not in data.columns"),
        (
            ['data.source="table"', 'data.category_columns=["label"]', "data.num_classes=3"],
            "so that its words are the classes, and data.num_classes = 3 sets them too: leave one of them out",
        ),
    ],
)
def test_settings_of_categories_that_cannot_be_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the message is compared below
        config.load(None, ['data.directory="."', *overrides])
    assert message in str(caught.value)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_rows_are_streamed(name: str, tmp_path: Path) -> None:
    """200,000 rows of 8 columns are 6.4 MB as float32; Python, NumPy and Arrow hold a part of them at a time."""
    num_rows = 200_000
    columns = {f"x{place}": np.arange(num_rows) % 1000 for place in range(8)} | {"label": np.arange(num_rows) % 2}
    if name == "csv":
        stored.write_table(name, tmp_path / "train", columns)
    else:
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "train.parquet", row_group_size=10_000)
    loaded = load(settings(tmp_path, num_classes=2), global_batch_size=8192, seed=0)
    tracemalloc.start()
    num_read = sum(len(labels) for _, labels in loaded.train)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_read == num_rows
    assert peak < 3e6, f"{peak / 1e6:.1f} MB"
