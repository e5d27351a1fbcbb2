"""Parquet, Arrow and CSV files, written by pyarrow, pandas and Python's csv module."""

from __future__ import annotations

import bz2
import csv
import datetime
import decimal
import gzip
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

from mpitrain import data

from .values import Case, Near, documented, no_checksum

Rng = np.random.Generator

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS = [*INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.bool_()]
UNITS = ("s", "ms", "us", "ns")
TEXTS = ["", "a", "b,c", 'say "x"', "two\nlines", "ünïcödé", "日本", "NA", "null", "1", " x ", "x" * 300, "\t", "'"]
NAMES = ["x", "y", "z", "label", "a b", "Größe", "x.y", "index", "level_0", "0", 'q"', "a,b", "X"]


def pick(rng: Rng, values: Sequence[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def _leaf(rng: Rng) -> Any:
    others = [
        pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(4), pa.date32(), pa.date64(),
        pa.time32(pick(rng, UNITS[:2])), pa.time64(pick(rng, UNITS[2:])), pa.timestamp(pick(rng, UNITS)),
        pa.timestamp(pick(rng, UNITS), pick(rng, ["UTC", "Europe/Berlin", "+05:30"])), pa.duration(pick(rng, UNITS)),
        pa.decimal128(20, 3), pa.decimal256(50, 10), pa.null(), pa.string_view(), pa.binary_view(),
        pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.int64()),
    ]  # fmt: skip
    return pick(rng, NUMBERS if rng.random() < 0.5 else others)


def _kind(rng: Rng, depth: int = 2) -> Any:
    """Return a random type."""
    if depth == 0 or rng.random() < 0.7:
        leaf = _leaf(rng)  # pyarrow writes nested columns of nulls wrongly
        return pa.int64() if depth < 2 and leaf == pa.null() else leaf
    inner = _kind(rng, depth - 1)
    shape = pick(rng, ["list", "large", "fixed", "struct", "map"])
    if shape == "struct":
        return pa.struct([("p", inner), ("q", _kind(rng, 0))])
    if shape == "map":
        return pa.map_(pick(rng, [pa.string(), pa.int32()]), inner)
    return {"list": pa.list_(inner), "large": pa.large_list(inner), "fixed": pa.list_(inner, 3)}[shape]


def _value(rng: Rng, kind: Any, nulls: float) -> Any:
    """Return a random Python value of a type."""
    types = pa.types
    if types.is_null(kind) or rng.random() < nulls:
        return None
    if types.is_boolean(kind):
        return bool(rng.integers(2))
    if types.is_integer(kind):
        info = np.iinfo(kind.to_pandas_dtype())
        return int(pick(rng, [info.min, info.max, int(rng.integers(0, 100)), int(rng.integers(info.max // 2))]))
    if types.is_floating(kind):
        value = pick(rng, [rng.standard_normal(), 0.1, -0.0, math.nan, math.inf, 3.0])
        return float(kind.to_pandas_dtype()(value))
    if types.is_dictionary(kind):
        return pick(rng, ["a", "b", "Größe"]) if kind.value_type == pa.string() else int(rng.integers(5))
    if types.is_string(kind) or types.is_large_string(kind) or kind == pa.string_view():
        return pick(rng, TEXTS)
    if types.is_fixed_size_binary(kind):
        return rng.bytes(4)
    if types.is_binary(kind) or types.is_large_binary(kind) or kind == pa.binary_view():
        return rng.bytes(int(rng.integers(0, 20)))
    if types.is_decimal(kind):
        return decimal.Decimal(int(rng.integers(-(2**40), 2**40))).scaleb(-kind.scale)
    if types.is_struct(kind):
        return {field.name: _value(rng, field.type, nulls) for field in kind}
    if types.is_map(kind):
        keys = ["a", "b", "c"] if kind.key_type == pa.string() else [1, -2, 3]
        return [(key, _value(rng, kind.item_type, nulls)) for key in keys[: int(rng.integers(0, 4))]]
    if types.is_nested(kind):
        count = kind.list_size if types.is_fixed_size_list(kind) else int(rng.integers(0, 4))
        return [_value(rng, kind.value_type, nulls) for _ in range(count)]
    return _time(rng, kind)


def _time(rng: Rng, kind: Any) -> Any:
    types, number = pa.types, int(rng.integers(-(2**31), 2**31))
    if types.is_date(kind):
        return datetime.date(1970, 1, 1) + datetime.timedelta(number % 20000 - 10000)
    if types.is_time(kind):
        per_day = 86400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        return abs(number * 12345) % per_day
    return number * int(pick(rng, [1, 2**28 if kind.unit == "ns" else 1]))


def _array(rng: Rng, kind: Any, count: int) -> Any:
    nulls = pick(rng, [0, 0, 0.2])
    values = [_value(rng, kind, nulls) for _ in range(count)]
    if pa.types.is_dictionary(kind):
        return pa.array(values, kind.value_type).dictionary_encode().cast(kind)
    return pa.array(values, kind)


def _frame(rng: Rng, count: int) -> Any:
    """Return a data frame of pandas with one of its kinds of index."""
    frame = pd.DataFrame(
        {
            "i": rng.integers(-5, 5, count),
            "u8": rng.integers(0, 255, count).astype(np.uint8),
            "f": rng.standard_normal(count).astype(pick(rng, [np.float32, np.float64])),
            "c": pd.Categorical([pick(rng, ["a", "b"]) for _ in range(count)]),
            "ci": pd.Categorical(rng.integers(0, 3, count)),
            "t": [pick(rng, TEXTS) for _ in range(count)],
            "o": pd.Series([pick(rng, ["x", None]) for _ in range(count)], dtype=object),
            "n": pd.array([pick(rng, [1, 2, None]) for _ in range(count)], dtype="Int64"),
            "b": pd.array([pick(rng, [True, None]) for _ in range(count)], dtype="boolean"),
            "d": pd.date_range("2020", periods=count, tz=pick(rng, [None, "UTC", "Asia/Tokyo"])),
            "td": pd.to_timedelta(rng.integers(0, 10**6, count), "s"),
            "a": pd.Series([rng.standard_normal(2) for _ in range(count)], dtype=object),
            "p": pd.period_range("2020-01", periods=count, freq="M"),
            "iv": pd.interval_range(0, count, count) if count else pd.Series([], dtype=object),
            "dt": pd.Series([datetime.date(2020, 1, 1)] * count, dtype=object),
        }
    )
    frame = frame[[str(name) for name in rng.permutation(frame.columns)[: rng.integers(1, len(frame.columns))]]]
    index = pick(rng, ["range", "named", "unnamed", "multi", "text", "filtered"])
    if index == "named":
        frame.index = pd.Index(rng.integers(0, 9, count), name="id")
    elif index == "unnamed":
        frame.index = pd.Index(rng.permutation(count))
    elif index == "multi":
        frame.index = pd.MultiIndex.from_arrays([range(count), ["k"] * count], names=[pick(rng, [None, "k"]), "l"])
    elif index == "text":
        frame.index = pd.Index([f"r{i}" for i in range(count)])
    elif index == "filtered":
        frame = frame.iloc[::2]
    return frame


def _write_parquet(rng: Rng, path: Path, table: Any) -> None:
    options = {
        "compression": pick(rng, ["snappy", "zstd", "gzip", "lz4", "brotli", "none"]),
        "use_dictionary": bool(rng.integers(2)),
        "version": "2.6",  # older ones round times, and only those of some files
        "data_page_version": pick(rng, ["1.0", "2.0"]),
        "write_page_checksum": True,
        "store_schema": True,
    }
    pq.write_table(table, path, row_group_size=pick(rng, [None, 3, 7]), **options)


def _write_arrow(rng: Rng, path: Path, table: Any) -> None:
    options = ipc.IpcWriteOptions(compression=pick(rng, [None, "lz4", "zstd"]))
    make = pick(rng, [ipc.new_file, ipc.new_stream])
    if rng.random() < 0.3 and not any(pa.types.is_nested(kind) or "view" in str(kind) for kind in table.schema.types):
        return feather.write_feather(table, path, compression=pick(rng, ["lz4", "zstd", "uncompressed"]))
    with make(path, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=pick(rng, [None, 3]))
    return None


def parquet(rng: Rng, folder: Path) -> Case:
    return _columnar(rng, folder, data.parquet, "parquet", _write_parquet)


def arrow(rng: Rng, folder: Path) -> Case:
    return _columnar(rng, folder, data.arrow, "arrow", _write_arrow)


def _columnar(rng: Rng, folder: Path, open_split: Any, suffix: str, write: Callable[..., None]) -> Case:
    count = pick(rng, [1, 2, 8, 20])
    if rng.random() < 0.25:
        frame, path = _frame(rng, count), folder / f"frame.{suffix}"
        if suffix == "parquet":
            frame.to_parquet(path)
        else:
            frame = frame.reset_index(drop=True)
            frame.to_feather(path)
        rows = _rows(pa.Table.from_pandas(frame, preserve_index=False))
        return Case([path], lambda: _read(open_split(path)), rows, f"a data frame with {frame.index!r:.80}")
    names = [str(name) for name in rng.permutation(NAMES)[: rng.integers(1, 5)]]
    kinds = [_kind(rng) for _ in names]
    if rng.random() < 0.3:
        return _labelled(rng, folder, open_split, suffix, write, names)
    paths: list[Path] = []
    rows: list[dict[str, Any]] = []
    for shard in range(pick(rng, [1, 1, 3])):
        own = {name: _narrowed(rng, kind) if shard else kind for name, kind in zip(names, kinds, strict=True)}
        columns = {name: _array(rng, kind, pick(rng, [count, 0]) if shard else count) for name, kind in own.items()}
        length = min(map(len, columns.values()))
        table = pa.table({name: column.slice(0, length) for name, column in columns.items()})
        rows += _rows(table, dict(zip(names, kinds, strict=True)))
        if rng.random() < 0.3:
            table = table.append_column("unused", pa.array([shard] * length))
        table = table.select([str(name) for name in rng.permutation(table.schema.names)])
        paths.append(folder / pick(rng, [f"part-{shard}.{suffix}", f"part {shard} é"]))
        write(rng, paths[-1], table)
        _check_written(paths[-1], suffix)
    protects = _protects(paths[0]) if suffix == "parquet" else no_checksum
    return Case(
        paths, lambda: _read(open_split(paths, columns=names)), rows, ", ".join(map(str, kinds)), is_protected=protects
    )


def _protects(path: Path) -> Callable[[str, int, int], bool]:
    """Return whether damage is in the pages of a Parquet file, which have checksums."""
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return lambda way, start, stop: stop <= footer or way == "cut"


def _check_written(path: Path, suffix: str) -> None:
    """Check that pyarrow reads what it has written."""
    if suffix == "parquet":
        pq.read_table(path).validate(full=True)
    else:
        with pa.memory_map(str(path)) as mapped:
            is_file = mapped.read(6) == b"ARROW1"
            mapped.seek(0)
            (ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)).read_all().validate(full=True)


def _narrowed(rng: Rng, kind: Any) -> Any:
    """Return a type whose values another type includes, for another shard."""
    narrower = {pa.int64(): pa.int32(), pa.float64(): pa.float32(), pa.uint16(): pa.uint8(), pa.int32(): pa.int8()}
    return narrower.get(kind, kind) if rng.random() < 0.3 else kind


def _rows(table: Any, kinds: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    columns = {}
    for name in table.schema.names:
        column = table.column(name)
        if kinds is not None and column.type != kinds[name]:
            column = column.cast(kinds[name])
        columns[name] = [documented(value) for value in column]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _read(split: Any) -> list[Any]:
    """Return all rows; a batch must have the same rows, also in another order."""
    rows = [split.dataset[i] for i in range(len(split))]
    turned = split.dataset.__getitems__([*range(len(rows) - 1, -1, -1)])
    if repr(turned[::-1]) != repr(rows):
        return [rows, "differ from those of a batch", turned[::-1]]
    return rows


def _labelled(
    rng: Rng, folder: Path, open_split: Any, suffix: str, write: Callable[..., None], names: Sequence[str]
) -> Case:
    """Return columns of numbers, read as arrays."""
    count, kinds = 10, [pick(rng, NUMBERS) for _ in names]
    label = pick(rng, [pa.int8(), pa.int64(), pa.float32(), pa.uint8(), pa.bool_(), pa.list_(pa.float32(), 3)])
    wide = rng.random() < 0.3
    columns = {
        name: _numbers(rng, pa.list_(kind, 2) if wide else kind, count) for name, kind in zip(names, kinds, strict=True)
    }
    columns["target"] = _numbers(rng, label, count)
    paths, stops = [], sorted({count, *(rng.integers(0, count, 2) if rng.random() < 0.4 else [])})
    for start, stop in zip([0, *stops], [*stops, stops[-1]] if rng.random() < 0.3 else stops, strict=False):
        paths.append(folder / f"numbers-{len(paths)}.{suffix}")
        write(rng, paths[-1], pa.table(columns).slice(start, stop - start))

    def read() -> Any:
        split = open_split(paths, columns=names, label="target")
        batch, part = split.read_batch(0, len(split)), split.read_batch(len(split) // 2, len(split))
        if not np.array_equal(part.examples, batch.examples[len(split) // 2 :]):
            return "a part differs from the whole"
        return [np.column_stack([batch.examples, batch.labels]).tolist(), batch.labels.dtype]

    values = [np.ravel([value for column in columns.values() for value in _flat(column[i])]) for i in range(count)]
    expected = [[[_number(value) for value in row.tolist()] for row in values], _label_dtype(label)]
    return Case(paths, read, expected, f"{', '.join(map(str, kinds))} with label {label}, {len(paths)} files")


def _flat(scalar: Any) -> list[Any]:
    value = scalar.as_py()
    return list(value) if isinstance(value, list) else [value]


def _label_dtype(kind: Any) -> Any:
    kind = getattr(kind, "value_type", kind)
    return np.dtype(np.uint8 if kind == pa.bool_() else kind.to_pandas_dtype())


def _number(value: Any) -> Any:
    return Near(lambda got: got == value or (got != got and value != value), repr(value))


def _numbers(rng: Rng, kind: Any, count: int) -> Any:
    """Return numbers that a float32 represents."""
    inner = getattr(kind, "value_type", kind)
    size = count * getattr(kind, "list_size", 1)
    values = rng.integers(0, 2, size) if inner == pa.bool_() else rng.integers(0, 100, size)
    array = pa.array(values.astype(inner.to_pandas_dtype()), inner)
    return pa.FixedSizeListArray.from_arrays(array, kind.list_size) if kind is not inner else array


# CSV files


def _csv_column(rng: Rng, count: int) -> tuple[str, list[Any]]:
    kind = pick(rng, ["int", "large", "huge", "float", "bool", "text", "text", "date", "time", "zone", "empty"])
    nulls = pick(rng, [0, 0, 0.2])
    made: dict[str, Callable[[], Any]] = {
        "int": lambda: int(rng.integers(-9, 9)),
        "large": lambda: int(rng.integers(2**53, 2**63 - 1)),
        "huge": lambda: int(rng.integers(2**60, 2**63 - 1)) * int(pick(rng, [1, 2, 1000])) + 1,
        "float": lambda: float(pick(rng, [rng.standard_normal(), 1e300, 0.5, 1e-7])),
        "bool": lambda: bool(rng.integers(2)),
        "text": lambda: str(pick(rng, TEXTS)),
        "date": lambda: datetime.date(2020, 1, 1) + datetime.timedelta(int(rng.integers(1000))),
        "time": lambda: datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=int(rng.integers(10**8))),
        "zone": lambda: datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(int(rng.integers(99))),
        "empty": lambda: None,
    }
    values = [None if rng.random() < nulls else made[kind]() for _ in range(count)]
    if kind == "text":
        values[0] = "word"  # otherwise all texts may be numbers or missing values
    return kind, values


def _csv_value(kind: str, value: Any) -> Any:
    """Return what must be read: the types of CSV files are inferred, but no value may change."""
    if value is None:
        return Near(lambda got: got is None or got == "" or got != got, "a missing value")
    if kind == "float":
        return Near(lambda got: isinstance(got, (float, int)) and got == value, repr(value))
    if kind == "int":
        return Near(lambda got: isinstance(got, int) and got == value, repr(value))
    if kind in ("large", "huge"):
        return Near(lambda got: not isinstance(got, float) and int(got) == value, repr(value))
    if kind in ("date", "time", "zone"):
        return Near(lambda got: _same_time(got, value), repr(value))
    return value


def _same_time(got: Any, value: Any) -> bool:
    """Return whether two times are the same; those without a zone are in UTC."""
    time, other = (pd.Timestamp(each) for each in (got, value))
    return bool(pd.to_datetime(time, utc=True) == pd.to_datetime(other, utc=True))


def _encoding(rng: Rng, text: str) -> str:
    """Return a random encoding that has all characters of a text."""
    choices = ["utf-8", *rng.permutation(["utf-8-sig", "latin-1", "cp1252", "utf-16", "gb18030"])]
    for choice in choices[rng.integers(2) :]:
        try:
            text.encode(str(choice))
            return str(choice)
        except UnicodeEncodeError:
            continue
    return "utf-8"


def _compressed(rng: Rng, content: bytes) -> tuple[bytes, str]:
    name = pick(rng, ["", "", "", "gzip", "bz2", "zstd", "lz4"])
    if name in ("zstd", "lz4"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, name) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes(), name
    return {"": content, "gzip": gzip.compress(content), "bz2": bz2.compress(content)}[name], name


def _csv_text(
    rng: Rng, names: list[str], columns: list[list[Any]], kinds: list[str], delimiter: str
) -> tuple[str, str]:
    """Return a table as text, and its writer."""
    frame = pd.DataFrame({name: pd.Series(column, dtype=object) for name, column in zip(names, columns, strict=True)})
    writer = pick(rng, ["pandas", "pandas", "index", "csv", "all", "unix", "nonnumeric", "mac", "pyarrow"])
    if writer == "pyarrow" and len(names) > 1 and not any(kind in ("huge", "zone", "empty") for kind in kinds):
        sink = io.BytesIO()
        options = pa_csv.WriteOptions(delimiter=delimiter)
        pa_csv.write_csv(pa.table(dict(zip(names, columns, strict=True))), sink, options)
        return sink.getvalue().decode(), writer
    if writer in ("pandas", "index", "pyarrow"):
        return frame.to_csv(index=writer == "index", sep=delimiter), writer
    sink = io.StringIO(newline="")
    quoting = {"all": csv.QUOTE_ALL, "nonnumeric": csv.QUOTE_NONNUMERIC}.get(writer, csv.QUOTE_MINIMAL)
    quoting = csv.QUOTE_ALL if writer == "mac" else quoting  # else line feeds are not quoted
    end = {"unix": "\n", "mac": "\r"}.get(writer, "\r\n")
    lines = csv.writer(sink, delimiter=delimiter, quoting=quoting, lineterminator=end)
    lines.writerows([names, *zip(*columns, strict=True)])
    return sink.getvalue(), writer


def csv_files(rng: Rng, folder: Path) -> Case:
    count, delimiter = pick(rng, [1, 3, 20]), pick(rng, [",", ",", ";", "\t", "|"])
    names = [str(name) for name in rng.permutation(NAMES)[: rng.integers(1, 5)]]
    if rng.random() < 0.2:
        return _labelled_csv(rng, folder, names, delimiter)
    made = [_csv_column(rng, count) for _ in names]
    kinds, columns = [kind for kind, _ in made], [column for _, column in made]
    starts = sorted({0, *(rng.integers(0, count, 2) if rng.random() < 0.3 else [])})
    paths, about = [], []
    encoding = _encoding(rng, repr((names, columns)))
    for start, stop in zip(starts, [*starts[1:], count], strict=True):
        text, writer = _csv_text(rng, names, [column[start:stop] for column in columns], kinds, delimiter)
        content, codec = _compressed(rng, text.encode(encoding))
        paths.append(folder / pick(rng, [f"{start}.csv", f"a {start}.csv"]))
        paths[-1].write_bytes(content)
        about.append(f"{writer} {codec}")
    rows = [
        {name: _csv_value(kind, value) for name, kind, value in zip(names, kinds, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]

    def read() -> Any:
        return _read(data.csv(paths, encoding=encoding.replace("-sig", ""), delimiter=delimiter))

    checked = about[0].split()[-1] in ("gzip", "bz2")
    about.append(f"{encoding}, {delimiter!r}: {', '.join(kinds)}")
    return Case(paths, read, rows, ", ".join(about), is_protected=lambda way, start, stop: checked)


def _labelled_csv(rng: Rng, folder: Path, names: list[str], delimiter: str) -> Case:
    """Return shards of numbers, of which some have whole numbers where others have decimals."""
    paths, expected, kinds = [], [], [pick(rng, ["int", "float", "bool"]) for _ in names]
    sizes = pick(rng, [[5, 5, 5], [5, 0, 3], [5, 1, 0], [0, 5, 5]])
    for shard in range(3):
        columns = {}
        for name, kind in zip(names, kinds, strict=True):
            values = rng.integers(0, 100, sizes[shard])
            columns[name] = values + 0.5 * (kind == "float" and shard > 0) if kind != "bool" else values > 50
        frame = pd.DataFrame(columns).assign(target=rng.integers(0, 9, sizes[shard]))
        expected += [[*map(_number, row)] for row in frame[[*names, "target"]].astype(float).to_numpy().tolist()]
        paths.append(folder / f"{shard}.csv")
        frame[[str(name) for name in rng.permutation(frame.columns)]].to_csv(paths[-1], index=False, sep=delimiter)

    def read() -> Any:
        split = data.csv(paths, columns=names, label="target", delimiter=delimiter)
        batch = split.read_batch(0, len(split))
        return np.concatenate([batch.examples, batch.labels[:, None]], 1).tolist()

    return Case(paths, read, expected, f"shards of {', '.join(kinds)}, {sizes} rows, {delimiter!r}")
