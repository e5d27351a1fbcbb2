"""Tables in Parquet, Arrow and CSV files, read with pyarrow."""

from __future__ import annotations

import os
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.words import one_line, suggestion
from ..errors import DataError
from .checks import inexact
from .csv_files import CsvFile, settle_types, text_that_is_no_number
from .files import (
    Paths,
    UnchangedFile,
    by_file,
    describe,
    expand,
    file_of,
    left_out,
    names_and_sizes,
    required,
    starts_of,
    unreadable,
)
from .permutation import MIXED_BLOCKS
from .split import DatasetSplit, Split
from .table_files import TableFile, converted, one_schema, open_arrow, open_parquet, values_of

# Number of cached groups of rows for reading in the order of blocks: those of a batch and of the next batch. If groups
# have different sizes, a block may extend over two groups.
_CACHED_GROUPS = 4 * MIXED_BLOCKS
_PARTITION = re.compile(r"\w+=.+")  # a folder of a partitioned table


class Table:
    """Rows of several files, with some columns, in groups of rows; a group is read as a whole.

    Args:
        columns: Names of columns; None for all columns but the label and the index of pandas.
        label: One more column, or None.
        open_file: Opens a file.

    Attributes:
        count: Number of rows.
        columns: Names of the columns without the label.
        group_rows: Number of rows of the largest group.
        source: The files, for messages.
        note: A note on columns that are left out, or None.
        starts: Index of the first row of each group.
        names_and_sizes: See ``files.names_and_sizes``.
    """

    def __init__(
        self,
        paths: Paths,
        kind: str,
        columns: Sequence[str] | None,
        label: str | None,
        open_file: Callable[[Path], TableFile],
    ) -> None:
        self._cached_groups = _CACHED_GROUPS if label is None else 1
        self._first_row = 2 if kind == "csv" else 0  # row 1 of a CSV file has the names
        self._pa = required("pyarrow", kind)
        paths_of_files = expand(paths)
        self.source = describe(paths_of_files)
        files: list[tuple[Path, TableFile]] = []
        self._groups: list[tuple[UnchangedFile, TableFile, int]] = []
        for path in paths_of_files:
            unchanged = UnchangedFile(path)
            try:
                file = open_file(path)
            except (self._pa.ArrowException, OSError, ValueError, KeyError) as error:
                raise unreadable(path, kind, error) from error
            files.append((path, file))
            self._groups += [(unchanged, file, number) for number in range(len(file.rows))]
        self.names_and_sizes = names_and_sizes([file for file, _, number in self._groups if number == 0])
        self.starts, self.count = starts_of(rows for _, file in files for rows in file.rows)
        self.group_rows = max((rows for _, file in files for rows in file.rows), default=0)
        if not self.count:
            raise DataError(f"{self.source} has no rows")
        index = files[0][1].index
        self.columns = self._chosen(files, label, index) if columns is None else list(columns)
        self._check_columns(files[0][1].schema.names, label)
        names = [*self.columns, *([] if label is None else [label])]
        unused = [repr(name) for name in index if name not in names] if columns is None else []
        partitions = sorted({part for path in paths_of_files for part in path.parts[:-1] if _PARTITION.fullmatch(part)})
        folders = f"{self.source}: the values in names of folders are not read: {', '.join(partitions[:3])}"
        notes = [left_out(self.source, "index column", unused), folders if partitions else None]
        self.note = "; ".join(filter(None, notes)) or None
        if kind == "csv":
            settle_types([(path, file) for path, file in files if isinstance(file, CsvFile)], names)
        self._schema = one_schema(files, names)
        self._read: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()

    def _chosen(self, files: Sequence[tuple[Path, TableFile]], label: str | None, index: Sequence[str]) -> list[str]:
        """Return the columns of the first file, which all files must have."""
        (first, file), *others = files
        names = [name for name in dict.fromkeys(file.schema.names) if name != label and name not in index]
        for path, other in others:
            if differing := ({*file.schema.names} ^ {*other.schema.names}) - {*index, *other.index, label}:
                raise DataError(
                    f"{path} and {first} do not have the same columns: only one of them has "
                    f"{', '.join(map(repr, sorted(differing)[:4]))}; choose columns=[...]"
                )
        return names

    def _check_columns(self, names: Sequence[str], label: str | None) -> None:
        wanted = [*self.columns, *([] if label is None else [label])]
        for column, count in Counter(wanted).items():
            if column not in names:
                hint = suggestion(column, names)
                raise DataError(f"{self.source} has no column {column!r}; it has {', '.join(names)}{hint}")
            if count > 1:
                what = "both in columns and as label" if column == label else f"{count} times"
                raise DataError(f"{self.source}: the column {column!r} is chosen {what}: must be chosen once")
        if not self.columns:
            raise DataError(
                f"{self.source}: there is no column besides the label {label!r}; add at least one column of numbers"
            )

    @property
    def fits_cache(self) -> bool:
        """Whether all groups are kept once they have been read."""
        return len(self._groups) <= self._cached_groups

    @property
    def types(self) -> dict[str, str]:
        """The types of the columns, by name."""
        return {column.name: str(column.type) for column in self._schema}

    def type_of(self, column: str) -> Any:
        """Return the Arrow type of a column."""
        return self._schema.field(column).type

    def parts(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Yield columns of the rows [start, stop) as Arrow tables, each with the number of its first row."""
        while start < stop:
            number, row = file_of(self.starts, start)
            part = self._group(number, tuple(columns)).slice(row, stop - start)
            yield start, part
            start += len(part)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows as dicts, with the types of the files; see ``values_of``."""
        taken: list[Any] = [None] * len(indices)
        for number, places in by_file(self.starts, indices).items():
            table, rows = self._group(number, tuple(self.columns)), [row for _, row in places]
            try:
                group = table.take(rows)
            except self._pa.ArrowNotImplementedError:  # views in lists
                group = self._pa.concat_tables([table.slice(row, 1) for row in rows])
            values = [self._values_of(number, name, group.column(name)) for name in self.columns]
            for (place, _), value in zip(places, zip(*values, strict=True), strict=True):
                taken[place] = dict(zip(self.columns, value, strict=True))
        return taken

    def _values_of(self, number: int, name: str, column: Any) -> list[Any]:
        try:
            return values_of(column)
        except Exception as error:  # for example a date after the year 9999
            path = self._groups[number][0].path
            raise DataError(
                f"{path}: a value of {name} ({column.type}) cannot be converted to Python: {one_line(error)}; choose "
                "columns=[...]"
            ) from error

    def name_of(self, index: int) -> str:
        """Return the file and the number of a row."""
        number, row = file_of(self.starts, index)
        file = self._groups[number][0]
        first = next(place for place, (other, *_) in enumerate(self._groups) if other is file)
        return f"{file.path}, row {self._first_row + row + self.starts[number] - self.starts[first]}"

    def text_in(self, column: str) -> str | None:
        """Return a text that names the first row of a CSV file whose value in a column is not a number, or None."""
        if not self._first_row or not self._pa.types.is_string(self.type_of(column)):
            return None
        for start, part in self.parts(0, self.count, [column]):
            texts = part.column(column).to_pylist()
            if (place := text_that_is_no_number(texts)) is not None:
                return f"{self.name_of(start + place)} has {texts[place]!r}"
        return None

    def release(self) -> None:
        """Free the rows in memory; they are read again when they are needed."""
        self._read.clear()
        for _, file, _ in self._groups:
            if isinstance(file, CsvFile):
                file.release()
        self._pa.default_memory_pool().release_unused()

    def _group(self, number: int, columns: tuple[str, ...]) -> Any:
        key, (unchanged, file, group) = (number, columns), self._groups[number]
        unchanged.check()
        if key not in self._read:
            try:
                schema = self._pa.schema([self._schema.field(column) for column in columns])
                self._read[key] = converted(file.read(group, columns), schema)
            except (self._pa.ArrowException, OSError, ValueError) as error:
                raise DataError(f"{unchanged.path} cannot be read: {one_line(error)}") from error
        self._read.move_to_end(key)
        while len(self._read) > self._cached_groups:
            self._read.popitem(last=False)
        return self._read[key]


class ColumnsSplit(Split):
    """Numeric columns of a table as examples and labels."""

    def __init__(self, table: Table, label: str, classes: int | None, kind: str) -> None:
        self._table, self._label, self.note, self.columns = table, label, table.note, table.types
        self.names_and_sizes = table.names_and_sizes
        dtypes = [self._dtype(column) for column in table.columns]
        lengths = [self._length(column) for column in table.columns]
        shape = (sum(length or 1 for length in lengths),)
        label_shape = (self._length(label),) if self._length(label) else ()
        block = None if kind == "csv" else min(table.group_rows, table.count)
        dtype = np.result_type(*dtypes)
        super().__init__(table.source, table.count, shape, dtype, label_shape, self._dtype(label), classes, block=block)
        integers = {name for name, own in zip(table.columns, dtypes, strict=True) if own.kind in "iu"}
        self._mixed = integers if dtype.kind == "f" else set()  # whole numbers beside decimals

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        for first, rows in self._table.parts(start, stop, [*self._table.columns, self._label]):
            part = slice(first - start, first - start + len(rows))
            place = 0
            for column in self._table.columns:
                values = self._values(rows, column, first)
                examples[part, place : place + values.shape[1]] = values
                place += values.shape[1]
            own = self._values(rows, self._label, first)
            labels[part] = own.reshape(labels[part].shape)
            self._check(np.isnan(own) if own.dtype.kind == "f" else None, self._label, first, "is NaN")

    def release(self) -> None:
        self._table.release()

    def _values(self, rows: Any, column: str, start: int) -> Array:
        values, length = rows.column(column).combine_chunks(), self._length(column)
        self._check_nulls(values, column, start, 1)
        if length:
            values = values.flatten()
            self._check_nulls(values, column, start, length)
        array: Array = values.to_numpy(zero_copy_only=False).reshape(len(rows), -1)
        if column in self._mixed and array.dtype.kind in "iu":
            why = (
                "is a whole number that float32 does not represent, beside columns of another type; choose "
                "columns=[...], or leave label out and convert the rows with map"
            )
            self._check(inexact(array, np.dtype(np.float32)), column, start, why)
        return array

    def _check_nulls(self, values: Any, column: str, start: int, length: int) -> None:
        if values.null_count:
            wrong = values.is_null().to_numpy(zero_copy_only=False).reshape(-1, length)
            self._check(wrong, column, start, "has no value; fill missing values, or drop these rows")

    def _check(self, wrong: Array | None, column: str, start: int, why: str) -> None:
        """Raise an error that names the first row in which a value is wrong, if there is one."""
        if wrong is not None and wrong.any():
            row = self._table.name_of(start + int(np.argwhere(wrong)[0][0]))
            raise DataError(f"{row}: {column} {why}")

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


def parquet(
    paths: Paths, columns: Sequence[str] | None = None, label: str | None = None, classes: int | None = None
) -> Split:
    """Return a split of Parquet files.

    With ``label``, an example is an array of the columns' numbers, and the label is a number, or a vector from a list
    of fixed size. If the split fits into half of the node's free memory, it is loaded once for all ranks of a node.
    Otherwise the split is read in blocks, as with ``hdf5``. Without ``label``, an example is a dict of the row's values
    with the types of the file, with texts and lists of any length, for ``map``.

    Files of one table must have the same columns, in any order; columns that are not used may differ. Types may differ
    if one includes the other, such as int32 and int64.

    Args:
        paths: A file, a pattern such as ``part-*.parquet``, or a list of them.
        columns: Names of the columns; by default all columns except ``label`` and the index of a pandas data frame.
        label: Name of the column of labels.
        classes: Number of classes if labels are classes, else None.

    Raises:
        DataError: A file does not exist or is damaged, a column does not exist, is chosen twice, or has no numbers; or
            pyarrow is not installed.
    """
    return _split(paths, "parquet", columns, label, classes, open_parquet)


def arrow(
    paths: Paths, columns: Sequence[str] | None = None, label: str | None = None, classes: int | None = None
) -> Split:
    """Return a split of Arrow files, of the file or the stream format; see ``parquet``."""
    return _split(paths, "arrow", columns, label, classes, open_arrow)


def csv(
    paths: Paths,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    classes: int | None = None,
    encoding: str = "utf-8",
    delimiter: str = ",",
) -> Split:
    """Return a split of CSV files whose first lines have the names of the columns, read as a whole; see ``parquet``.

    The type of a column is the first that fits all its values in all files: int64, bool, a date or time, float64, text;
    uint64 or text for whole numbers that float64 would round. Files may be compressed with gzip, bzip2, zstd or lz4. In
    messages, the line with the names is row 1.

    Args:
        encoding: Encoding of the text, one of Python's.
        delimiter: The character between two values, such as ``";"`` or ``"\\t"``.
    """
    if len(os.fsencode(delimiter)) != 1:
        raise DataError(f"csv got delimiter={delimiter!r}: must be one ASCII character, such as ';'")
    encoding = encoding.lower().replace("utf8", "utf-8")
    return _split(paths, "csv", columns, label, classes, lambda path: CsvFile(path, encoding, delimiter))


def _split(
    paths: Paths,
    kind: str,
    columns: Sequence[str] | None,
    label: str | None,
    classes: int | None,
    open_file: Callable[[Path], TableFile],
) -> Split:
    table = Table(paths, kind, columns, label, open_file)
    if label is not None:
        return ColumnsSplit(table, label, classes, kind)
    split = DatasetSplit(table, table.source, classes)
    split.block, split.note = None if table.fits_cache else table.group_rows, table.note
    split.columns = table.types
    return split
