"""Tables in Parquet, Arrow and CSV files, read with pyarrow."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .files import Paths, UnchangedFile, describe, expand, file_of, required, starts_of
from .permutation import MIXED_BLOCKS
from .split import DatasetSplit, Split

# Number of cached groups of rows for reading in the order of blocks: those of a batch and of the next batch. If groups
# have different sizes, a block may extend over two groups.
_CACHED_GROUPS = 4 * MIXED_BLOCKS
_Group = Callable[[Sequence[str]], Any]  # reads some columns of a group of rows


class Table:
    """The rows of several files, in groups of rows; a group is read as a whole.

    Attributes:
        count: Number of rows.
        names: Names of the columns.
        group_rows: Number of rows of the largest group.
        source: The files, for messages.
    """

    def __init__(self, paths: Paths, kind: str, cached_groups: int) -> None:
        self._cached_groups = cached_groups
        self._first_row = 2 if kind == "csv" else 0  # row 1 of a CSV file has the names
        self._pa, open_file = required("pyarrow", kind), _OPEN[kind]
        files = expand(paths)
        self.source = describe(files)
        self._groups: list[tuple[UnchangedFile, _Group]] = []
        rows: list[int] = []
        schemas = []
        for path in files:
            file = UnchangedFile(path)
            try:
                schema, groups = open_file(path)
            except (self._pa.ArrowException, OSError) as error:
                raise DataError(f"{path} cannot be read as a {kind} file: {' '.join(str(error).split())}") from error
            schemas.append(schema)
            self._groups += [(file, read) for _, read in groups]
            rows += [count for count, _ in groups]
        self._schema = schemas[0]
        for path, schema in zip(files, schemas, strict=True):
            if not schema.equals(self._schema):
                raise DataError(
                    f"{path} has the columns {_columns(schema)}, but {files[0]} has {_columns(self._schema)}"
                )
        self.names: list[str] = self._schema.names
        self._starts, self.count = starts_of(rows)
        self.group_rows = max(rows, default=0)
        if not self.count:
            raise DataError(f"{self.source} has no rows")
        self._read: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()

    @property
    def fits_cache(self) -> bool:
        """Whether all groups are kept once they have been read."""
        return len(self._groups) <= self._cached_groups

    def type_of(self, column: str) -> Any:
        """Return the Arrow type of a column."""
        return self._schema.field(column).type

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check that columns exist.

        Raises:
            DataError: A column does not exist.
        """
        for column in columns:
            if column not in self.names:
                similar = difflib.get_close_matches(column, self.names, n=1)
                hint = f"; did you mean {similar[0]!r}?" if similar else ""
                raise DataError(f"{self.source} has no column {column!r}; it has {', '.join(self.names)}{hint}")

    def parts(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield columns of the rows [start, stop) as Arrow tables, each with the number of its first row."""
        while start < stop:
            number, row = file_of(self._starts, start)
            part = self._group(number, tuple(columns)).slice(row, stop - start)
            yield start, part
            start += len(part)

    def take(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Return rows as dicts."""
        taken: list[Any] = [None] * len(indices)
        by_group: dict[int, list[tuple[int, int]]] = {}
        for place, index in enumerate(indices):
            number, row = file_of(self._starts, index)
            by_group.setdefault(number, []).append((place, row))
        for number, places in by_group.items():
            group = self._group(number, tuple(columns))
            for (place, _), row in zip(places, group.take([row for _, row in places]).to_pylist(), strict=True):
                taken[place] = row
        return taken

    def name_of(self, index: int) -> str:
        """Return the file and the number of a row."""
        number, row = file_of(self._starts, index)
        file = self._groups[number][0]
        first = next(place for place, (other, _) in enumerate(self._groups) if other is file)
        return f"{file.path}, row {self._first_row + row + self._starts[number] - self._starts[first]}"

    def text_in(self, column: str) -> str | None:
        """Return a text that names the first row of a CSV file whose value in a column is not a number, or None."""
        if not self._first_row or not self._pa.types.is_string(self.type_of(column)):
            return None
        for start, part in self.parts(0, self.count, [column]):
            for row, value in enumerate(part.column(column).to_pylist(), start):
                if value is not None and not _is_number(value):
                    return f"{self.name_of(row)} has {value!r}"
        return None

    def release(self) -> None:
        """Free the rows in memory; they are read again when they are needed."""
        self._read.clear()
        for _, group in self._groups:
            if isinstance(group, _CsvFile):
                group.release()
        self._pa.default_memory_pool().release_unused()

    def _group(self, number: int, columns: tuple[str, ...]) -> Any:
        key = number, columns
        if key not in self._read:
            file, read = self._groups[number]
            file.check()
            try:
                self._read[key] = read(columns)
            except (self._pa.ArrowException, OSError) as error:
                raise DataError(f"{file.path} cannot be read: {' '.join(str(error).split())}") from error
        self._read.move_to_end(key)
        while len(self._read) > self._cached_groups:
            self._read.popitem(last=False)
        return self._read[key]


class _CsvFile:
    """The rows of a CSV file, in memory until ``release``; see ``_Group``."""

    def __init__(self, path: Path) -> None:
        self._path, self._table = path, None

    def __call__(self, columns: Sequence[str]) -> Any:
        return self.table().select(columns)

    def table(self) -> Any:
        """Return all rows and columns."""
        if self._table is None:
            csv = required("pyarrow.csv", "csv")
            try:
                self._table = csv.read_csv(self._path)
            except required("pyarrow", "csv").ArrowInvalid:  # without threads, error messages contain the row number
                self._table = csv.read_csv(self._path, csv.ReadOptions(use_threads=False))
        return self._table

    def release(self) -> None:
        """Free the memory; the next access to the table reads the file again."""
        self._table = None


class ColumnsSplit(Split):
    """Numeric columns of a table as examples and labels."""

    def __init__(self, table: Table, columns: Sequence[str], label: str, classes: int | None, kind: str) -> None:
        self._table, self._columns, self._label = table, list(columns), label
        dtypes = [self._dtype(column) for column in self._columns]
        lengths = [self._length(column) for column in self._columns]
        shape = (sum(length or 1 for length in lengths),)
        block = None if kind == "csv" else min(table.group_rows, table.count)
        super().__init__(
            table.source, table.count, shape, np.result_type(*dtypes), (), self._dtype(label), classes, block=block
        )

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        for first, rows in self._table.parts(start, stop, [*self._columns, self._label]):
            part = slice(first - start, first - start + len(rows))
            place = 0
            for column in self._columns:
                values = self._values(rows, column, first)
                examples[part, place : place + values.shape[1]] = values
                place += values.shape[1]
            labels[part] = self._values(rows, self._label, first)[:, 0]

    def release(self) -> None:
        self._table.release()

    def _values(self, rows: Any, column: str, start: int) -> Array:
        values, length = rows.column(column).combine_chunks(), self._length(column)
        self._check_nulls(values, column, start, 1)
        if length:
            values = values.flatten()
            self._check_nulls(values, column, start, length)
        array: Array = values.to_numpy(zero_copy_only=False)
        return array.reshape(len(rows), -1)

    def _check_nulls(self, values: Any, column: str, start: int, length: int) -> None:
        if values.null_count:
            row = start + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) // length
            raise DataError(
                f"{self._table.name_of(row)}: {column} has no value; fill missing values, or drop these rows"
            )

    def _length(self, column: str) -> int:
        """Return the number of values of a list of fixed size; 0 for numbers."""
        return getattr(self._table.type_of(column), "list_size", 0)

    def _dtype(self, column: str) -> np.dtype[Any]:
        kind = self._table.type_of(column)
        try:
            dtype = np.dtype((kind.value_type if self._length(column) else kind).to_pandas_dtype())
        except (NotImplementedError, TypeError, ImportError):  # the type has no counterpart in NumPy
            dtype = np.dtype(object)
        if dtype.kind not in "biuf":
            text = self._table.text_in(column)
            where = "" if text is None else f": {text}"
            raise DataError(
                f"{self._table.source}: {column} is of type {kind}, not a number{where}; choose columns=[...], or "
                "leave label out and convert the rows with map"
            )
        return np.dtype(np.float32) if dtype == np.float16 else np.dtype(np.uint8) if dtype.kind == "b" else dtype


