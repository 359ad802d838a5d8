"""Folders of CSV files: rows of numbers and a label, read line by line and never held in memory.

The graph reports only that a row is invalid; the files are then read once more, with Python's own reader, to name the
file, the line and the cell.
"""

import csv
import functools
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfpar import config
from tfpar.config import toml
from tfpar.data.batching.autotuning import without_autotuning
from tfpar.data.sources import categories, tables
from tfpar.data.sources.files import FILES_AT_ONCE, of_split
from tfpar.data.sources.held_out import Part, keeps, of_settings
from tfpar.data.sources.split import Split, check

NOT_FINITE = "A cell is not a finite number."
LARGEST = float(np.finfo(np.float32).max)
UNREADABLE = re.compile(
    r"Field \d+ in record|is required but missing in record|Expect \d+ fields but have|[Qq]uoted field|"
    + "|".join(re.escape(sentence) for sentence in (NOT_FINITE, tables.WRONG_LABEL, categories.EMPTY))
)


def read(settings: config.Data) -> tuple[Split, Split | None]:
    """Read the training and the validation rows of a folder of CSV files; check the first line of each file.

    Args:
        settings: Uses the splits, `columns`, `label_key`, `class_names`, `num_classes`, `missing_value`, `column_names`
            and `delimiter`.

    Raises:
        FileNotFoundError: No such folder, split or file.
        ValueError: A file without a header line, or with other columns than the first.
    """
    return of_settings(settings, functools.partial(_split, vocabularies=_vocabularies(settings)))


def _vocabularies(settings: config.Data) -> categories.Vocabularies:
    """Read the training rows once, and return the words of each category column."""
    names = settings.category_columns
    if names is None:
        return {}
    paths = of_split(settings, settings.train_split, "CSV")
    header = _column_names(settings, paths[0])
    columns = tables.selected_columns(settings, header, paths[0])
    places = [columns.places[columns.inputs.index(name)] for name in names]

    def words(lines: tf.Tensor) -> tf.Tensor:
        cells = tf.io.decode_csv(_without_mark(settings, lines), [tf.constant([""])] * len(header), settings.delimiter)
        return tf.stack([categories.strip(cells[place]) for place in places], axis=1)

    part: Part = "all" if settings.validation_share is None else "train"
    rows = without_autotuning(_rows(settings, paths, part, words).batch(tables.BLOCK_ROWS))
    blocks = ([[word.decode() for word in column] for column in block.T] for block in rows.as_numpy_iterator())
    try:
        return categories.vocabularies(names, blocks, f'split "{settings.train_split}"')
    except UnicodeDecodeError:
        raise ValueError(problem(settings)) from None


def problem(settings: config.Data) -> str | None:
    """Return a sentence about the first invalid row, with file, line and cell; None if all rows are valid.

    Args:
        settings: As for `read`.
    """
    try:
        return _problem(settings)
    except ValueError as error:  # a file that is no text, or corrupt
        return str(error)


def _problem(settings: config.Data) -> str | None:
    splits = [settings.train_split]
    if settings.validation_share is None and settings.validation_split is not None:
        splits.append(settings.validation_split)
    for path in (path for split in splits for path in of_split(settings, split, "CSV")):
        columns = tables.selected_columns(settings, _column_names(settings, path), path)
        for number, line in _lines(path):
            if line.strip() and (settings.column_names or number > 1):
                found = _row_problem(settings, columns, _column_names(settings, path), line)
                if found:
                    return f"{path}, line {number}: {found}"
    return None


def _row_problem(settings: config.Data, columns: tables.Columns, names: Sequence[str], line: str) -> str | None:
    if line.count('"') % 2:
        return "a quoted cell does not end in this line: write each row in one line, or remove the quote."
    cells = next(csv.reader([line], delimiter=settings.delimiter))
    if len(cells) != len(names):
        return (
            f"the row has {len(cells)} cells, but there are {len(names)} columns: correct the row, or data.delimiter."
        )
    for name, place in zip((*columns.inputs, columns.label), columns.places, strict=True):
        if name in (settings.category_columns or ()):
            wrong = None if cells[place].strip(categories.SPACE) else "is empty: fill it, with a word such as unknown"
        else:
            wrong = _cell_problem(settings, cells[place], is_label=name == columns.label)
        if wrong:
            return f'the cell {toml.show(cells[place])} of column "{name}" {wrong}.'
    return None


def _cell_problem(settings: config.Data, cell: str, *, is_label: bool) -> str | None:
    if not is_label and cell == "" and settings.missing_value is not None:
        return None
    if not cell.strip():
        return f"is empty: {'remove the row' if is_label else 'fill it, or set data.missing_value'}"
    if not (is_label and settings.class_names is not None) and not _is_number(cell):
        way_out = "set data.class_names" if is_label else "leave the column out of data.columns"
        return f"is not a finite number: correct it, or {way_out}"
    return tables.label_problem(settings, cell) if is_label else None


def _is_number(cell: str) -> bool:
    try:
        return abs(float(cell)) <= LARGEST
    except ValueError:
        return False


