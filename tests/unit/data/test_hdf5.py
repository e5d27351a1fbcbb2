"""Data in HDF5 files."""

import contextlib
import errno
import gzip
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import data
from mpitrain.errors import DataError

from ...support.splits import message, read


@pytest.fixture
def h5(tmp_path):
    path = tmp_path / "set.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["images"] = rng.integers(0, 256, (23, 3, 2), np.uint8)
        file.create_dataset("floats", data=rng.random((23, 6), np.float32).astype(">f4"), chunks=(5, 2))
        file["labels"] = rng.integers(0, 4, 23)
        file["group/short"] = np.zeros(22)
        file["none"] = np.zeros((0, 2))
        file["scalar"] = 1.0
        file["words"] = ["a"] * 23
    return path


@pytest.mark.parametrize("name", ["images", "floats"])
def test_hdf5_reads_slices_of_what_was_written(h5, name):
    split = data.hdf5(h5, name, classes=4)
    with h5py.File(h5) as file:
        examples, labels = file[name][...], file["labels"][...]
    assert (len(split), split.shape, split.dtype.isnative) == (23, examples.shape[1:], True)
    assert split.scale == (1 / 255 if name == "images" else 1)
    for start, stop in ((0, 23), (4, 9), (22, 23)):
        found = read(split, start, stop)
        assert np.array_equal(found[0], examples[start:stop])
        assert np.array_equal(found[1], labels[start:stop])


def test_a_block_of_hdf5_is_whole_chunks_of_a_few_megabytes(tmp_path):
    path = tmp_path / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", (100_000, 1000), np.uint8, chunks=(48, 1000))
        file["labels"] = np.zeros(100_000)
    block = data.hdf5(path).block
    assert block % 48 == 0 and 2e6 < block * 1000 < 8e6


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("image", "labels"), "did you mean 'images'?"),
        (("images", "nothing"), "group/short"),
        (("group", "labels"), "'group'"),
        (("scalar", "labels"), "scalar has shape"),
        (("images", "group/short"), "22"),
        (("none", "none"), ": none "),
        (("words", "labels"), "object"),
    ],
)
def test_datasets_that_do_not_fit_are_named_with_the_file(h5, names, expected):
    text = message(lambda: data.hdf5(h5, *names))
    assert str(h5) in text and expected in text


def test_a_file_that_is_no_hdf5_is_named(tmp_path, h5):
    path = tmp_path / "other.h5"
    assert f"{path}: No such file" in message(lambda: data.hdf5(path))
    for raw in (b"", b"no data", h5.read_bytes()[:3000]):
        path.write_bytes(raw)
        assert str(path) in message(lambda: data.hdf5(path))
    assert str(tmp_path) in message(lambda: data.hdf5(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EAGAIN])
def test_file_systems_without_locks(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a network file system without locks. EAGAIN instead means that another process writes to the file."""
    with h5py.File(tmp_path / "d.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((5, 2, 2)), np.arange(5)
    real = h5py.File

    def without_locks(path: Path, mode: str, locking: bool | None = None) -> h5py.File:
        if locking is not False:
            raise OSError(number, f"unable to lock file, errno = {number}")
        return real(path, mode, locking=locking)

    assert data.hdf5(tmp_path / "d.h5").note is None
    monkeypatch.setattr(h5py, "File", without_locks)
    if number == errno.EAGAIN:
        with pytest.raises(DataError, match="unable to lock"):
            data.hdf5(tmp_path / "d.h5")
        return
    split = data.hdf5(tmp_path / "d.h5")
    assert str(tmp_path / "d.h5") in str(split.note) and "lock" in str(split.note)
    examples, labels = np.empty((5, 2, 2)), np.empty(5, np.int64)
    split.read(0, 5, examples, labels)
    assert labels.tolist() == [0, 1, 2, 3, 4]


class TestSources:
    """Datasets whose values are in other files: HDF5 returns fill values where a file is missing."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        with h5py.File(tmp_path / "source.h5", "w") as file:
            file["d"] = np.arange(8.0).reshape(4, 2)
        layout = h5py.VirtualLayout((4, 2), "f8")
        layout[:] = h5py.VirtualSource("source.h5", "d", (4, 2))
        nested = h5py.VirtualLayout((4, 2), "f8")
        nested[:] = h5py.VirtualSource(".", "virtual", (4, 2))
        with h5py.File(tmp_path / "t.h5", "w") as file:
            file.create_virtual_dataset("virtual", layout, fillvalue=-1)
            file.create_virtual_dataset("nested", nested, fillvalue=-1)
            file["link"] = h5py.ExternalLink("source.h5", "/d")
            file.create_dataset("external", (4, 2), "f8", external=[(str(tmp_path / "raw"), 0, 64)])
            file["external"][:] = np.arange(8).reshape(4, 2)
            file["labels"] = np.arange(4)
        return tmp_path

    @pytest.mark.parametrize("name", ["virtual", "nested", "link", "external"])
    def test_they_are_read_or_refused(self, folder: Path, name: str) -> None:
        split = data.hdf5(folder / "t.h5", name)
        np.testing.assert_array_equal(split.read_batch(0, 4).examples, np.arange(8).reshape(4, 2))
        (folder / ("raw" if name == "external" else "source.h5")).unlink()
        text = message(lambda: data.hdf5(folder / "t.h5", name))
        assert str(folder / "t.h5") in text and ("raw" if name == "external" else "source.h5") in text

    def test_a_file_that_has_become_shorter(self, folder: Path) -> None:
        os.truncate(folder / "raw", 60)
        assert "raw" in message(lambda: data.hdf5(folder / "t.h5", "external"))

    def test_a_changed_file_is_named(self, folder: Path) -> None:
        split = data.hdf5(folder / "t.h5", "link")
        os.utime(folder / "t.h5", ns=(1, 1))
        assert str(folder / "t.h5") in message(lambda: split.read_batch(0, 4))

    def test_damage_is_one_line(self, folder: Path) -> None:
        content = (folder / "source.h5").read_bytes()
        for place in range(0, len(content), 3):
            (folder / "source.h5").write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
            with contextlib.suppress(DataError):
                split = data.hdf5(folder / "source.h5", "d", "d")
                split.read_batch(0, len(split))

    def test_what_the_file_is_instead(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(gzip.compress(b"x"))
        assert "gzip" in message(lambda: data.hdf5(tmp_path / "a"))
