"""Folders of Parquet files: rows of numbers and a label, read with pyarrow block by block."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tfpar import config
from tfpar.config import toml
from tfpar.data.sources import categories, tables
from tfpar.data.sources.files import of_split
from tfpar.data.sources.held_out import Part, keeps, of_settings
from tfpar.data.sources.split import Split

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

ROW_GROUPS_AT_ONCE = 4  # one of each open file
BLOCK_ROWS = 1024

Block = tuple[npt.NDArray[np.float32], npt.NDArray[Any], int]  # inputs, labels, the number of the first row


def read(settings: config.Data) -> tuple[Split, Split | None]:
    """Read the training and the validation rows of a folder of Parquet files; check the schema of each file.

    Args:
        settings: Uses the splits, `columns`, `label_key`, `class_names`, `num_classes` and `missing_value`.

    Raises:
        FileNotFoundError: No such folder, split or file.
        ValueError: A file that is no Parquet file, lacks a column, or holds something else than numbers in one.
        ImportError: pyarrow is not installed.
    """
    return of_settings(settings, functools.partial(_split, vocabularies=_vocabularies(settings)))


def _vocabularies(settings: config.Data) -> categories.Vocabularies:
    """Read the category columns of the training rows once, and return the words of each."""
    names = settings.category_columns
    if names is None:
        return {}
    part: Part = "all" if settings.validation_share is None else "train"
    paths = of_split(settings, settings.train_split, "Parquet")
    for path in paths:
        _num_rows(settings, path)

    def blocks() -> Iterator[list[npt.NDArray[Any]]]:
        for path in paths:
            for batch, row in _batches(path, list(names)):
                numbers = tf.range(row, row + batch.num_rows, dtype=tf.int64)
                own = keeps(numbers, path.name, part, settings.validation_share).numpy()
                yield [np.array(_words(batch.column(name), name, path, row), object)[own] for name in names]

    return categories.vocabularies(names, blocks(), f'split "{settings.train_split}"')


def _split(settings: config.Data, split: str, part: Part, vocabularies: categories.Vocabularies) -> Split:
    paths = of_split(settings, split, "Parquet")
    counts = {path: _num_rows(settings, path) for path in paths}

    @functools.cache  # the same rows in the same order in each pass, so traced once
    def read_files(num_shards: int, shard: int) -> tf.data.Dataset:
        own = paths[shard::num_shards]
        rows = _rows(settings, own, part, vocabularies)
        if part != "all":
            return rows
        return rows.apply(tf.data.experimental.assert_cardinality(sum(counts[path] for path in own)))

    inputs = tables.selected_columns(settings, _names(paths[0]), paths[0]).inputs
    origin = f'split "{split}" in {settings.directory}'
    return Split(
        stored=read_files(1, 0),
        decode=None,
        num_examples=sum(counts.values()) if part == "all" else None,
        num_classes=tables.num_classes(settings),
        origin=f"validation share of the {origin}" if part == "validation" else origin,
        read_files=read_files,
        num_files=len(paths),
        encoded=False,
        class_names=settings.class_names,
        vocabularies=vocabularies or None,
        one_hot=categories.one_hot_channels(inputs, vocabularies),
    )


def _open(path: Path) -> "pyarrow.parquet.ParquetFile":
    try:
        import pyarrow.parquet  # slow to import, and only these files need it
    except ImportError as error:
        raise ImportError(
            f'data.source = "parquet" needs the Python package pyarrow ({error}): run "pip install pyarrow".'
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"{path} is no Parquet file, or it is corrupt ({str(error).splitlines()[0]}): remove or replace the file."
        ) from error


def _num_rows(settings: config.Data, path: Path) -> int:
    """Check the columns of a file, and return its number of rows."""
    import pyarrow

    with _open(path) as file:
        schema = file.schema_arrow
        columns = tables.selected_columns(settings, schema.names, path)
        for name in (*columns.inputs, columns.label):
            kind = schema.field(name).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
            is_number |= pyarrow.types.is_boolean(kind) or pyarrow.types.is_decimal(kind)
            is_word = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
            named = name == columns.label and settings.class_names is not None
            named |= name in (settings.category_columns or ())
            if not (is_number or (named and is_word)):
                way_out = (
                    "set data.class_names"
                    if name == columns.label
                    else "leave it out of data.columns, or name it in data.category_columns"
                )
                raise ValueError(f'The column "{name}" of {path} must hold numbers, but its type is {kind}: {way_out}.')
        return int(file.metadata.num_rows)


def _rows(
    settings: config.Data, paths: list[Path], part: Part, vocabularies: categories.Vocabularies
) -> tf.data.Dataset:
    """Return `(inputs, label)` pairs of the rows of some files, a few files open at a time."""
    columns = tables.selected_columns(settings, _names(paths[0]), paths[0])
    label = tf.TensorSpec([None], tf.string if settings.class_names is not None else tf.float32)
    channels = sum(categories.width(name, vocabularies) for name in columns.inputs)
    signature = (tf.TensorSpec([None, channels], tf.float32), label, tf.TensorSpec([], tf.int64))

    @tf.autograph.experimental.do_not_convert
    def read_file(index: tf.Tensor) -> tf.data.Dataset:
        name = tf.gather(tf.constant([path.name for path in paths]), index)
        blocks = tf.data.Dataset.from_generator(
            lambda chosen: _blocks(settings, paths[int(chosen)], vocabularies),
            output_signature=signature,
            args=(index,),
        )

        @tf.autograph.experimental.do_not_convert
        def finish(inputs: tf.Tensor, values: tf.Tensor, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            numbers = first + tf.range(tf.shape(inputs)[0], dtype=tf.int64)
            own = keeps(numbers, name, part, settings.validation_share)
            return tf.boolean_mask(inputs, own), tables.labels(settings, tf.boolean_mask(values, own))

        return blocks.map(finish)

    return (
        tf.data.Dataset.range(len(paths))
        .interleave(
            read_file,
            cycle_length=min(ROW_GROUPS_AT_ONCE, len(paths)),
            block_length=1,
            num_parallel_calls=tf.data.AUTOTUNE,
            deterministic=True,
        )
        .unbatch()
    )


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.schema_arrow.names)


def _blocks(settings: config.Data, path: Path, vocabularies: categories.Vocabularies) -> Iterator[Block]:
    """Yield the rows of a file in blocks of `BLOCK_ROWS`, the last one smaller; one row group is open at a time."""
    columns = tables.selected_columns(settings, _names(path), path)
    for batch, row in _batches(path, [*columns.inputs, columns.label]):
        inputs = [
            categories.encode_array(_words(batch.column(name), name, path, row), vocabularies[name])
            if name in vocabularies
            else _numbers(settings, batch.column(name), name, path, row)[:, np.newaxis]
            for name in columns.inputs
        ]
        label = batch.column(columns.label)
        yield np.concatenate(inputs, axis=1), _labels(settings, label, columns.label, path, row), row


def _batches(path: Path, columns: list[str]) -> Iterator[tuple["pyarrow.RecordBatch", int]]:
    """Yield columns of a file in blocks of `BLOCK_ROWS`, each with the number of its first row."""
    import pyarrow

    with _open(path) as file:
        row = 0
        try:
            for batch in file.iter_batches(BLOCK_ROWS, columns=columns, use_threads=False):
                yield batch, row
                row += batch.num_rows
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{path} is corrupt after row {row} ({str(error).splitlines()[0]}): remove or replace the file."
            ) from error


def _words(column: "pyarrow.Array", name: str, path: Path, row: int) -> list[str]:
    """Return a category column without surrounding whitespace; raise an error at the first empty cell."""
    try:
        words = [str(value).strip(categories.SPACE) if value is not None else "" for value in column.to_pylist()]
    except UnicodeDecodeError:
        raise ValueError(f'{path}, after row {row}: column "{name}" is not UTF-8 text: save it as UTF-8.') from None
    if "" in words:
        raise ValueError(
            f'{path}, row {row + words.index("") + 1}: the cell of column "{name}" is empty: fill it, with a word '
            "such as unknown."
        )
    return words


def _numbers(
    settings: config.Data, column: "pyarrow.Array", name: str, path: Path, row: int
) -> npt.NDArray[np.float32]:
    """Return a column of numbers as float32, empty cells filled; raise an error at the first that is not finite."""
    import pyarrow

    values: npt.NDArray[np.float32] = np.array(column.cast(pyarrow.float64(), safe=False), np.float64).astype(
        np.float32
    )
    empty = np.asarray(column.is_null())
    if settings.missing_value is not None and name != settings.label_key:
        values[empty] = settings.missing_value
        empty = np.zeros_like(empty)
    bad = np.flatnonzero(empty | ~np.isfinite(values))
    if bad.size:
        what = "is empty" if empty[bad[0]] else f"is {values[bad[0]]}, not a finite number"
        way_out = "remove the row" if name == settings.label_key else "fill it, or set data.missing_value"
        raise ValueError(f'{path}, row {row + int(bad[0]) + 1}: the cell of column "{name}" {what}: {way_out}.')
    return values


def _labels(settings: config.Data, column: "pyarrow.Array", name: str, path: Path, row: int) -> npt.NDArray[Any]:
    """Return the labels, as words if classes have names, else as numbers; raise an error at the first invalid one."""
    values: npt.NDArray[Any]
    if settings.class_names is None:
        values = _numbers(settings, column, name, path, row)
        right = (values >= 0) & (values < (settings.num_classes or 0)) & (values == np.round(values))
        bad = np.flatnonzero(~right if settings.num_classes else [])
    else:
        values = np.array([str(value) for value in column.to_pylist()], object)
        bad = np.flatnonzero(np.asarray(column.is_null()) | ~np.isin(values.astype(str), settings.class_names))
    if len(bad):
        first = int(bad[0])
        label = column[first].as_py()
        if label is None:
            raise ValueError(f'{path}, row {row + first + 1}: the cell of column "{name}" is empty: remove the row.')
        reason = tables.label_problem(settings, label)
        raise ValueError(f'{path}, row {row + first + 1}: the label {toml.show(label)} of column "{name}" {reason}.')
    return values
