"""Examples in HDF5 files, read in blocks, so that they may be larger than memory."""

from __future__ import annotations

import difflib
import errno
from pathlib import Path

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array
from ..errors import DataError
from .split import Split

_BLOCK_BYTES = 1 << 22  # block size for files that are not chunked
# Errors of file systems without locks. EAGAIN is not among these errors: it means that another process writes the file.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Hdf5Split(Split):
    """Two datasets of one file, with one entry per example along their first dimension."""

    def __init__(self, path: Path, examples: str, labels: str, classes: int | None, scale: float | None) -> None:
        self._path, self._names = path, (examples, labels)
        self._file: h5py.File | None = None
        file, self.note = _open(path)
        with file:
            x, y = _dataset(path, file, examples), _dataset(path, file, labels)
            if len(x) != len(y):
                raise DataError(
                    f"{path}: {examples} has {len(x):,} entries but {labels} has {len(y):,}; lengths must match"
                )
            if len(x) == 0:
                raise DataError(f"{path}: {examples} is empty")
            row = max(1, x.dtype.itemsize * int(np.prod(x.shape[1:])))
            rows = x.chunks[0] if x.chunks else 1
            block = rows * max(1, _BLOCK_BYTES // (rows * row))  # whole chunks
            if scale is None:
                scale = 1 / 255 if x.dtype == np.uint8 else 1.0
            super().__init__(
                str(path), len(x), x.shape[1:], x.dtype, y.shape[1:], y.dtype, classes, scale, min(block, len(x))
            )

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        if self._file is None:
            self._file, _ = _open(self._path)
        try:
            for name, out in zip(self._names, (examples, labels), strict=True):
                self._file[name].read_direct(out, np.s_[start:stop])  # without an intermediate copy
        except (OSError, KeyError, ValueError, TypeError) as error:
            raise DataError(
                f"{self._path} cannot be read at examples {start:,} to {stop - 1:,}: {_one_line(error)}"
            ) from error


def hdf5(
    path: Path, examples: str = "images", labels: str = "labels", classes: int | None = None, scale: float | None = None
) -> Split:
    """Return a split of an HDF5 file with examples and labels; reads only their shapes.

    A split that fits into half of a node's free memory is loaded once for all of the node's ranks. A larger split is
    read in blocks as needed. The order of examples is the same in both cases: blocks of some megabytes are permuted,
    and examples are shuffled among eight blocks at a time.

    Args:
        path: The file.
        examples: Name of the dataset of examples, shape (n, ...).
        labels: Name of the dataset of labels, shape (n, ...).
        classes: Number of classes if labels are classes, else None.
        scale: Factor applied to the examples; the default is 1/255 for bytes, else 1.

    Raises:
        DataError: The file or a dataset does not exist, or the lengths differ.
    """
    return Hdf5Split(Path(path), examples, labels, classes, scale)


def _open(path: Path) -> tuple[h5py.File, str | None]:
    """Return the file, and a note to the user about how it was opened."""
    try:
        return h5py.File(path, "r"), None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return h5py.File(path, "r", locking=False), (
                f"the file system of {path} has no locks: reading without locking; do not write to the file meanwhile"
            )
        what = "no such file" if not path.exists() else f"cannot be read as HDF5: {_one_line(error)}"
        raise DataError(f"{path}: {what}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())  # HDF5 messages contain the time and a newline


def _dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    item = file.get(name)
    if isinstance(item, h5py.Dataset) and item.shape:
        return item
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{path} has no dataset {name!r}; it has {', '.join(names) or 'none'}{hint}")
