"""The HDF5 parser gives the same results as the HDF5 library."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import write_container
from mpitrain.checkpoint.hdf5 import parse
from mpitrain.checkpoint.manifest import HEAD, block_bytes
from mpitrain.checkpoint.state import root_attributes


@pytest.mark.parametrize("count", [1, 9, 3000])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_the_parser_and_the_library_agree(tmp_path: Path, count: int, compression: str) -> None:
    """Many names and attributes are in trees and heaps of several levels."""
    path = tmp_path / "a.h5"
    numbers = (np.float64, np.float32, np.float16, np.int64, np.int8, np.uint16, np.bool_)
    arrays = {f"params/layer{i}.ä": np.full((i % 5, 3), i % 100).astype(numbers[i % 7]) for i in range(count)}
    arrays |= {"params/large": np.arange(300_000.0).reshape(500, 600), "params/scalar": np.array(2.5)}
    values = [True, -1, 2**63, 0.5, "text", "", "x" * 30_000]
    options = {f"option{i}": values[i % 7] for i in range(min(count, 500))}
    attributes = {"/": root_attributes(1, 2, 3), "run/config": options}
    write_container(path, arrays, attributes, compression)  # type: ignore[arg-type]
    content = path.read_bytes()
    tree = parse(lambda at, n: content[at : at + n], block_bytes(content[:HEAD]), len(content))
    with checkpoint.Checkpoint(path) as opened, h5py.File(path) as file:
        assert tree.groups == opened.attributes == {"params": {}, "run": {}, **attributes}
        assert tree.datasets == opened.datasets
        assert list(opened.datasets) == list(tree.datasets) == [f"params/{name}" for name in file["params"]]
        for name in opened.datasets:
            read = opened.read(name)
            assert read.dtype == file[name].dtype and np.array_equal(read, file[name][()])
        assert opened.verify() == []
