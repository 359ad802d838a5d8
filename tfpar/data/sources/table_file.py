"""A file of a table, read in blocks by `pyarrow.dataset`, with errors that name the cell."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tfpar import config
from tfpar.config import toml
from tfpar.data.sources.split import close_to
from tfpar.messages import received

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.dataset

Array = npt.NDArray[Any]

BLOCK_ROWS = 1024
FORMATS = {
    "csv": (".csv", ".tsv", ".txt", ".data"),
    "json": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "feather": (".feather", ".arrow", ".ipc"),
}
COUNTED = ("parquet", "feather")  # formats that store the number of rows
_NO_NUMBER = re.compile(r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to double: invalid value '(.*)'")


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file of a table.

    Args:
        path: The file, whose name tells its format.
        settings: Uses `columns`, `category_columns`, `label_key`, `class_names`, `missing_value`, `column_names` and
            `delimiter`.
    """

    path: Path
    settings: config.Data = dataclasses.field(compare=False)  # not hashable

    @property
    def format(self) -> str:
        """The key of `FORMATS`, by the end of the file name.

        Raises:
            ValueError: If the end of the name is unknown.
        """
        name = self.path.name.lower().removesuffix(".gz")
        for file_format, endings in FORMATS.items():
            if name.endswith(endings):
                return file_format
        known = ", ".join(ending for endings in FORMATS.values() for ending in endings)
        raise ValueError(
            f"The name of a table must end with one of {known}, received {self.path}: rename it, or leave it out with "
            'a pattern such as data.train_split = "*.csv".'
        )

    def num_rows(self) -> int:
        """Return the number of rows; this reads CSV and JSON lines files."""
        with self._naming():
            return int(self._open().count_rows())

    def dtypes(self, inputs: Sequence[str] | None) -> dict[str, str]:
        """Return the dtype of each input column and of the label: "float32", "int64" or "string".

        Args:
            inputs: The input columns of the table; None for the first file, which decides if the settings do not.

        Raises:
            ValueError: If the file lacks a column, has extra ones, or has a column of an unsupported type.
        """
        schema = self._open().schema
        with self._naming():
            names = schema.names  # decoded here
        self._check_names(names, inputs)
        inputs = self.settings.columns or inputs or [name for name in names if name != self.settings.label_key]
        return {name: self._dtype(name, schema.field(name).type) for name in (*inputs, self.settings.label_key)}

    def _check_names(self, names: Sequence[str], inputs: Sequence[str] | None) -> None:
        label, others = self.settings.label_key, [name for name in names if name != self.settings.label_key]
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{self.path} has more than one column {toml.show(duplicates[0])}: name each once.")
        if not others:
            raise ValueError(f"{self.path} has no column except the label {toml.show(label)}: add an input column.")
        columns = self.settings.columns or inputs or others
        categories = [name for name in self.settings.category_columns or () if name != label]
        for key, keys, known in (
            ("label_key", (label,), names),
            ("columns", columns, names),
            ("category_columns", categories, columns),
        ):
            for name in keys:
                if name not in known:
                    raise ValueError(
                        f"data.{key} = {toml.show(name)} is no {'input ' * (known is columns)}column of {self.path}: "
                        f"{close_to(name, known)}"
                    )
        if self.settings.columns is None and (extra := [name for name in others if name not in columns]):
            raise ValueError(
                f"All files must have the same columns, but {self.path} has {toml.show(extra[0])} and others do not: "
                "name the input columns in data.columns."
            )

    def _dtype(self, name: str, stored: "pyarrow.DataType") -> str:
        import pyarrow

        is_label = name == self.settings.label_key
        is_category = name in (self.settings.category_columns or ())
        is_category |= is_label and self.settings.class_names is not None
        if self.format == "csv":  # its cells have no types
            return "string" if is_category else "float32"
        kind = stored.value_type if pyarrow.types.is_dictionary(stored) else stored
        is_whole = pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind)
        is_text = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        if is_category and (is_whole or is_text):
            return "string" if is_text or is_label else "int64"
        if not is_category and (is_whole or pyarrow.types.is_floating(kind) or pyarrow.types.is_decimal(kind)):
            return "float32"
        way_out = "set data.class_names" if is_label else "leave it out of data.columns"
        raise ValueError(
            f"The column {toml.show(name)} of {self.path} must hold {'words or whole ' * is_category}numbers, but its "
            f"type is {kind}: {way_out}{'' if is_category else ', or name it in data.category_columns'}."
        )

    def blocks(self, dtypes: Mapping[str, str]) -> Iterator["pyarrow.RecordBatch"]:
        """Yield the columns in blocks of rows, in order, with a few blocks in memory at a time.

        Args:
            dtypes: The dtypes of the columns by name.

        Raises:
            ValueError: If the file is corrupt, or a cell of a CSV file is not a number.
        """
        with self._naming():
            scanner = self._open(dtypes).scanner(
                columns=list(dtypes), batch_size=BLOCK_ROWS, batch_readahead=1, fragment_readahead=1, use_threads=False
            )
            yield from scanner.to_batches()

    def cells(self, column: "pyarrow.Array", name: str, dtype: str, numbers: Array) -> Array:
        """Convert the cells of a column, and fill empty ones with `missing_value`.

        Args:
            column: The stored cells.
            name: The name of the column.
            dtype: Its dtype.
            numbers: The row number of each cell, from 0.

        Raises:
            ValueError: If a cell is empty or not a finite number.
        """
        values = self._converted(column, dtype)
        empty = column.is_null().to_numpy(zero_copy_only=False)
        is_label, is_number = name == self.settings.label_key, dtype == "float32"
        if is_number and self.settings.missing_value is not None and not is_label:
            values[empty] = self.settings.missing_value
            empty = np.zeros_like(empty)
        bad = np.flatnonzero(empty | ~np.isfinite(values) if is_number else empty)
        if bad.size:
            problem = "is empty" if empty[bad[0]] else f"is {values[bad[0]]}, not a finite number"
            way_out = "fill it, or set data.missing_value" if is_number else "fill it, with a word such as unknown"
            raise ValueError(
                f"{self.row(numbers[bad[0]])}: the cell of column {toml.show(name)} {problem}: "
                f"{'remove the row' if is_label else way_out}."
            )
        return values

    def row(self, number: int) -> str:
        """Return the position of row `number`, from 0, for messages; the header of a CSV file counts as a row."""
        has_header = self.format == "csv" and self.settings.column_names is None
        return f"{self.path}, row {number + 1 + has_header}"

    def _converted(self, column: "pyarrow.Array", dtype: str) -> Array:
        import pyarrow

        with self._naming():
            if dtype == "string":
                return np.array(column.cast(pyarrow.string()).to_pylist(), object)
            if dtype == "int64":
                return np.array(column.cast(pyarrow.int64()).fill_null(0))
            with np.errstate(over="ignore"):  # infinite, and refused
                return np.array(column.cast(pyarrow.float64(), safe=False)).astype(np.float32)

    def _open(self, dtypes: Mapping[str, str] | None = None) -> "pyarrow.dataset.Dataset":
        """Open the file; `dtypes` replaces the types that pyarrow infers from the first cells of text files."""
        import pyarrow.csv
        import pyarrow.dataset
        import pyarrow.json

        stored = {"float32": pyarrow.float64(), "int64": pyarrow.int64(), "string": pyarrow.string()}
        types = {name: stored[dtype] for name, dtype in (dtypes or {}).items()}
        file_format: Any = self.format
        if file_format == "csv":
            file_format = pyarrow.dataset.CsvFileFormat(
                pyarrow.csv.ParseOptions(delimiter=self.settings.delimiter, newlines_in_values=True),
                pyarrow.dataset.CsvFragmentScanOptions(
                    pyarrow.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
                    pyarrow.csv.ReadOptions(column_names=self.settings.column_names),
                ),
            )
        elif file_format == "json":
            schema = pyarrow.schema(types) if types else None
            file_format = pyarrow.dataset.JsonFileFormat(None, pyarrow.json.ParseOptions(schema))
        with self._naming():
            return pyarrow.dataset.dataset(self.path, format=file_format)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Name the file, and the cell if it is known, in an error of pyarrow."""
        import pyarrow

        try:
            yield
        except UnicodeDecodeError:
            raise ValueError(f"{self.path} is not UTF-8 text: save it as UTF-8.") from None
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(self._problem(str(error))) from None

    def _problem(self, message: str) -> str:
        if match := _NO_NUMBER.search(message):
            name = (self.settings.column_names or self._open().schema.names)[int(match[1])]
            is_label = name == self.settings.label_key
            way_out = "set data.class_names" if is_label else "leave the column out of data.columns"
            return (
                f"{self.path}, row {match[2]}: the cell {toml.show(match[3])} of column {toml.show(name)} is not a "
                f"number: correct it, {way_out}, or name the column in data.category_columns."
            )
        if "invalid UTF8" in message:
            return f"{self.path} is not UTF-8 text: save it as UTF-8."
        detail = re.split(r"(?:Invalid|IOError): ", message)[-1].splitlines()[0]
        way_out = " Another delimiter is data.delimiter." if self.format == "csv" else ""
        return f"{self.path} cannot be read ({received.excerpt(detail)}): repair or remove the file.{way_out}"
