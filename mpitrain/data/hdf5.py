"""Examples in HDF5 files, read in blocks, so that they may be larger than memory."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..core.h5 import h5py
from ..core.layout import Array
from ..core.words import one_line, suggestion
from ..errors import DataError
from .files import UnchangedFile, names_and_sizes, unreadable
from .split import Split

_BLOCK_BYTES = 1 << 22  # block size for files that are not chunked
# Errors of file systems without locks. EAGAIN is not among these errors: it means that another process writes the file.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class Hdf5Split(Split):
    """Two datasets of one file, with one entry per example along their first dimension."""

    def __init__(self, path: Path, examples: str, labels: str, classes: int | None, scale: float | None) -> None:
        self._path, self._names, self._unchanged = path, (examples, labels), UnchangedFile(path)
        self._file: h5py.File | None = None
        self.names_and_sizes = names_and_sizes([self._unchanged])
        file, self.note = _open(path)
        with file, _damage(path):
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
                str(path),
                len(x),
                x.shape[1:],
                x.dtype,
                label_shape=y.shape[1:],
                label_dtype=y.dtype,
                classes=classes,
                scale=scale,
                block=min(block, len(x)),
            )

    def read(self, start: int, stop: int, examples: Array, labels: Array) -> None:
        self._unchanged.check()
        if self._file is None:
            self._file, _ = _open(self._path)
        try:
            for name, out in zip(self._names, (examples, labels), strict=True):
                self._file[name].read_direct(out, np.s_[start:stop])  # without an intermediate copy
        except Exception as error:
            raise DataError(
                f"{self._path} cannot be read at examples {start:,} to {stop - 1:,}: {one_line(error)}"
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


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Convert errors of damaged files, for which h5py has many types."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise unreadable(path, "HDF5", error) from error


def _open(path: Path) -> tuple[h5py.File, str | None]:
    """Return the file, and a note to the user about how it was opened."""
    try:
        return h5py.File(path, "r"), None
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return h5py.File(path, "r", locking=False), (
                f"the file system of {path} has no locks: reading without locking; do not write to the file meanwhile"
            )
        raise unreadable(path, "HDF5", error) from error


def _dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    item = file.get(name)
    if isinstance(item, h5py.Dataset) and item.shape:
        _check_sources(path, item)
        return item
    if isinstance(item, h5py.Dataset):
        raise DataError(f"{path}: {name} has shape {item.shape}: must have one entry for each example")
    link = file.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        raise DataError(f"{path}: {name!r} is a link to {link.path!r} in {link.filename!r}, which cannot be read")
    names: list[str] = []
    file.visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
    raise DataError(f"{path} has no dataset {name!r}; it has {', '.join(names) or 'none'}{suggestion(name, names)}")


def _check_sources(path: Path, item: h5py.Dataset) -> None:
    """Check that the files exist from which a dataset is composed; HDF5 would return fill values in their place."""
    folder = Path(item.file.filename).parent
    for name, offset, size in item.external or ():
        source = folder / name
        if not source.exists() or (size != h5py.h5f.UNLIMITED and source.stat().st_size < offset + size):
            raise DataError(f"{path}: {item.name} needs the file {source}, which is missing or too short")
    for source in item.virtual_sources() if item.is_virtual else ():
        if source.file_name == ".":
            if source.dset_name not in item.file:
                raise DataError(f"{path}: {item.name} needs the dataset {source.dset_name}, which is missing")
            _check_sources(path, item.file[source.dset_name])
            continue
        try:
            with h5py.File(folder / source.file_name, "r") as file:
                _check_sources(path, file[source.dset_name])
        except (OSError, KeyError) as error:
            raise DataError(
                f"{path}: {item.name} needs the dataset {source.dset_name} of {folder / source.file_name}, which "
                f"cannot be read: {one_line(error)}"
            ) from error
