"""CSV files that other programs have written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from mpitrain import data
from mpitrain.data import csv_files

from ...support.examples import refused


def write(folder: Path, *contents: str | bytes) -> str:
    for number, content in enumerate(contents):
        raw = content if isinstance(content, bytes) else content.encode()
        (folder / f"{number}.csv").write_bytes(raw)
    return str(folder / "*.csv")


def rows(split: Any) -> list[list[Any]]:
    """Return the values of all rows, loaded as one batch, which are the same as those loaded one by one."""
    together = split.dataset.__getitems__([*range(len(split))])
    assert together == [split.dataset[index] for index in range(len(split))]
    return [[*row.values()] for row in together]


class TestTexts:
    @pytest.mark.parametrize("block", [2**31 - 1, 1 << 16])
    @pytest.mark.parametrize("length", [10, 200_000])
    def test_quoted_line_breaks_and_long_values(
        self, length: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(csv_files, "_BLOCK_BYTES", max(block, 2 * length))
        frame = pd.DataFrame({"t": [f'a"b,\r\n{"x" * length}{i}\n' for i in range(20)] * 10, "y": np.arange(200)})
        frame.to_csv(tmp_path / "0.csv", index=False)
        assert rows(data.csv(tmp_path / "0.csv")) == frame.to_numpy().tolist()

    def test_a_type_that_only_a_later_block_needs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(csv_files, "_BLOCK_BYTES", 100)
        content = "a,b,c\n" + "1,2,3\n" * 50 + "1.5,x,2020-01-01\n"
        split = data.csv(write(tmp_path, content))
        assert rows(split)[0] == [1.0, "2", "3"] and rows(split)[-1] == [1.5, "x", "2020-01-01"]

    def test_texts_that_look_like_missing_values(self, tmp_path: Path) -> None:
        assert rows(data.csv(write(tmp_path, "t,y\nNA,1\nnull,2\n,3\nNamibia,4\n"))) == [
            ["NA", 1],
            ["null", 2],
            ["", 3],
            ["Namibia", 4],
        ]
        assert [row[0] for row in rows(data.csv(write(tmp_path, "t,y\nNA,1\n", "t,y\nb,2\n")))] == ["NA", "b"]

    @pytest.mark.parametrize(
        ("encoding", "word"), [("latin-1", "0xe9"), ("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-32", "UTF-32")]
    )
    def test_encodings(self, encoding: str, word: str, tmp_path: Path) -> None:
        pattern = write(tmp_path, "t,y\nJos\u00e9,1\n".encode(encoding))
        refused(word, data.csv, pattern)
        assert rows(data.csv(pattern, encoding=encoding)) == [["Jos\u00e9", 1]]
        refused("encoding='none'", data.csv, pattern, encoding="none")
        with_mark = write(tmp_path, "t,y\nJos\u00e9,1\n".encode("utf-8-sig"))
        assert rows(data.csv(with_mark)) == [["Jos\u00e9", 1]] and list(data.csv(with_mark).columns) == ["t", "y"]

    @pytest.mark.parametrize("codec", ["gzip", "bz2", "zstd", "lz4"])
    def test_compressed_files_are_read(self, codec: str, tmp_path: Path) -> None:
        with pa.CompressedOutputStream(str(tmp_path / "0.csv"), codec) as stream:
            stream.write(b"a,y\n1,2\n")
        assert rows(data.csv(tmp_path / "0.csv")) == [[1, 2]]

    @pytest.mark.parametrize(
        ("content", "word"),
        [
            (b"PK\3\4x", "zip"),
            (b"\n <!DOCTYPE html>\n", "HTML"),
            (b"PAR1\x15\4", "Parquet"),
            (b"a,b\n\0,1\n", "zero"),
            (b"", "0.csv"),
        ],
    )
    def test_other_files_are_named(self, content: bytes, word: str, tmp_path: Path) -> None:
        refused(word, data.csv, write(tmp_path, content))


class TestTypes:
    @pytest.mark.parametrize(
        ("contents", "values"),
        [
            (["1", "1.5"], [1.0, 1.5]),
            (["1.5", "1"], [1.5, 1.0]),
            (["1", "a"], ["1", "a"]),
            (["", "1"], [None, 1]),
            (["0", "true"], [False, True]),
            (["2", "true"], ["2", "true"]),
            (["1", "2020-01-01"], ["1", "2020-01-01"]),
            ([str(2**63), "1"], [2**63, 1]),
            ([str(2**64 - 1), "0"], [2**64 - 1, 0]),
            ([str(2**64 + 1), "0"], [str(2**64 + 1), "0"]),
            ([str(2**53 + 1), "0.5"], [str(2**53 + 1), "0.5"]),
            (["1e300", "1"], [1e300, 1.0]),
            ([str(10**22), "0.5"], [1e22, 0.5]),
        ],
    )
    def test_the_type_holds_for_all_rows_of_all_files(
        self, contents: list[str], values: list[Any], tmp_path: Path
    ) -> None:
        shards = [f"x,y\n{text},0\n" for text in contents]
        assert [row[0] for row in rows(data.csv(write(tmp_path, *shards, "y,x\n")))] == values
        for name in ("1.csv", "2.csv"):
            (tmp_path / name).unlink()
        one = "x,y\n" + "".join(f"{text},0\n" for text in contents)
        assert [row[0] for row in rows(data.csv(write(tmp_path, one)))] == values

    def test_integers_that_no_type_holds_are_refused_as_numbers(self, tmp_path: Path) -> None:
        refused(f"row 3 has '{2**64 + 1}'", data.csv, write(tmp_path, f"x,y\n1,0\n{2**64 + 1},1\n"), label="y")

    def test_columns_that_differ(self, tmp_path: Path) -> None:
        pattern = write(tmp_path, "x,y,note\n1,0,a\n", "y,extra,x\n1,9,2.5\n")
        assert data.csv(pattern, ["x"], "y").read_batch(0, 2).examples[:, 0].tolist() == [1, 2.5]
        refused("'extra'", data.csv, pattern, label="y")


class TestHeaders:
    @pytest.mark.parametrize("delimiter", [";", "\t", "|"])
    def test_delimiters(self, delimiter: str, tmp_path: Path) -> None:
        pattern = write(tmp_path, f"a{delimiter}y\n1{delimiter}0\n")
        refused(f"delimiter={delimiter!r}", data.csv, pattern)
        assert rows(data.csv(pattern, delimiter=delimiter)) == [[1, 0]]
        refused("delimiter=';;'", data.csv, pattern, delimiter=";;")

    @pytest.mark.parametrize("line", ["5.1,3.5,0", "0,0,7", "-1,2,0"])
    def test_files_without_names_are_refused(self, line: str, tmp_path: Path) -> None:
        refused("first line", data.csv, write(tmp_path, f"{line}\n{line}\n"))

    def test_numbers_as_names(self, tmp_path: Path) -> None:
        pd.DataFrame(np.arange(6).reshape(2, 3)).to_csv(tmp_path / "0.csv", index=False)
        assert rows(data.csv(tmp_path / "0.csv")) == [[0, 1, 2], [3, 4, 5]]

    def test_a_column_that_occurs_twice(self, tmp_path: Path) -> None:
        refused("'a'", data.csv, write(tmp_path, "a,a,y\n1,2,0\n"), label="y")
        assert rows(data.csv(write(tmp_path, "a,a,y\n1,2,0\n"), ["y"])) == [[0]]

    def test_names_of_any_bytes(self, tmp_path: Path) -> None:
        path = Path(write(tmp_path, "a,y\n1,\n2,1\n")).with_name("0.csv").rename(tmp_path / os.fsdecode(b"\xff.csv"))
        refused(path, data.csv(path, label="y").read_batch, 0, 2)
        refused("is a folder", data.csv, tmp_path)

    def test_an_index_that_was_written_several_times(self, tmp_path: Path) -> None:
        path = tmp_path / "0.csv"
        frame = pd.DataFrame({"a": [1, 2], "y": [0, 1]})
        for _ in range(4):
            frame.to_csv(path)
            assert data.csv(path, label="y").shape == (1,) and "left out" in str(data.csv(path).note)
            frame = pd.read_csv(path)

    def test_columns_without_a_name(self, tmp_path: Path) -> None:
        assert rows(data.csv(write(tmp_path, "a,y,\n1,0,\n2,1,\n"))) == [[1, 0], [2, 1]]
        refused("without a name", data.csv, write(tmp_path, "a,,y\n1,5,0\n"))

    @pytest.mark.parametrize("content", ["a;b\n1,5;2,3\n", "sep=;\na;b\n1;2\n", "sep=,\na,b\n1,2\n"])
    def test_spreadsheets(self, content: str, tmp_path: Path) -> None:
        refused("0.csv", data.csv, write(tmp_path, content))
        if content.startswith("sep"):
            refused("sep=", data.csv, write(tmp_path, content), delimiter=content[4])
        else:
            refused("delimiter=';'", data.csv, write(tmp_path, content))