def _split(settings: config.Data, split: str, part: Part, vocabularies: categories.Vocabularies) -> Split:
    paths = of_split(settings, split, "CSV")
    names = _column_names(settings, paths[0])
    columns = tables.selected_columns(settings, names, paths[0])
    for path in paths[1:]:
        others = _column_names(settings, path)
        if others != names:
            raise ValueError(
                f"All files of a split must have the same columns in the same order, but {path} has "
                f"{', '.join(others)} and {paths[0]} has {', '.join(names)}: correct one of them."
            )

    def parse(lines: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _parse(settings, lines, len(names), columns, vocabularies)

    @functools.cache  # the same lines in the same order in each pass, so traced once
    def rows(num_file_shards: int = 1, file_shard: int = 0, num_shards: int = 1, shard: int = 0) -> tf.data.Dataset:
        own = paths[file_shard::num_file_shards]
        return _rows(settings, own, part, parse, num_shards, shard)

    origin = f'split "{split}" in {settings.directory}'
    return Split(
        stored=rows(),
        decode=None,
        num_examples=None,
        num_classes=tables.num_classes(settings),
        origin=f"validation share of the {origin}" if part == "validation" else origin,
        read_files=lambda num_shards, shard: rows(num_shards, shard),
        num_files=len(paths),
        encoded=False,
        class_names=settings.class_names,
        read_examples=lambda num_shards, shard: rows(1, 0, num_shards, shard),
        vocabularies=vocabularies or None,
        one_hot=categories.one_hot_channels(columns.inputs, vocabularies),
    )


def _column_names(settings: config.Data, path: Path) -> list[str]:
    line = next((line for _, line in _lines(path)), "")
    if not line.strip():
        raise ValueError(f"{path} begins with an empty line or is an empty file: write the names of its columns there.")
    if settings.column_names is not None:
        return list(settings.column_names)
    return [name.strip() for name in next(csv.reader([line], delimiter=settings.delimiter))]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers, from 1."""
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: save it as UTF-8.") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is corrupt ({error}): remove, repair or replace the file.") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="\n")
    return path.open(encoding="utf-8-sig", newline="\n")


def _rows(
    settings: config.Data,
    paths: list[Path],
    part: Part,
    parse_lines: Callable[[tf.Tensor], Any],
    num_shards: int = 1,
    shard: int = 0,
) -> tf.data.Dataset:
    """Apply `parse_lines` to blocks of the lines of some files, and return the single rows."""

    @tf.function(autograph=False)
    def parse(numbers: tf.Tensor, lines: tf.Tensor, name: tf.Tensor) -> Any:
        own = keeps(numbers, name, part, settings.validation_share) & (tf.strings.strip(lines) != "")
        return parse_lines(tf.boolean_mask(lines, own))

    @tf.autograph.experimental.do_not_convert
    def read_file(place: tf.Tensor, path: tf.Tensor) -> tf.data.Dataset:
        name = tf.strings.split(path, "/")[-1]
        compression = tf.where(tf.strings.regex_full_match(name, r".*\.gz"), "GZIP", "")
        lines = tf.data.TextLineDataset(path, compression_type=compression)
        numbered = lines.enumerate() if settings.column_names else lines.skip(1).enumerate()
        # Each file begins with another shard, so that many short files fill all shards equally.
        blocks = numbered.shard(num_shards, (shard - place) % num_shards).batch(tables.BLOCK_ROWS)
        return blocks.map(
            lambda numbers, lines: parse(numbers, lines, name),
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )

    # Whole blocks are interleaved and unbatched at the end: faster than single rows.
    files = tf.data.Dataset.from_tensor_slices([str(path) for path in paths]).enumerate()
    return files.interleave(
        read_file,
        cycle_length=min(FILES_AT_ONCE, len(paths)),
        block_length=1,
        num_parallel_calls=tf.data.AUTOTUNE,
        deterministic=True,
    ).unbatch()


def _parse(
    settings: config.Data,
    lines: tf.Tensor,
    num_columns: int,
    columns: tables.Columns,
    vocabularies: categories.Vocabularies,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return lines `[rows]` as inputs float32 `[rows, inputs]` and labels."""
    *inputs, label = columns.places
    words = {
        place: vocabularies[name] for name, place in zip(columns.inputs, inputs, strict=True) if name in vocabularies
    }
    # All columns, not decode_csv's select_cols: with it TensorFlow 2.21 accepts a row that has too many cells.
    defaults = [tf.constant([""]) for _ in range(num_columns)]
    for place in inputs:
        if place in words:
            continue
        missing = [] if settings.missing_value is None else [settings.missing_value]
        defaults[place] = tf.constant(missing, tf.float32)
    defaults[label] = tf.constant([], tf.string if settings.class_names is not None else tf.float32)
    cells = tf.io.decode_csv(_without_mark(settings, lines), defaults, settings.delimiter)
    channels = [
        categories.encode(categories.strip(cells[place]), words[place])
        if place in words
        else cells[place][:, tf.newaxis]
        for place in inputs
    ]
    rows = tf.concat(channels, axis=1)
    finite = tf.reduce_all(tf.math.is_finite(rows))
    if settings.class_names is None:
        finite &= tf.reduce_all(tf.math.is_finite(cells[label]))
    return check(finite, tf.constant(NOT_FINITE), rows), tables.labels(settings, cells[label])


def _without_mark(settings: config.Data, lines: tf.Tensor) -> tf.Tensor:
    """Remove the byte order mark from files without a header, whose first cell it precedes."""
    return lines if settings.column_names is None else tf.strings.regex_replace(lines, "^\ufeff", "")
