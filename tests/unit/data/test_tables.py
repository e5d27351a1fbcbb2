"""Tables: the examples, and errors that name file and row."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from mpitrain import data

from ...support.examples import refused
from ...support.waiting import wait_until

ROWS = 23


def table() -> pa.Table:
    rng = np.random.default_rng(1)
    return pa.table(
        {
            "age": rng.integers(0, 90, ROWS),
            "height": rng.random(ROWS).astype(np.float32),
            "name": [f"name {i}" for i in range(ROWS)],
            "words": [list(range(i % 3)) for i in range(ROWS)],
            "label": rng.integers(0, 2, ROWS),
        }
    )


def write_table(kind: str, path: Path) -> Path:
    if kind == "parquet":
        pa.parquet.write_table(table(), path, row_group_size=5)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table().schema) as file:
            file.write_table(table(), max_chunksize=5)
    elif kind == "stream":
        with pa.ipc.new_stream(path, table().schema) as file:
            file.write_table(table())
    else:
        pyarrow.csv.write_csv(table().drop(["words"]), path)
    return path


READERS = {"parquet": data.parquet, "arrow": data.arrow, "stream": data.arrow, "csv": data.csv}


class TestTables:
    @pytest.mark.parametrize("kind", READERS)
    def test_columns_are_arrays(self, kind: str, tmp_path: Path) -> None:
        split = READERS[kind](write_table(kind, tmp_path / "t"), ["age", "height"], "label", classes=2)
        assert split.shape == (2,) and len(split) == ROWS
        batch = split.read_batch(3, 17)
        expected = table().slice(3, 14)
        np.testing.assert_allclose(batch.examples[:, 0], expected["age"].to_numpy(), rtol=1e-6)
        np.testing.assert_allclose(batch.examples[:, 1], expected["height"].to_numpy(), rtol=1e-6)
        np.testing.assert_array_equal(batch.labels, expected["label"].to_numpy())

    @pytest.mark.parametrize("kind", READERS)
    def test_rows_are_dicts(self, kind: str, tmp_path: Path) -> None:
        columns = ["age", "name"] if kind == "csv" else ["age", "name", "words"]
        split = READERS[kind](write_table(kind, tmp_path / "t"), columns).map(lambda row: (row["name"], len(row)))
        batch = split.load(np.array([22, 4, 0]), 0, 0).examples
        assert batch[0] == ["name 22", "name 4", "name 0"] and batch[1].tolist() == [len(columns)] * 3

    def test_several_files(self, tmp_path: Path) -> None:
        for number in range(3):
            write_table("parquet", tmp_path / f"part-{number}.parquet")
        split = data.parquet(str(tmp_path / "part-*.parquet"), ["age"], "label")
        assert len(split) == 3 * ROWS
        ages = split.read_batch(0, len(split)).examples[:, 0]
        np.testing.assert_array_equal(ages, np.tile(table()["age"].to_numpy(), 3))

    def test_lists_of_fixed_size(self, tmp_path: Path) -> None:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12.0)), 3)
        pa.parquet.write_table(pa.table({"x": vectors, "y": [0, 1, 0, 1]}), tmp_path / "t")
        batch = data.parquet(tmp_path / "t", label="y").read_batch(1, 3)
        assert batch.examples.tolist() == [[3, 4, 5], [6, 7, 8]]

    def test_mistakes(self, tmp_path: Path) -> None:
        path = write_table("parquet", tmp_path / "t")
        refused("'height'", data.parquet, path, ["hight"], "label")
        refused("name is of type string", data.parquet, path, None, "label")
        refused(tmp_path / "none", data.parquet, tmp_path / "none")
        refused("*.parquet", data.parquet, str(tmp_path / "*.parquet"))
        pa.parquet.write_table(pa.table({"x": [1.0, None, 3.0], "y": [1, 2, 3]}), tmp_path / "nulls")
        refused("row 1", data.parquet(tmp_path / "nulls", label="y").read_batch, 0, 3)
        lists = pa.array([[1, 2], [3, None], [4, 5]], pa.list_(pa.int64(), 2))
        pa.parquet.write_table(pa.table({"x": lists, "y": [1, 2, 3]}), tmp_path / "nulls")
        refused("row 1", data.parquet(tmp_path / "nulls", label="y").read_batch, 0, 3)
        times = pa.array([1, 2], pa.timestamp("us", tz="UTC"))
        pa.parquet.write_table(pa.table({"x": times, "y": [1, 2]}), tmp_path / "times")
        refused("timestamp", data.parquet, tmp_path / "times", label="y")
        path.write_bytes(path.read_bytes()[:-20])
        refused(path, data.parquet, path)

    @pytest.mark.parametrize(
        ("row", "word"), [("3", "Row #5"), ("3,x", ", row 5 has 'x'"), ("3,", ", row 5: b has no value")]
    )
    def test_rows_of_csv_files_are_named(self, row: str, word: str, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 3 + row + "\n1,2\n")
        refused(word, lambda: data.csv(tmp_path / "t.csv", label="a").read_batch(0, 5))

    def test_memory_of_a_csv_file_is_released(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_text("a,b\n" + "1,2\n" * 100_000)
        before = pa.total_allocated_bytes()
        split = data.csv(tmp_path / "t.csv", label="a")
        examples = split.read_batch(0, 100_000).examples
        assert pa.total_allocated_bytes() - before > examples.nbytes
        split.release()

        def allocated() -> int:
            gc.collect()
            return pa.total_allocated_bytes() - before

        # Arrow's threads may hold the parts that they have parsed for a while.
        wait_until(lambda: allocated() < examples.nbytes // 2, allocated, 10)
        np.testing.assert_array_equal(split.read_batch(0, 100_000).examples, examples)

    def test_a_changed_file_is_named(self, tmp_path: Path) -> None:
        path = write_table("parquet", tmp_path / "t")
        split = data.parquet(path, ["age"], "label")
        os.utime(path, ns=(1, 1))
        refused(path, split.read_batch, 0, 3)
