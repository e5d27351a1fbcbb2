"""Parquet and Arrow files as groups of rows, one schema for several files, and values with the types of the files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .files import required

_INDEX = re.compile(r"__index_level_\d+__")  # a name that pandas gives to an index without a name


@dataclass
class TableFile:
    """A file of rows, which is opened for each read, because a process may read thousands of files.

    Attributes:
        schema: The Arrow schema.
        rows: Number of rows of each group.
        read: Returns columns of a group as an Arrow table.
        index: Names of columns that are the index of a pandas data frame.
    """

    schema: Any
    rows: list[int]
    read: Callable[[int, Sequence[str]], Any]
    index: list[str] = field(default_factory=list)


def open_parquet(path: Path) -> TableFile:
    """Open a Parquet file, whose groups are its row groups."""
    parquet = required("pyarrow.parquet", "parquet")
    with _mapped(path) as mapped, parquet.ParquetFile(mapped) as file:
        metadata, schema = file.metadata, file.schema_arrow

    def read(group: int, columns: Sequence[str]) -> Any:
        with (
            _mapped(path) as mapped,
            parquet.ParquetFile(mapped, metadata=metadata, page_checksum_verification=True) as file,
        ):
            return file.read_row_group(group, columns, use_threads=False)

    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return TableFile(schema, rows, read, _pandas_index(schema))


def open_arrow(path: Path) -> TableFile:
    """Open a file of Arrow's file or stream format, whose groups are its record batches."""
    pa, ipc = required("pyarrow", "arrow"), required("pyarrow.ipc", "arrow")
    with _mapped(path) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        if is_file:
            file = ipc.open_file(mapped)
            batches = [file.get_batch(number) for number in range(file.num_record_batches)]
        else:
            file = ipc.open_stream(mapped)
            batches = list(file)

    def read(group: int, columns: Sequence[str]) -> Any:
        table = pa.Table.from_batches([batches[group]]).select(columns)
        table.validate(full=True)  # the format has no checksums, and damaged offsets would crash the process
        return table

    return TableFile(file.schema, [len(batch) for batch in batches], read, _pandas_index(file.schema))


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """Yield a file as a memory map of Arrow, which takes only names in UTF-8."""
    with open(path, "rb") as file, required("pyarrow", "a table").memory_map(f"/proc/self/fd/{file.fileno()}") as mapped:
        yield mapped


def _pandas_index(schema: Any) -> list[str]:
    stored = (schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in schema.names if name in stored or _INDEX.fullmatch(name)]


def one_schema(files: Sequence[tuple[Path, TableFile]], columns: Sequence[str]) -> Any:
    """Return a schema of these columns to which the types of all files can be converted without loss.

    Raises:
        DataError: A file lacks a column, or has it twice or with another meaning.
    """
    pa, fields = required("pyarrow", "a table"), []
    for column in columns:
        kinds: dict[Any, Path] = {}
        for path, file in files:
            places = file.schema.get_all_field_indices(column)
            if len(places) != 1:
                problem = f"has the column {column!r} {len(places)} times" if places else f"has no column {column!r}"
                raise DataError(f"{path} {problem}: must have it once, like all files of a table")
            kinds.setdefault(_plain(pa, file.schema.field(places[0]).type), path)
        (kind, first), *others = kinds.items()
        for other, path in others:
            try:
                if _is_text(pa, kind) != _is_text(pa, other) and not {pa.null()} & {kind, other}:
                    raise pa.ArrowTypeError("texts and other values")
                schemas = [pa.schema([(column, each)]) for each in (kind, other)]
                kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
            except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
                raise DataError(
                    f"{path} has the column {column!r} of type {other}, but {first} of type {kind}: must be of one type"
                ) from error
        fields.append(pa.field(column, kind))
    return pa.schema(fields)


def _plain(pa: Any, kind: Any) -> Any:
    """Return a type without its storage as a dictionary or a view."""
    if pa.types.is_dictionary(kind):
        return _plain(pa, kind.value_type)
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return views.get(kind, kind)