class Rows:
    """Rows of a table as dicts of numbers, strings and arrays."""

    def __init__(self, table: Table, columns: Sequence[str]) -> None:
        self._table, self._columns = table, columns

    def __len__(self) -> int:
        return self._table.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        rows = self._table.take(indices, self._columns)
        for row in rows:
            row.update({name: np.array(value) for name, value in row.items() if isinstance(value, list)})
        return rows

    def name_of(self, index: int) -> str:
        """Return the file and the number of a row."""
        return self._table.name_of(index)


def parquet(
    paths: Paths, columns: Sequence[str] | None = None, label: str | None = None, classes: int | None = None
) -> Split:
    """Return a split of Parquet files.

    With ``label``, an example is an array of the columns' numbers, and the label is a number. If the split fits into
    half of the node's free memory, it is loaded once for all ranks of a node. Otherwise the split is read in blocks, as
    with ``hdf5``. Without ``label``, an example is a dict of the row's values, with strings and lists of any length,
    for ``map``.

    Args:
        paths: A file, a pattern such as ``part-*.parquet``, or a list of them.
        columns: Names of the columns; by default all columns except ``label``.
        label: Name of the column of labels.
        classes: Number of classes if labels are classes, else None.

    Raises:
        DataError: A file does not exist or is damaged, a column does not exist or has no numbers; or pyarrow is not
            installed.
    """
    return _split(paths, "parquet", columns, label, classes)


