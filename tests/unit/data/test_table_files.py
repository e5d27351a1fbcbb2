"""Tables that other programs have written: columns, types and shards."""

from __future__ import annotations

import datetime
import decimal
import gzip
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mpitrain import data
from mpitrain.errors import DataError

from ...support.examples import refused


def write(path: Path, table: pa.Table) -> Path:
    """Write a table as Parquet, or as an Arrow file or stream, by the name's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
        with new(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    return path


READERS = {"parquet": data.parquet, "arrow": data.arrow, "stream": data.arrow}
KINDS = pytest.mark.parametrize("kind", READERS)

TYPES: list[tuple[pa.DataType, list[Any]]] = [
    *((kind, [1, 0, 100]) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32())),
    (pa.uint64(), [2**64 - 1, 0, 1]),
    (pa.float32(), [0.5, -1.5, 2.0]),
    (pa.float16(), [np.float16(0.5), np.float16(-1), np.float16(2)]),
]


def same(value: Any, expected: Any) -> bool:
    return bool(type(value) is type(expected) and np.array_equal(value, expected)) and (
        not isinstance(value, np.ndarray) or value.dtype == expected.dtype
    )


class TestTypesOfValues:
    @KINDS
    @pytest.mark.parametrize(("type_", "values"), TYPES, ids=lambda value: str(value)[:8])
    def test_numbers(self, kind: str, type_: pa.DataType, values: list[Any], tmp_path: Path) -> None:
        """Alone and in lists, which may be empty, in any row, in a batch and by themselves."""
        numpy_type = np.dtype(type_.to_pandas_dtype()).type
        lists, vectors = [values, [], values[:1]], [values[:2], values[1:], values[:2]]
        table = pa.table(
            {
                "x": pa.array(values, type_),
                "null": pa.array([None, *values[1:]], type_),
                "list": pa.array(lists, pa.list_(type_)),
                "large": pa.array(lists, pa.large_list(type_)),
                "fixed": pa.array(vectors, pa.list_(type_, 2)),
                "nested": pa.array([[vectors[0], vectors[1]], [], [[]]], pa.list_(pa.list_(type_))),
                "struct": pa.array([{"a": value} for value in values], pa.struct([("a", type_)])),
                "map": pa.array([[("a", value)] for value in values], pa.map_(pa.string(), type_)),
            }
        )
        split = READERS[kind](write(tmp_path / f"t.{kind}", table))
        batch = split.dataset.__getitems__([2, 0, 1])
        for row, taken in zip((2, 0, 1), batch, strict=True):
            alone = split.dataset[row]
            for example in (alone, taken):
                assert same(example["x"], numpy_type(values[row]))
                assert same(example["null"], None if row == 0 else numpy_type(values[row]))
                assert same(example["list"], np.array(lists[row], numpy_type)) and example["list"].flags.writeable
                assert same(example["large"], np.array(lists[row], numpy_type))
                assert same(example["fixed"], np.array(vectors[row], numpy_type))
                assert same(example["nested"], np.array([vectors[:2], [], [[]]][row], numpy_type))
                assert same(example["struct"]["a"], numpy_type(values[row]))
                assert same(example["map"]["a"], numpy_type(values[row]))

    @KINDS
    def test_other_values(self, kind: str, tmp_path: Path) -> None:
        values: dict[str, list[Any]] = {
            "text": ["a\0", "", None],
            "bytes": [b"a\0", b"", None],
            "texts": [["a\0", "b"], [], None],
            "binaries": [[b"a\0"], [], [b"b", b""]],
            "with none": [[1, None], [], [2]],
            "bool": [True, None, False],
            "int64": [2**63 - 1, None, 0],
            "float64": [0.1, None, float("inf")],
            "date": [datetime.date(2020, 2, 29), None, datetime.date(1969, 1, 1)],
            "time": [datetime.datetime(2020, 1, 1, 12), None, datetime.datetime(1900, 1, 1)],
            "decimal": [decimal.Decimal("1.10"), None, decimal.Decimal("-3.00")],
        }
        table = pa.table({**values, "category": pa.array(["x", "y", "x"]).dictionary_encode()})
        split = READERS[kind](write(tmp_path / f"t.{kind}", table))
        for row, example in enumerate(split.dataset.__getitems__([0, 1, 2])):
            own = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in example.items()}
            assert own == {**{name: column[row] for name, column in values.items()}, "category": "xyx"[row]}

    def test_nanoseconds_and_tensors(self, tmp_path: Path) -> None:
        time = pa.timestamp("ns", "UTC")
        columns = {
            "time": pa.array([1, None], time),
            "of day": pa.array([1234567891, 2], pa.time64("ns")),
            "list": pa.array([[1, None], []], pa.list_(time)),
            "struct": pa.array([{"a": 1}, None], pa.struct([("a", pa.duration("ns"))])),
            "map": pa.array([[(1, 1)], []], pa.map_(time, time)),
        }
        tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(2, 2, 3))
        row = data.arrow(write(tmp_path / "t.arrow", pa.table({**columns, "tensor": tensors}))).dataset[0]
        one, span = np.datetime64(1, "ns"), np.timedelta64(1, "ns")
        assert (row["time"], row["of day"], row["list"]) == (one, np.timedelta64(1234567891, "ns"), [one, None])
        assert (row["struct"], row["map"]) == ({"a": span}, {one: one})
        assert row["tensor"].tolist() == [[0, 1, 2], [3, 4, 5]]

    @KINDS
    def test_values_that_python_cannot_hold_are_named(self, kind: str, tmp_path: Path) -> None:
        far = pa.array([253402300800], pa.timestamp("s"))  # the year 10000
        path = write(tmp_path / f"t.{kind}", pa.table({"far": far, "x": [1]}))
        split = READERS[kind](path)
        with pytest.raises(DataError, match="far") as caught:
            split.dataset[0]
        assert str(path) in str(caught.value) and READERS[kind](path, ["x"]).dataset[0] == {"x": 1}

    @pytest.mark.parametrize("kind", ["list<item: string_view>", "map<string, string_view>", "struct<a: string_view>"])
    def test_views_in_lists(self, kind: str, tmp_path: Path) -> None:
        view = pa.string_view()
        type_, value = {
            "list": (pa.list_(view), ["a", "b"]),
            "map": (pa.map_(pa.string(), view), {"a": "b"}),
            "struct": (pa.struct([("a", view)]), {"a": "b"}),
        }[kind.split("<")[0]]
        given = [*value.items()] if kind.startswith("map") else value
        path = write(tmp_path / "t.arrow", pa.table({"v": pa.array([given, given], type_)}))
        assert str(type_) == kind and data.arrow(path).dataset.__getitems__([1, 0]) == [{"v": value}] * 2

    def test_categories_with_views(self, tmp_path: Path) -> None:
        """As polars writes them."""
        values = pa.array(["x", "y"], pa.string_view())
        categories = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.uint32()), values)
        split = data.arrow(write(tmp_path / "t.arrow", pa.table({"v": categories})))
        assert split.dataset.__getitems__([1, 0]) == [{"v": "x"}, {"v": "y"}]

    def test_a_batch_has_the_types(self, tmp_path: Path) -> None:
        table = pa.table({"x": pa.array([[1.0], [2.0]], pa.list_(pa.float32())), "label": pa.array([1, 0], pa.int8())})
        batch = data.parquet(write(tmp_path / "t.parquet", table)).load(np.arange(2), 0, 0).examples
        assert (batch["x"].dtype, batch["label"].dtype) == (np.float32, np.int8)

    @KINDS
    def test_a_vector_is_a_label(self, kind: str, tmp_path: Path) -> None:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 3)
        path = write(tmp_path / f"t.{kind}", pa.table({"x": [1.0, 2.0], "y": vectors}))
        batch = READERS[kind](path, label="y").read_batch(0, 2)
        assert batch.labels.tolist() == [[0, 1, 2], [3, 4, 5]] and batch.examples.tolist() == [[1], [2]]

    @KINDS
    @pytest.mark.parametrize("column", [pa.array([1, 2**24 + 1], pa.int64()), pa.array([0, 2**63 + 1], pa.uint64())])
    def test_integers_beside_decimals_keep_their_values(self, kind: str, column: pa.Array, tmp_path: Path) -> None:
        path = write(tmp_path / f"t.{kind}", pa.table({"id": column, "z": [0.5, 1.5], "y": [0, 1]}))
        refused("row 1: id", READERS[kind](path, label="y").read_batch, 0, 2)
        assert READERS[kind](path, ["id"], "y").read_batch(0, 2).examples[:, 0].tolist() == column.to_pylist()

    @KINDS
    def test_booleans_beside_decimals(self, kind: str, tmp_path: Path) -> None:
        path = write(tmp_path / f"t.{kind}", pa.table({"b": [True, False], "z": [0.5, 1.5], "y": [0, 1]}))
        assert READERS[kind](path, label="y").read_batch(0, 2).examples.tolist() == [[1, 0.5], [0, 1.5]]

    def test_labels_are_numbers(self, tmp_path: Path) -> None:
        table = pa.table({"x": [1, 2], "bool": [True, False], "nan": [0.0, float("nan")], "null": [1, None]})
        path = write(tmp_path / "t.parquet", table.append_column("category", pa.array(["a", "b"]).dictionary_encode()))
        assert data.parquet(path, ["x"], "bool").read_batch(0, 2).labels.tolist() == [1, 0]
        refused("row 1: nan is NaN", data.parquet(path, ["x"], "nan").read_batch, 0, 2)
        refused("row 1: null has no value", data.parquet(path, ["x"], "null").read_batch, 0, 2)
        refused("category is of type", data.parquet, path, ["x"], "category")


TWO_LEVELS = pd.MultiIndex.from_tuples([(1, 4), (2, 5), (3, 6)], names=["a", None])


class TestColumns:
    @pytest.mark.parametrize("index", [[3, 1, 2], pd.Index([3, 1, 2], name="id"), TWO_LEVELS])
    def test_the_index_of_pandas_is_no_feature(self, index: Any, tmp_path: Path) -> None:
        frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [0, 1, 0]}, index=index)
        frame.to_parquet(tmp_path / "t.parquet")
        split = data.parquet(tmp_path / "t.parquet", label="y")
        assert split.shape == (1,) and "left out" in str(split.note)
        assert list(data.parquet(tmp_path / "t.parquet").dataset[0]) == ["x", "y"]
        if isinstance(index, list):
            frame.to_csv(tmp_path / "t.csv")
            assert data.csv(tmp_path / "t.csv", label="y").shape == (1,)
            pd.read_csv(tmp_path / "t.csv").to_csv(tmp_path / "again.csv", index=False)
            assert list(data.csv(tmp_path / "again.csv").dataset[0]) == ["x", "y"]
        elif isinstance(index, pd.MultiIndex):
            return
        else:
            assert data.parquet(tmp_path / "t.parquet", ["x"], "id").read_batch(0, 3).labels.tolist() == [3, 1, 2]

    def test_a_column_that_is_chosen_or_stored_twice(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.parquet", pa.table([[1.0], [2.0], [0]], ["x", "x", "y"]))
        refused("'x'", data.parquet, path, label="y")
        refused("'x'", data.parquet, path, ["x"], "y")
        write(path, pa.table({"x": [1.0], "y": [0]}))
        refused("'x' is chosen 2 times", data.parquet, path, ["x", "x"], "y")
        refused("'y' is chosen both", data.parquet, path, ["x", "y"], "y")


class TestShards:
    @pytest.fixture
    def shards(self, tmp_path: Path) -> Any:
        def make(*tables: dict[str, Any], kind: str = "parquet") -> str:
            for number, columns in enumerate(tables):
                write(tmp_path / f"{number}.{kind}", pa.table(columns))
            return str(tmp_path / f"*.{kind}")

        return make

    @KINDS
    def test_types_that_include_each_other(self, kind: str, shards: Any) -> None:
        pattern = shards(
            {"x": pa.array([1], pa.int32()), "t": ["a"], "v": pa.array([[1.0]], pa.list_(pa.float32())), "u": [1]},
            {"v": [[0.5]], "t": pa.array(["b"], pa.large_string()), "x": [2**40], "w": ["unused"]},
            {"x": pa.array([], pa.int64()), "t": pa.array([], pa.null()), "v": pa.array([], pa.list_(pa.float64()))},
            {"x": pa.array([3], pa.uint8()), "t": pa.array(["c"]).dictionary_encode(), "v": [[2.0]]},
            kind=kind,
        )
        rows = READERS[kind](pattern, ["x", "t", "v"]).dataset.__getitems__([2, 0, 1])
        values = [(row["x"], row["t"], row["v"].tolist()) for row in rows]
        assert values == [(3, "c", [2]), (1, "a", [1]), (2**40, "b", [0.5])]
        assert all(row["v"].dtype == np.float64 for row in rows)

    @pytest.mark.parametrize("other", [["text"], [b"bytes"], [[1]], [datetime.date(2020, 1, 1)]])
    def test_types_with_another_meaning_are_refused(self, other: list[Any], shards: Any) -> None:
        refused("1.parquet", data.parquet, shards({"x": [1]}, {"x": other}))
        refused("1.parquet", data.parquet, shards({"x": ["text"]}, {"x": [b"bytes"]}))

    def test_columns_that_only_one_file_has(self, shards: Any) -> None:
        refused("'z'", data.parquet, shards({"x": [1], "y": [0]}, {"x": [1], "y": [0], "z": [1]}), label="y")
        refused("'x'", data.parquet, shards({"x": [1], "y": [0]}, {"y": [0]}), ["x"], "y")

    def test_integers_that_the_common_type_rounds_are_refused(self, shards: Any) -> None:
        split = data.parquet(shards({"x": [0.5], "y": [0]}, {"x": [2**53 + 1], "y": [0]}), ["x"], "y")
        refused("1.parquet", split.read_batch, 0, 2)

    @KINDS
    def test_more_files_than_descriptors(self, kind: str, tmp_path: Path, shards: Any) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        pattern = shards(*({"x": [float(i)], "y": [0]} for i in range(120)), kind=kind)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, limits[1]))
        try:
            batch = READERS[kind](pattern, label="y").read_batch(0, 120)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sorted(batch.examples[:, 0].tolist()) == list(range(120))


class TestOtherFiles:
    @pytest.mark.parametrize("read", [data.parquet, data.arrow])
    def test_what_a_file_is_instead(self, read: Any, tmp_path: Path) -> None:
        path = tmp_path / "t"
        table = pa.table({"x": [1]})
        pq.write_table(table, tmp_path / "parquet")
        with pa.ipc.new_file(tmp_path / "arrow", table.schema) as file:
            file.write_table(table)
        other = "arrow" if read is data.parquet else "parquet"
        for content, word in [
            (gzip.compress(b"x"), "gzip"),
            (b"<!DOCTYPE html>", "HTML"),
            (b"PK\3\4", "zip"),
            (b"", str(path)),
            ((tmp_path / other).read_bytes(), {"arrow": "is an Arrow", "parquet": "is a Parquet"}[other]),
        ]:
            path.write_bytes(content)
            refused(word, read, path)
        refused("is a folder", read, tmp_path)

    @KINDS
    def test_names_of_any_bytes(self, kind: str, tmp_path: Path) -> None:
        path = write(tmp_path / f"t.{kind}", pa.table({"x": [1.0, None], "y": [0, 1]}))
        path = path.rename(tmp_path / os.fsdecode(b"Mu\xf1oz"))
        split = READERS[kind](path, label="y")
        assert split.read_batch(0, 1).examples.tolist() == [[1]]
        refused(path, split.read_batch, 0, 2)

    def test_damaged_offsets_of_arrow_files(self, tmp_path: Path) -> None:
        path = write(tmp_path / "t.arrow", pa.table({"x": ["aaaa", "bbbb"]}))
        offsets, damaged = (np.array([0, second, 8], np.int32).tobytes() for second in (4, 400))
        path.write_bytes(path.read_bytes().replace(offsets, damaged))
        refused(path, lambda: data.arrow(path).dataset[0])

    def test_checksums_of_pages(self, tmp_path: Path) -> None:
        path, table = tmp_path / "t.parquet", pa.table({"x": np.arange(1000.0)})
        pq.write_table(table, path, write_page_checksum=True, use_dictionary=False, compression=None)
        content = path.read_bytes()
        value = np.array([500.0]).tobytes()
        path.write_bytes(content.replace(value, np.array([501.0]).tobytes(), 1))
        refused(path, lambda: data.parquet(path).dataset[500])
