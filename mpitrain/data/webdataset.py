"""Tar files in WebDataset's layout: an example consists of the files of one name with different extensions."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..errors import DataError
from .files import Paths, UnchangedFile, describe, expand, file_of, starts_of
from .images import decode_image
from .split import DatasetSplit

_IMAGES = ("jpg", "jpeg", "png", "ppm", "pgm", "webp")
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "cls": lambda content: int(content),
    "json": json.loads,
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
    "txt": lambda content: content.decode(),
}


class TarFiles:
    """Examples as dicts from extension to content, which may be decoded; ``__key__`` is the name without extension."""

    def __init__(self, files: list[Path], decode: bool) -> None:
        self._decode = decode
        self._files = [UnchangedFile(path) for path in files]
        self._members = [file.index("tar", _index) for file in self._files]
        # The members of example i are those from firsts[i] to firsts[i + 1].
        self._firsts = [np.flatnonzero(_is_first(members)) for members in self._members]
        self._starts, self._count = starts_of(len(firsts) for firsts in self._firsts)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, place = file_of(self._starts, index)
        file, members = self._files[number], self._members_of(number, place)
        example: dict[str, Any] = {"__key__": members[0]["key"].decode()}
        for member in members:
            content = file.read(int(member["offset"]), int(member["size"]))
            name = member["extension"].decode()
            example[name] = _decoded(name, content) if self._decode else content
        return example

    def name_of(self, index: int) -> str:
        """Return the file and the key of an example."""
        number, place = file_of(self._starts, index)
        return f"{self._files[number].path}, {self._members_of(number, place)[0]['key'].decode()}"

    def _members_of(self, number: int, place: int) -> Array:
        members, firsts = self._members[number], self._firsts[number]
        stop = firsts[place + 1] if place + 1 < len(firsts) else len(members)
        return members[firsts[place] : stop]


def webdataset(paths: Paths, decode: bool = True) -> DatasetSplit:
    """Return a split of tar files in WebDataset's layout; they must not be compressed.

    An example is a dict with ``__key__`` and, by extension, the content of each file. A tar file is indexed once; the
    index is stored in the user's cache directory.

    Args:
        paths: A file, a pattern such as ``train-*.tar``, or a list of them.
        decode: Whether to decode images to arrays of bytes (height, width, 3), ``.cls`` to an int, and ``.json``,
            ``.npy`` and ``.txt`` to their values. If False, all contents are bytes, for ``map``.

    Raises:
        DataError: A file does not exist, or is not a tar file.
    """
    files = expand(paths)
    return DatasetSplit(TarFiles(files, decode), describe(files))


def _decoded(name: str, content: bytes) -> Any:
    extension = name.rpartition(".")[2].lower()
    if extension in _IMAGES:
        return decode_image(content)
    decode = _DECODERS.get(extension)
    return content if decode is None else decode(content)


def _index(path: Path) -> Array:
    """Return key, extension, offset and size of each file in a tar file."""
    members: list[tuple[bytes, bytes, int, int]] = []
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                folder, _, name = member.name.rpartition("/")
                key, _, extension = name.partition(".")
                if member.isfile() and extension:
                    path_of_key = f"{folder}/{key}" if folder else key
                    members.append((path_of_key.encode(), extension.encode(), member.offset_data, member.size))
            if os.path.getsize(path) < file.offset:
                raise tarfile.ReadError("unexpected end of data")
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{path} cannot be read as a tar file: {error}") from error
    longest_key = max((len(key) for key, *_ in members), default=1)
    longest_extension = max((len(extension) for _, extension, *_ in members), default=1)
    fields = [("key", f"S{longest_key}"), ("extension", f"S{longest_extension}"), ("offset", "i8"), ("size", "i8")]
    return np.array(members, fields)


def _is_first(members: Array) -> Array:
    """Return whether each file begins an example: its key differs from the previous file's."""
    first = np.ones(len(members), bool)
    first[1:] = members["key"][1:] != members["key"][:-1]
    return first
