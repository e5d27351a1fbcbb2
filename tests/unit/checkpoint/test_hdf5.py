"""The HDF5 library sees the arrays and attributes that were written."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain import checkpoint
from mpitrain.checkpoint.container import write_container
from mpitrain.checkpoint.hdf5 import structure_of
from mpitrain.checkpoint.state import root_attributes


@pytest.mark.parametrize("count", [1, 9, 3000])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_the_manifest_and_the_library_agree(tmp_path: Path, count: int, compression: str) -> None:
    """Arrays have several chunks along each axis; many names and attributes are in trees and heaps of HDF5."""
    path = tmp_path / "a.h5"
    numbers = (np.float64, np.float32, np.float16, np.int64, np.int8, np.uint16, np.bool_)
    arrays = {f"params/layer{i}.ä": np.full((i % 5, 3), i % 100).astype(numbers[i % 7]) for i in range(count)}
    arrays |= {"params/large": np.arange(300_000.0).reshape(500, 600), "params/scalar": np.array(2.5)}
    arrays |= {"params/wide": np.arange(450_000.0).reshape(3, 1, 150_000)}
    values = [True, -1, 2**63, 0.5, "text", "", "x" * 30_000]
    options = {f"option{i}": values[i % 7] for i in range(min(count, 500))}
    attributes = {"/": root_attributes(1, 2, 3), "run/config": options}
    write_container(path, arrays, attributes, compression)  # type: ignore[arg-type]
    with checkpoint.Checkpoint(path) as opened, h5py.File(path) as file:
        structure = structure_of(file)
        assert structure.groups == opened.attributes == {"params": {}, "run": {}, **attributes}
        assert structure.datasets == opened.datasets
        assert list(opened.datasets) == list(structure.datasets) == [f"params/{name}" for name in file["params"]]
        for name in opened.datasets:
            read = opened.read(name)
            assert read.dtype == arrays[name].dtype and np.array_equal(read, arrays[name])
            assert np.array_equal(read, file[name][()])
        opened.verify_structure()
        assert opened.verify() == []