def arrow(
    paths: Paths, columns: Sequence[str] | None = None, label: str | None = None, classes: int | None = None
) -> Split:
    """Return a split of Arrow files, of the file or the stream format; see ``parquet``."""
    return _split(paths, "arrow", columns, label, classes)


def csv(
    paths: Paths, columns: Sequence[str] | None = None, label: str | None = None, classes: int | None = None
) -> Split:
    """Return a split of CSV files whose first lines have the names of the columns, read as a whole; see ``parquet``.

    In messages, the line with the names is row 1.
    """
    return _split(paths, "csv", columns, label, classes)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _columns(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _split(paths: Paths, kind: str, columns: Sequence[str] | None, label: str | None, classes: int | None) -> Split:
    table = Table(paths, kind, _CACHED_GROUPS if label is None else 1)
    chosen = [name for name in table.names if name != label] if columns is None else list(columns)
    table.check_columns([*chosen, *([] if label is None else [label])])
    if not chosen:
        raise DataError(
            f"{table.source}: there is no column besides the label {label!r}; add at least one column of numbers"
        )
    if label is not None:
        return ColumnsSplit(table, chosen, label, classes, kind)
    split = DatasetSplit(Rows(table, chosen), table.source, classes)
    split.block = None if table.fits_cache else table.group_rows
    return split


def _open_parquet(path: Path) -> tuple[Any, list[tuple[int, _Group]]]:
    file = required("pyarrow.parquet", "parquet").ParquetFile(path, memory_map=True)

    def reads(number: int) -> _Group:
        return lambda columns: file.read_row_group(number, columns, use_threads=False)

    rows = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
    return file.schema_arrow, [(count, reads(number)) for number, count in enumerate(rows)]


def _open_arrow(path: Path) -> tuple[Any, list[tuple[int, _Group]]]:
    pa, ipc = required("pyarrow", "arrow"), required("pyarrow.ipc", "arrow")
    mapped = pa.memory_map(str(path))
    try:
        file = ipc.open_file(mapped)
        batches = [file.get_batch(number) for number in range(file.num_record_batches)]
    except pa.ArrowInvalid:
        file = ipc.open_stream(mapped)
        batches = list(file)

    def reads(batch: Any) -> _Group:
        return lambda columns: pa.Table.from_batches([batch]).select(columns)

    return file.schema, [(len(batch), reads(batch)) for batch in batches]


def _open_csv(path: Path) -> tuple[Any, list[tuple[int, _Group]]]:
    file = _CsvFile(path)
    table = file.table()
    return table.schema, [(len(table), file)]


_OPEN = {"parquet": _open_parquet, "arrow": _open_arrow, "csv": _open_csv}
