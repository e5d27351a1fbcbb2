"""WebDataset files: the examples, and errors that name file and record."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mpitrain import data

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