def _is_text(pa: Any, kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def converted(table: Any, schema: Any) -> Any:
    """Return a table with the columns and types of a schema."""
    table = table.select(schema.names)
    return table if table.schema.types == schema.types else table.cast(schema)


def values_of(column: Any) -> list[Any]:
    """Return the values of a column of an Arrow table with the types of the file; None for missing values.

    Whole numbers of 64 bits, float64, booleans and texts are Python's objects, other numbers NumPy's. Lists of numbers
    are arrays; other lists are lists. Structs and maps are dicts. Times with nanoseconds are NumPy's, in UTC.
    """
    pa = required("pyarrow", "a table")
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind, types = array.type, pa.types
    if types.is_dictionary(kind):
        return values_of(array.dictionary_decode())
    if isinstance(kind, pa.FixedShapeTensorType) and not array.null_count:
        return [*array.to_numpy_ndarray().copy()]
    if _is_list(types, kind):
        return _lists(pa, array)
    if types.is_struct(kind):
        parts = [values_of(part) for part in array.flatten()]
        names = [kind.field(i).name for i in range(kind.num_fields)]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*parts, strict=True)] if parts else [{}] * len(array)
        return _with_nulls(array, rows)
    if types.is_map(kind):
        pairs = [*zip(values_of(array.keys), values_of(array.items), strict=True)]
        ends = array.offsets.to_pylist()
        maps = [_as_dict(pairs[start:stop]) for start, stop in zip(ends, ends[1:], strict=False)]
        return _with_nulls(array, maps)
    if (types.is_timestamp(kind) or types.is_duration(kind)) and kind.unit == "ns":  # Python's have microseconds
        return _with_nulls(array, [*array.to_numpy(zero_copy_only=False)])
    if kind in (pa.int64(), pa.float64(), pa.bool_()) or not _is_number(types, kind):
        return array.to_pylist()  # type: ignore[no-any-return]
    return _with_nulls(array, [*_numbers(array)])


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _numbers(array: Any) -> Any:
    """Return the numbers of an array; missing ones have any value."""
    if array.null_count:
        array = array.fill_null(False if array.type == required("pyarrow", "a table").bool_() else 0)
    return array.to_numpy(zero_copy_only=False)


def _with_nulls(array: Any, values: list[Any]) -> list[Any]:
    if not array.null_count:
        return values
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]


def _lengths(array: Any) -> Any:
    lengths = required("pyarrow.compute", "a table").list_value_length(array).fill_null(0)
    return lengths.to_numpy(zero_copy_only=False)


def _parts(array: Any, flat: Any) -> list[Any]:
    """Return the values of each list, given all values one after another without those of missing lists."""
    ends = np.cumsum(_lengths(array)).tolist()
    return [flat[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]


def _lists(pa: Any, array: Any) -> list[Any]:
    """Return lists: arrays if they have numbers, with one length for the lists of each level. Depends on no other row."""
    flat = array.flatten()
    dense, leaf = _dense(pa.types, flat), flat.type
    while _is_list(pa.types, leaf):
        leaf = leaf.value_type
    if dense is not None:
        parts = [part.copy() for part in _parts(array, dense)]
    elif _is_number(pa.types, leaf) and len(array) > 1:
        parts = [_lists(pa, array.slice(row, 1))[0] for row in range(len(array))]
    else:
        parts = _parts(array, values_of(flat))
    return _with_nulls(array, parts)


def _dense(types: Any, array: Any) -> Any:
    """Return numbers, or lists of numbers that have one length, as one array; None for others, or if one is missing."""
    if array.null_count:
        return None
    if _is_number(types, array.type):
        return _numbers(array)
    if not _is_list(types, array.type) or (inner := _dense(types, array.flatten())) is None:
        return None
    lengths = _lengths(array)
    if (lengths != lengths[:1]).any():
        return None
    return inner.reshape(len(array), *lengths[:1].tolist() or [0], *inner.shape[1:])


def _as_dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise DataError(f"a map has a key twice: its keys are {', '.join(repr(key) for key, _ in pairs[:8])}")
    return values
