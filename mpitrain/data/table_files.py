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
        file = (ipc.open_file if is_file else ipc.open_stream)(mapped)
        batches = [] if is_file else list(file)
        rows = [file.get_batch(number).num_rows for number in range(file.num_record_batches)] if is_file else []

    def read(group: int, columns: Sequence[str]) -> Any:
        if is_file:
            with _mapped(path) as mapped:
                batch = ipc.open_file(mapped).get_batch(group)
        else:
            batch = batches[group]
        table = pa.Table.from_batches([batch]).select(columns)
        table.validate(full=True)  # the format has no checksums, and damaged offsets would crash the process
        return table

    return TableFile(file.schema, rows or [batch.num_rows for batch in batches], read, _pandas_index(file.schema))


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """Yield a file as a memory map of Arrow, which takes only names in UTF-8."""
    with (
        open(path, "rb") as file,
        required("pyarrow", "a table").memory_map(f"/proc/self/fd/{file.fileno()}") as mapped,
    ):
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
    if table.schema.types == schema.types:
        return table
    pa = required("pyarrow", "a table")
    try:
        return table.cast(schema)
    except pa.ArrowNotImplementedError:  # of dictionaries with views
        columns = zip(table.columns, schema.types, strict=True)
        return pa.table([pa.array(column.to_pylist(), kind) for column, kind in columns], schema=schema)


def values_of(column: Any) -> list[Any]:
    """Return the values of a column of an Arrow table with the types of the file; None for missing values.

    Whole numbers of 64 bits, float64, booleans and texts are Python's objects, other numbers NumPy's. Lists of numbers
    are arrays if the lists of each level have one length; other lists are lists. Structs and maps are dicts. Times with
    nanoseconds are NumPy's, in UTC.
    """
    pa = required("pyarrow", "a table")
    array, types = column.combine_chunks(), pa.types
    if isinstance(array.type, pa.FixedShapeTensorType) and not array.null_count:
        return [*array.to_numpy_ndarray().copy()]
    kind = _plain(pa, array.type)
    if (counts := _as_counts(pa, kind)) != kind:
        array = array.cast(counts)
    if kind in (pa.int64(), pa.float64(), pa.bool_()) or not (
        types.is_nested(kind) or counts != kind or _is_number(types, kind)
    ):
        return array.to_pylist()  # type: ignore[no-any-return]
    return [_typed(types, kind, value) for value in array.to_pylist()]


def _as_counts(pa: Any, kind: Any) -> Any:
    """Return a type with int64 in place of times with nanoseconds, which Python's times would round."""
    types = pa.types
    if getattr(kind, "unit", "") == "ns":
        return pa.int64()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_as_counts(pa, field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_as_counts(pa, kind.key_type), _as_counts(pa, kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_as_counts(pa, kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        make = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_as_counts(pa, kind.value_type)))
    return kind


def _typed(types: Any, kind: Any, value: Any) -> Any:
    """Return a value of ``to_pylist`` with an Arrow type."""
    if value is None:
        return None
    if types.is_dictionary(kind):
        return _typed(types, kind.value_type, value)
    if getattr(kind, "unit", "") == "ns":
        return (np.datetime64 if types.is_timestamp(kind) else np.timedelta64)(value, "ns")
    if _is_number(types, kind):
        return value if str(kind) in ("int64", "double", "bool") else kind.to_pandas_dtype()(value)
    if types.is_struct(kind):
        return {field.name: _typed(types, field.type, value[field.name]) for field in kind}
    if types.is_map(kind):
        pairs = {_typed(types, kind.key_type, key): _typed(types, kind.item_type, item) for key, item in value}
        if len(pairs) < len(value):
            raise DataError(f"a map has a key twice: {', '.join(repr(key) for key, _ in value[:8])}")
        return pairs
    if not hasattr(kind, "value_type"):  # no list
        return value
    leaf = kind.value_type
    while hasattr(leaf, "value_type"):  # of lists and dictionaries
        leaf = leaf.value_type
    if _is_number(types, leaf) and not _has_none(value):
        with contextlib.suppress(ValueError):  # the lists have different lengths
            return np.array(value, leaf.to_pandas_dtype())
    return [_typed(types, kind.value_type, item) for item in value]


def _is_number(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _has_none(value: list[Any]) -> bool:
    return None in value or (bool(value) and isinstance(value[0], list) and any(map(_has_none, value)))
