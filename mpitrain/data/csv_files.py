"""CSV files, read by pyarrow, with types that hold for all rows of all files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.words import one_line
from ..errors import DataError
from .files import first_bytes, foreign, required
from .table_files import TableFile

_BLOCK_BYTES = 2**31 - 1  # a file up to this size is parsed at once, so that types are inferred from all its rows
_COMPRESSED = ("gzip", "bzip2", "zstd", "lz4")
_CODECS = {"bzip2": "bz2"}
_SEPARATORS = ";\t|"
_INDEX = re.compile(r"(Unnamed: \d+(\.\d+)*)?")  # a name of pandas' index, written and read one or more times
_EXACT = 2**53  # from here on float64 skips whole numbers


class CsvFile(TableFile):
    """A CSV file: one group of rows, in memory until ``release``."""

    def __init__(self, path: Path, encoding: str, delimiter: str) -> None:
        self._path, self._encoding, self._delimiter = path, encoding, delimiter
        self._types: dict[str, Any] = {}
        try:
            self._table: Any = self._parsed({})
        except required("pyarrow", "csv").ArrowInvalid:
            self._check_separator(first_bytes(path).partition(b"\n")[0].decode(errors="replace"))
            raise
        names = self._table.schema.names
        index = [*itertools.takewhile(_INDEX.fullmatch, names)]
        null = required("pyarrow", "csv").null()
        index += [name for place, name in enumerate(names) if not name and self._table.schema.field(place).type == null]
        super().__init__(self._table.schema, [len(self._table)], self._columns, list(dict.fromkeys(index)))
        self._check_header([name for name in names if name not in index])

    def _columns(self, group: int, columns: Sequence[str]) -> Any:
        if self._table is None:
            self._table = self._parsed(self._types)
        return self._table.select(columns)

    def release(self) -> None:
        """Free the memory; the next access reads the file again."""
        self._table = None

    def retype(self, column: str, kind: Any) -> bool:
        """Read a column as another type; return False if it has other values."""
        try:
            values = self.as_type(column, kind)
        except required("pyarrow", "csv").ArrowInvalid:
            return False
        self._types[column] = kind
        if self._table is not None:
            self._table = self._table.set_column(self.schema.get_field_index(column), column, values)
        self.schema = self.schema.set(self.schema.get_field_index(column), self.schema.field(column).with_type(kind))
        return True

    def as_type(self, column: str, kind: Any) -> Any:
        """Return the values of a column as a type."""
        return self._parsed({column: kind}, [column]).column(0)

    def _parsed(self, types: dict[str, Any], columns: Sequence[str] = ()) -> Any:
        csv, pa = required("pyarrow.csv", "csv"), required("pyarrow", "csv")
        content = _content(self._path, self._encoding)
        parse = csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
        size = max(1, min(_BLOCK_BYTES, len(content)))
        inferred: dict[str, Any] = {}
        while True:
            convert = csv.ConvertOptions(column_types={**inferred, **types}, include_columns=columns or None)
            try:
                return csv.read_csv(pa.BufferReader(content), csv.ReadOptions(block_size=size), parse, convert)
            except pa.ArrowInvalid as error:
                place = re.search(r"In CSV column #(\d+): CSV conversion error to ([^:]+):", str(error))
                if size < len(content) and place and place[2] in (kinds := [str(kind) for kind in _kinds(pa)]):
                    header = csv.open_csv(pa.BufferReader(content), csv.ReadOptions(block_size=size), parse).schema
                    if (name := header.names[int(place[1])]) not in types:  # a later block has other values
                        inferred[name] = _kinds(pa)[kinds.index(place[2]) + 1]
                        continue
                options = csv.ReadOptions(use_threads=False, block_size=size)  # then messages contain the row number
                return csv.read_csv(pa.BufferReader(content), options, parse, convert)

    def _check_separator(self, line: str) -> None:
        """Check that values in a line with one column are not separated by another character."""
        separator = next((mark for mark in _SEPARATORS if mark in line), None)
        if separator is not None and self._delimiter == "," and line.count(",") <= line.count(separator):
            raise DataError(
                f"{self._path} has one column, {line.strip()[:60]!r}: if {separator!r} separates its values, pass "
                f"delimiter={separator!r}"
            )

    def _check_header(self, names: Sequence[str]) -> None:
        """Check that the first line has the names of the columns, and that the delimiter is right."""
        if self._table.schema.names[0].lower().startswith("sep="):
            raise DataError(f"{self._path} begins with the line {self._table.schema.names[0]}: remove this line")
        if len(names) == 1:
            self._check_separator(f"{names[0]} {self._table.column(0)[0] if self._table.num_rows else ''}")
        if "" in names:
            raise DataError(f"{self._path} has a column without a name beside {', '.join(names[:4])}: give it a name")
        numbers = [name for name in names if re.fullmatch(r"[-+]?\d*\.?\d+([eE][-+]?\d+)?", name)]
        if any(not name.isdigit() for name in numbers) or (numbers == list(names) and len({*names}) < len(names)):
            raise DataError(
                f"{self._path} has the columns {', '.join(names[:4])}: its first line must have names, not values; "
                "insert a line with names"
            )


def settle_types(files: Sequence[tuple[Path, CsvFile]], columns: Sequence[str]) -> None:
    """Choose one type for each column that all files can be read as, and that keeps whole numbers."""
    pa = required("pyarrow", "csv")
    kinds = _kinds(pa)
    for column in columns:
        own = [file for _, file in files if len(file.schema.get_all_field_indices(column)) == 1]
        types = {file.schema.field(column).type for file in own}
        if len(types) > 1:  # texts such as NA count as missing only if all values in a column do
            first = max(kinds.index(kind) if kind in kinds else len(kinds) - 1 for kind in types - {pa.null()})
            _first_possible(own, column, kinds[first:])
        if any(_rounds(pa, file, column) for file in own):
            _first_possible(own, column, [pa.uint64(), pa.string()])


def _kinds(pa: Any) -> list[Any]:
    """Return the types that pyarrow infers, in the order in which it tries them."""
    times = [pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns")]
    return [pa.int64(), pa.bool_(), *times, pa.float64(), pa.string()]


def _first_possible(files: Sequence[CsvFile], column: str, kinds: Sequence[Any]) -> None:
    for kind in kinds:
        if all(file.retype(column, kind) for file in files):
            return


def _rounds(pa: Any, file: CsvFile, column: str) -> bool:
    """Return whether a column of decimals contains a whole number that it does not represent."""
    if file.schema.field(column).type != pa.float64():
        return False
    numbers = file.read(0, [column]).column(0).to_numpy()
    large = np.flatnonzero(np.abs(np.nan_to_num(numbers, posinf=0, neginf=0)) >= _EXACT)
    if not large.size:
        return False
    texts = file.as_type(column, pa.string()).take(pa.array(large)).to_pylist()
    return any(re.fullmatch(r"\s*[-+]?\d+\s*", text) and int(text) != int(float(text)) for text in texts)


def _content(path: Path, encoding: str) -> Any:
    """Return a file's text in UTF-8, decompressed, as a buffer."""
    pa, start = required("pyarrow", "csv"), first_bytes(path)
    what = foreign(start) or ""
    codec = next((name for name in _COMPRESSED if f"with {name}:" in what), None)
    content = pa.py_buffer(path.read_bytes())
    if codec is not None:
        with pa.CompressedInputStream(pa.BufferReader(content), _CODECS.get(codec, codec)) as stream:
            content = pa.py_buffer(stream.read())
        what = foreign(content[:512].to_pybytes()) or ""
    if what.startswith("is text in"):
        if encoding == "utf-8":
            raise DataError(f"{path} {what}: pass encoding={what.rpartition(' ')[2].lower()!r}")
    elif what:
        raise DataError(f"{path} {what}; data.csv reads text")
    if encoding == "utf-8":
        if not np.frombuffer(content, np.uint8).all():
            raise DataError(f"{path} has zero bytes: it is not text, or pass its encoding, such as encoding='utf-16'")
        _check_utf8(path, content)
        return content
    try:
        return pa.py_buffer(content.to_pybytes().decode(encoding).encode())
    except LookupError as error:
        raise DataError(f"csv got encoding={encoding!r}: must be one of Python's, such as 'cp1252'") from error
    except UnicodeError as error:
        raise DataError(f"{path} is not text in {encoding}: {one_line(error)}") from error


def _check_utf8(path: Path, content: Any) -> None:
    pa = required("pyarrow", "csv")
    offsets = pa.py_buffer(np.array([0, content.size], np.int64))
    try:
        pa.Array.from_buffers(pa.large_string(), 1, [None, offsets, content]).validate(full=True)
    except pa.ArrowInvalid:
        try:
            content.to_pybytes().decode()
        except UnicodeDecodeError as error:
            row = content.to_pybytes().count(b"\n", 0, error.start) + 1
            raise DataError(
                f"{path} is not text in UTF-8: line {row} has the byte 0x{content[error.start]:02x}; pass its "
                "encoding, such as encoding='cp1252' for a file of Windows"
            ) from None


def text_that_is_no_number(values: Sequence[str | None]) -> int | None:
    """Return the place of the first text that float64 does not represent, or None."""
    wrong = (place for place, text in enumerate(values) if text is not None and not _is_exact_number(text))
    return next(wrong, None)


def _is_exact_number(text: str) -> bool:
    if "_" in text:  # which only Python takes as part of a number
        return False
    try:
        number = float(text)
        return not re.fullmatch(r"\s*[-+]?\d+\s*", text) or int(text) == int(number)
    except (ValueError, OverflowError):
        return False
