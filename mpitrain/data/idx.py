"""IDX files, the format of MNIST: a magic number and sizes, then unsigned bytes; optionally gzipped."""

from __future__ import annotations

import contextlib
import gzip
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from ..core.layout import Array, Shape
from ..errors import DataError
from .files import first_bytes, foreign

_UNSIGNED_BYTE = 8


def find(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of these names in a folder, each with or without ``.gz``.

    Raises:
        DataError: The folder or a file is missing; the message names it and all required files.
    """
    if not folder.is_dir():
        raise DataError(
            f"folder {folder} does not exist; give a folder with {', '.join(names)}, each optionally with .gz"
        )
    return [_find(folder, name, names) for name in names]


def _find(folder: Path, name: str, names: Sequence[str]) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    existing = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise DataError(
        f"no file {name} in {folder}, found {existing}; required: {', '.join(names)}, each optionally with .gz"
    )


def read_header(path: Path, dimensions: int) -> Shape:
    """Return the shape in a file's header, which must have ``dimensions`` dimensions.

    Raises:
        DataError: The file is not an IDX file of bytes, or has another number of dimensions.
    """
    with _opened(path) as file:
        return _header(path, file, dimensions)


def read_into(path: Path, start: int, stop: int, out: Array) -> None:
    """Fill ``out``, uint8 and C-contiguous, with the entries [start, stop) along the first dimension.

    Raises:
        DataError: The file is too short, too long, or corrupt.
    """
    with _opened(path) as file:
        shape = _header(path, file, out.ndim)
        file.seek(start * math.prod(shape[1:]), 1)
        content = file.read(out.size)
        if len(content) != out.size:
            raise DataError(f"{path} is truncated: its header specifies {math.prod(shape):,} bytes of data")
        # Reading past the end also makes gzip verify its checksum.
        if stop == shape[0] and file.read(1):
            raise DataError(f"{path} is longer than the {math.prod(shape):,} bytes of data that its header specifies")
    out[...] = np.frombuffer(content, np.uint8).reshape(out.shape)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file, decompressed if it begins like a gzip file."""
    is_compressed = (foreign(first_bytes(path)) or "").startswith("is compressed with gzip")
    try:
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read, or is corrupt or truncated: {error}") from error


def _header(path: Path, file: IO[bytes], dimensions: int) -> Shape:
    head = file.read(4 + 4 * dimensions)
    if len(head) < 4:
        raise DataError(f"{path} is truncated: its {len(head)} bytes are too short for a header")
    zeros, kind, stored = struct.unpack(">HBB", head[:4])
    if zeros != 0 or kind != _UNSIGNED_BYTE:
        if what := foreign(head):
            raise DataError(f"{path} {what}")
        raise DataError(f"{path} is not an IDX file of bytes: it starts with {head[:4].hex()}, not 0000080{dimensions}")
    if stored != dimensions:
        names = {1: "labels", 3: "images"}
        content = names.get(stored, f"{stored}-dimensional data")
        raise DataError(f"{path} contains {content}, must contain {names[dimensions]}")
    if len(head) < 4 + 4 * dimensions:
        raise DataError(f"{path} is truncated: its {len(head)} bytes are too short for a header")
    shape = struct.unpack(f">{dimensions}I", head[4:])
    if 0 in shape:
        raise DataError(f"{path} contains no data: its header specifies shape {shape}; replace the file")
    return shape
