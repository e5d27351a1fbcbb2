"""WebDataset files: the examples, and errors that name file and record."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain import data
from mpitrain.errors import DataError

from ...support.examples import pixels, png, refused


class TestWebDataset:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        array = io.BytesIO()
        np.save(array, np.arange(3))
        with tarfile.open(tmp_path / "a.tar", "w") as file:
            for key in range(4):
                contents = {"png": png(pixels(key)), "cls": str(key).encode(), "json": json.dumps({"a": key}).encode()}
                for name, content in {**contents, "npy": array.getvalue(), "bin": b"\0"}.items():
                    info = tarfile.TarInfo(f"part/{key:03d}.{name}")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
        return tmp_path / "a.tar"

    def test_examples_are_dicts(self, path: Path) -> None:
        split = data.webdataset(path)
        assert len(split) == 4
        example = split.dataset[2]
        assert example["__key__"] == "part/002" and example["cls"] == 2 and example["json"] == {"a": 2}
        assert example["npy"].tolist() == [0, 1, 2] and example["bin"] == b"\0"
        np.testing.assert_array_equal(example["png"], pixels(2))
        assert data.webdataset(path, decode=False).dataset[1]["cls"] == b"1"

    def test_damage_is_named(self, path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[:3000])
        refused(path, data.webdataset, path)
        path.write_bytes(content.replace(b"IDAT", b"IDA_"))
        split = data.webdataset(path)
        refused("part/000", split.load, np.arange(1), 0, 0)


def array(value: float) -> bytes:
    file = io.BytesIO()
    np.save(file, np.float32([value]))
    return file.getvalue()


def write(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, content in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def gnu_tar(folder: Path, *words: str) -> Path:
    subprocess.run(["tar", "cf", "a.tar", *words], cwd=folder, check=True, timeout=60)
    return folder / "a.tar"


def keys(split: data.DatasetSplit) -> list[str]:
    return [split.dataset[index]["__key__"] for index in range(len(split))]


class TestTarFilesOfOthers:
    def test_samples_are_in_the_order_of_their_first_files(self, tmp_path: Path) -> None:
        names = ["b/2.npy", "b/1.cls", "b/2.cls", "b/1.seg.npy", "b.c/1.npy", "b.c/2.npy", "b/1.NPY"]
        split = data.webdataset(
            write(tmp_path / "a", {name: array(i) if "cls" not in name else b"3" for i, name in enumerate(names)})
        )
        assert keys(split) == ["b/2", "b/1", "b.c/1", "b.c/2"]
        assert set(split.dataset[1]) == {"__key__", "cls", "seg.npy", "npy"} and split.dataset[1]["npy"] == 6

    @pytest.mark.parametrize("between", [0, 1])
    def test_a_name_that_occurs_twice_is_refused(self, tmp_path: Path, between: int) -> None:
        files = [("0.cls", b"1"), *[("1.cls", b"1")] * between, ("0.CLS", b"2")]
        refused(f"bytes 0 and {1024 * (1 + between):,}", data.webdataset, write(tmp_path / "a", files))

    def test_files_that_are_no_samples_are_counted(self, tmp_path: Path) -> None:
        others = ["._0.npy", ".DS_Store", "d/._1.npy", "__MACOSX/0.npy", "README", "__meta__/0.json"]
        split = data.webdataset(write(tmp_path / "a", {**dict.fromkeys(others, b"x"), "0.npy": array(1)}))
        assert len(split) == 1 and f"{len(others)} files" in str(split.note)
        assert data.webdataset(write(tmp_path / "b", {"0.npy": array(1)})).note is None

    def test_links_within_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "0.npy").write_bytes(array(7))
        os.link(tmp_path / "d" / "0.npy", tmp_path / "d" / "1.npy")
        os.symlink("../d/0.npy", tmp_path / "d" / "2.npy")
        os.symlink("2.npy", tmp_path / "d" / "3.npy")
        split = data.webdataset(gnu_tar(tmp_path, "./d/0.npy", "./d/1.npy", "./d/2.npy", "d/3.npy"))
        assert [split.dataset[index]["npy"].tolist() for index in range(4)] == [[7]] * 4

    @pytest.mark.parametrize("target", ["elsewhere.npy", "/etc/passwd", "0.npy"])
    def test_links_out_of_the_file_are_refused(self, tmp_path: Path, target: str) -> None:
        os.symlink(target, tmp_path / "0.npy")
        refused("0.npy at byte 0 is a link", data.webdataset, gnu_tar(tmp_path, "0.npy"))

    @pytest.mark.parametrize("form", ["gnu", "posix", "oldgnu"])
    def test_sparse_files_and_long_names(self, tmp_path: Path, form: str) -> None:
        name = "x" * 120 + "/" + "\u00e9" * 45 + ".npy"
        (tmp_path / name).parent.mkdir()
        values = np.lib.format.open_memmap(tmp_path / name, "w+", np.float32, (1 << 20,))  # a file with a hole
        values[[0, -1]] = 1, 2
        split = data.webdataset(gnu_tar(tmp_path, f"--format={form}", "--sparse", name))
        np.testing.assert_array_equal(split.dataset[0]["npy"], values)
        assert keys(split) == [name.removesuffix(".npy")] and (tmp_path / "a.tar").stat().st_size < values.nbytes

    def test_files_one_after_another(self, tmp_path: Path) -> None:
        parts = [write(tmp_path / str(i), {f"{i}.npy": array(i)}).read_bytes() for i in range(3)]
        (tmp_path / "a").write_bytes(b"".join(parts))
        split = data.webdataset(tmp_path / "a")
        assert [split.dataset[index]["npy"].tolist() for index in range(3)] == [[0], [1], [2]]

    @pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_names_of_any_bytes(self, tmp_path: Path, form: int) -> None:
        name = os.fsdecode(b"Mu\xf1oz/\xe9.npy")
        path = write(tmp_path / os.fsdecode(b"\xff.tar"), {name: array(1), "\u00e9.npy": array(2)}, format=form)
        split = data.webdataset(path)
        assert keys(split) == [os.fsdecode(b"Mu\xf1oz/\xe9"), "\u00e9"]
        assert json.loads(json.dumps(split.dataset.name_of(0))) == split.dataset.name_of(0)

    def test_damage_is_named_with_its_place(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a", {f"{i}.npy": array(i) for i in range(5)})
        content = path.read_bytes()
        header = content.index(b"3.npy")
        for damaged, place in [
            (content[:header] + b"\1" + content[header + 1 :], header),  # a header
            (content[:header], header),  # no end
            (content[: header + 100], header),
            (content[: header + 600], ""),
            (content + b"x" * 512, len(content)),
            (content.replace(b"ustar", b"ust\0\0"), 0),
        ]:
            path.write_bytes(damaged)
            refused(f"byte {place:,}" if place else path, data.webdataset, path)

    def test_damaged_arrays_are_one_line(self, tmp_path: Path) -> None:
        content = array(1)
        for place in range(len(content)):
            damaged = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
            split = data.webdataset(write(tmp_path / "a", {"0.npy": damaged}))
            with contextlib.suppress(DataError):
                split.dataset[0]

    def test_contents_are_decoded_whole_or_not(self, tmp_path: Path) -> None:
        big_endian, fortran = io.BytesIO(), io.BytesIO()
        np.save(big_endian, np.array([1, 2], ">i4"))
        np.save(fortran, np.asfortranarray(np.arange(6).reshape(2, 3)))
        objects = io.BytesIO()
        np.save(objects, np.array([None]), allow_pickle=True)
        split = data.webdataset(write(tmp_path / "a", {"0.npy": big_endian.getvalue(), "1.npy": fortran.getvalue()}))
        assert split.dataset[0]["npy"].dtype == np.dtype("=i4") and split.dataset[0]["npy"].tolist() == [1, 2]
        assert split.dataset[1]["npy"].tolist() == [[0, 1, 2], [3, 4, 5]]
        for name, content in [
            ("0.npy", objects.getvalue()),
            ("0.npy", array(1)[:-1]),
            ("0.npy", array(1) + b"\0"),
            ("0.cls", b"1.5"),
            ("0.json", b"{"),
            ("0.txt", b"\xff"),
            ("0.png", b"<html>"),
        ]:
            split = data.webdataset(write(tmp_path / "b", {name: content}))
            refused(f"{tmp_path / 'b'}, {name}", split.load, np.arange(1), 0, 0)
            assert data.webdataset(tmp_path / "b", decode=False).dataset[0][name[2:]] == content
