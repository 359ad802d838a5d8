"""Tables: files of rows with named columns, for a model that preprocesses raw columns in Keras layers.

Cells are packed by dtype until they are batched, because a row of three tensors shuffles faster than one of a hundred.

    row of a file           packed                                            batch for the model
    age  color  price       {"float32": [age, price], "string": [color]}      {"age": [batch, 1], "color": [batch, 1],
                                                                               "price": [batch, 1]}
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfpar import config
from tfpar.config import toml
from tfpar.data.sources.files import split_files
from tfpar.data.sources.held_out import Part, in_part, train_and_validation
from tfpar.data.sources.split import Column, Split, close_to
from tfpar.data.sources.table_file import COUNTED, Array, TableFile
from tfpar.messages import received

MAX_CATEGORIES = 10_000  # of one column; more must be names or numbers


class Table(NamedTuple):
    """A table as described by its settings and its training rows.

    Args:
        settings: The section `data`.
        dtypes: The dtype of each input column, then that of the label.
        columns: The input columns.
        class_names: The names of the classes, if labels are words.
        num_rows: The training rows of each file, as far as counted.
    """

    settings: config.Data
    dtypes: Mapping[str, str]
    columns: tuple[Column, ...]
    class_names: tuple[str, ...] | None
    num_rows: Mapping[TableFile, int]


def read(settings: config.Data) -> tuple[Split, Split | None]:
    """Read the training and validation rows of a folder of tables; check the columns of each file.

    Args:
        settings: Uses the splits, `num_classes`, `normalization` and what `TableFile` uses.

    Raises:
        FileNotFoundError: If there is no such folder, split or file.
        ValueError: If a file cannot be read, lacks a column, or has a column that does not fit the settings.
    """
    part: Part = "all" if settings.validation_share is None else "train"
    table = _measured(settings, part)
    return train_and_validation(settings, lambda split, part: _split(table, split, part))


def unpacked(columns: Sequence[Column], packed: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Unpack rows that are packed by dtype into named columns `[batch, 1]`.

    >>> unpacked([Column("x", "float32")], {"float32": tf.constant([[1.0], [2.0]])})["x"].numpy().tolist()
    [[1.0], [2.0]]
    """
    cells = {
        name: packed[dtype][:, index : index + 1]
        for dtype, names in _groups(columns).items()
        for index, name in enumerate(names)
    }
    return {column.name: cells[column.name] for column in columns}


def _groups(columns: Sequence[Column]) -> dict[str, list[str]]:
    """Return the names of the columns of each dtype."""
    dtypes = dict.fromkeys(column.dtype for column in columns)
    return {dtype: [column.name for column in columns if column.dtype == dtype] for dtype in dtypes}


def _files(settings: config.Data, split: str, dtypes: Mapping[str, str] | None = None) -> list[TableFile]:
    """List the files of a split; check that their columns have the dtypes of the first training file."""
    files = [TableFile(path, settings) for path in split_files(settings, split, "table")]
    dtypes = dtypes or files[0].dtypes(None)
    inputs = [name for name in dtypes if name != settings.label_key]
    for file in files:
        for name, dtype in file.dtypes(inputs).items():
            if dtype != dtypes[name]:
                raise ValueError(
                    f"The column {toml.show(name)} must have one type in all files, but it is {dtype} in {file.path} "
                    f"and {dtypes[name]} in others: write it in one type."
                )
    return files


def _measured(settings: config.Data, part: Part) -> Table:
    """Read the training rows once for means and categories of their columns, if the settings need these."""
    files = _files(settings, settings.train_split)
    dtypes = files[0].dtypes(None)
    inputs = tuple(Column(name, dtype) for name, dtype in dtypes.items() if name != settings.label_key)
    table = Table(settings, dtypes, inputs, settings.class_names, {})
    if settings.normalization != "standard" and settings.category_columns is None:
        counted = [file for file in files if part == "all" and file.format in COUNTED]
        return table._replace(num_rows={file: file.num_rows() for file in counted})
    moments = {name: _Moments() for name, dtype in dtypes.items() if dtype == "float32"}
    categories: dict[str, set[Any]] = {name: set() for name, dtype in dtypes.items() if dtype != "float32"}
    num_rows = dict.fromkeys(files, 0)
    for file, numbers, cells in _rows(table, files, part):
        num_rows[file] += len(numbers)
        for name, moment in moments.items():
            moment.add(cells[name])
        for name, values in categories.items():
            values.update(cells[name].tolist())
            _check_number(name, values)
    columns = (
        column._replace(vocabulary=tuple(sorted(categories[column.name])))
        if column.name in categories
        else moments[column.name].of(column, settings)
        for column in inputs
    )
    words = tuple(sorted(categories[settings.label_key])) if settings.label_key in categories else None
    return Table(settings, dtypes, tuple(columns), settings.class_names or words, num_rows)


def _check_number(name: str, values: set[Any]) -> None:
    if len(values) > MAX_CATEGORIES:
        raise ValueError(
            f"A column of data.category_columns must have at most {MAX_CATEGORIES:,} different values, and "
            f"{received.toml(name)} has more: leave it out of the inputs."
        )


class _Moments:
    """Mean and variance of a stream of numbers, updated by block in float64 (Chan, Golub and LeVeque, 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: Array) -> None:
        if not len(values):
            return
        values = values.astype(np.float64)
        mean = float(values.mean())
        count, difference = self.count + len(values), mean - self.mean
        self.squares += float(np.square(values - mean).sum()) + difference**2 * self.count * len(values) / count
        self.mean += difference * len(values) / count
        self.count = count

    def of(self, column: Column, settings: config.Data) -> Column:
        """Return a column with its mean and variance; a constant one gets variance 1, so that it becomes 0."""
        if settings.normalization != "standard":
            return column
        return column._replace(mean=self.mean, variance=self.squares / self.count if self.squares else 1.0)


def _split(table: Table, split: str, part: Part) -> Split:
    files = _files(table.settings, split, table.dtypes)
    num_rows = {} if part == "validation" else table.num_rows

    @functools.cache  # the same rows in the same order in each pass, so traced once
    def rows(num_file_shards: int = 1, file_shard: int = 0, num_shards: int = 1, shard: int = 0) -> tf.data.Dataset:
        own = files[file_shard::num_file_shards]
        blocks = functools.partial(_blocks, table, own, part, num_shards, shard)
        dataset = tf.data.Dataset.from_generator(blocks, output_signature=_signature(table)).unbatch()
        if not all(file in num_rows for file in own):
            return dataset
        total = sum(num_rows[file] for file in own)
        return dataset.apply(tf.data.experimental.assert_cardinality((total - shard + num_shards - 1) // num_shards))

    origin = f'split "{split}" in {table.settings.directory}'
    return Split(
        stored=rows(),
        decode=None,
        num_examples=sum(num_rows[file] for file in files) if all(file in num_rows for file in files) else None,
        num_classes=table.settings.num_classes if table.class_names is None else len(table.class_names),
        origin=f"validation share of the {origin}" if part == "validation" else origin,
        read_files=lambda num_shards, shard: rows(num_shards, shard),
        num_files=len(files),
        encoded=False,
        class_names=table.class_names,
        read_examples=lambda num_shards, shard: rows(1, 0, num_shards, shard),
        columns=table.columns,
    )


def _signature(table: Table) -> Any:
    packed = {dtype: tf.TensorSpec([None, len(names)], dtype) for dtype, names in _groups(table.columns).items()}
    if table.settings.num_classes is None and table.class_names is None:
        return packed, tf.TensorSpec([None, 1], tf.float32)
    return packed, tf.TensorSpec([None], tf.int32)


def _blocks(
    table: Table, files: Sequence[TableFile], part: Part, num_shards: int, shard: int
) -> Iterator[tuple[dict[str, Array], Array]]:
    """Yield the rows of some files, packed by dtype, with their labels."""
    groups = _groups(table.columns)
    for file, numbers, cells in _rows(table, files, part, num_shards, shard):
        packed = {dtype: np.stack([cells[name] for name in names], axis=1) for dtype, names in groups.items()}
        yield packed, _labels(table, file, cells[table.settings.label_key], numbers)


def _rows(
    table: Table, files: Sequence[TableFile], part: Part, num_shards: int = 1, shard: int = 0
) -> Iterator[tuple[TableFile, Array, dict[str, Array]]]:
    """Yield blocks of checked rows in order: their file, their row numbers in it, and cells by column name."""
    num_kept = 0  # in all shards
    for file in files:
        first = 0
        for block in file.blocks(table.dtypes):
            numbers = np.arange(first, first + block.num_rows)
            if part != "all":
                numbers = numbers[in_part(numbers, file.path.name, part, table.settings.validation_share).numpy()]
            num_before, num_kept = num_kept, num_kept + len(numbers)
            own = numbers[(shard - num_before) % num_shards :: num_shards]
            rows = block.take(own - first)
            first += block.num_rows
            yield file, own, {name: file.cells(rows[name], name, dtype, own) for name, dtype in table.dtypes.items()}


def _labels(table: Table, file: TableFile, values: Array, numbers: Array) -> Array:
    """Return numbers `[rows, 1]` for a regression, else classes `[rows]`; raise ValueError for an invalid label."""
    names, num_classes, column = table.class_names, table.settings.num_classes, toml.show(table.settings.label_key)
    if names is not None:
        indices = {name: index for index, name in enumerate(names)}
        classes = np.array([indices.get(value, -1) for value in values], np.int32)
    elif num_classes is not None:
        is_class = (values >= 0) & (values < num_classes) & (values == np.round(values))
        classes = np.where(is_class, values, -1).astype(np.int32)
    else:
        return values[:, np.newaxis]
    bad = np.flatnonzero(classes < 0)
    if not bad.size:
        return classes
    label = values[bad[0]]
    if names is not None:
        problem = f"{toml.show(label)} of column {column} is no class: {close_to(label, names)}"
    else:
        last = (num_classes or 0) - 1
        problem = (
            f"{label:g} of column {column} must be an integer in 0 to {last}, as data.num_classes = {num_classes}."
        )
    raise ValueError(f"{file.row(numbers[bad[0]])}: the label {problem}")
