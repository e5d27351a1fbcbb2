"""Tar files in WebDataset's layout: an example consists of the files of one name with different extensions."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.words import one_line
from ..errors import DataError
from .files import Paths, UnchangedFile, describe, expand, file_of, foreign, left_out, names_and_sizes, starts_of
from .images import SUFFIXES, decode_image
from .split import DatasetSplit
from .tar_index import SPARSE, index, read_sparse

_NUMPY = b"\x93NUMPY"


def _array(content: bytes) -> Array:
    """Return the array of a ``.npy`` file, in this machine's byte order."""
    if not content.startswith(_NUMPY):  # NumPy's error is about pickle
        raise ValueError("it is not a NumPy file")
    file = io.BytesIO(content)
    array = np.load(file, allow_pickle=False)
    if file.read(1):
        raise ValueError("there are bytes after the array")
    return array.astype(array.dtype.newbyteorder("="), copy=False)  # type: ignore[no-any-return]


_DECODERS: dict[str, Callable[[bytes], Any]] = {"cls": int, "json": json.loads, "npy": _array, "txt": bytes.decode}


class TarFiles:
    """Examples as dicts from extension to content, which may be decoded; ``__key__`` is the name without extension.

    Attributes:
        starts: Index of the first example of each file.
        others: Names of the files that belong to no example.
        names_and_sizes: See ``files.names_and_sizes``.
    """

    def __init__(self, files: list[Path], decode: bool) -> None:
        self._decode = decode
        self._files = [UnchangedFile(path) for path in files]
        indices = [file.index("tar", index) for file in self._files]
        self.names_and_sizes = names_and_sizes(self._files, indices)
        self.others = [_text(name) for members in indices for name in members["extension"][members["key"] == b""]]
        self._members = [members[members["key"] != b""] for members in indices]
        # The members of example i are those from firsts[i] to firsts[i + 1].
        self._firsts = [np.append(_firsts(members["key"]), len(members)) for members in self._members]
        self.starts, self._count = starts_of(len(firsts) - 1 for firsts in self._firsts)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        number, place = file_of(self.starts, index)
        file, members = self._files[number], self._members_of(number, place)
        example: dict[str, Any] = {"__key__": _text(members[0]["key"])}
        for member in members:
            name, content = _text(member["extension"]), _content(file, int(member["offset"]), int(member["size"]))
            try:
                example[name] = _decoded(name, content) if self._decode else content
            except Exception as error:  # NumPy and Pillow raise errors of many types
                why = None if content.startswith(_NUMPY) else foreign(content)
                why = why or one_line(error)
                raise DataError(
                    f"{self.name_of(index)}.{name} cannot be decoded: {why}; pass decode=False to get bytes"
                ) from error
        return example

    def name_of(self, index: int) -> str:
        """Return the file and the key of an example."""
        number, place = file_of(self.starts, index)
        return f"{self._files[number].path}, {_text(self._members_of(number, place)[0]['key'])}"

    def _members_of(self, number: int, place: int) -> Array:
        start, stop = self._firsts[number][place : place + 2]
        return self._members[number][start:stop]


def webdataset(paths: Paths, decode: bool = True) -> DatasetSplit:
    """Return a split of tar files in WebDataset's layout; they must not be compressed.

    An example is a dict with ``__key__`` and, by extension in lower case, the content of each file. The files of a
    sample need not be adjacent. A tar file is indexed once; the index is stored in the user's cache directory.

    Args:
        paths: A file, a pattern such as ``train-*.tar``, or a list of them.
        decode: Whether to decode images to arrays of bytes (height, width, 3), ``.cls`` to an int, and ``.json``,
            ``.npy`` and ``.txt`` to their values. If False, all contents are bytes, for ``map``.

    Raises:
        DataError: A file does not exist, is not a tar file, is damaged, or contains a name twice.
    """
    files = expand(paths)
    examples = TarFiles(files, decode)
    split = DatasetSplit(examples, describe(files))
    split.note = left_out(split.source, "file", examples.others)
    return split


def _text(name: Any) -> str:
    return bytes(name).decode("utf-8", "surrogateescape")


def _content(file: UnchangedFile, offset: int, size: int) -> bytes:
    if size != SPARSE:
        return file.read(offset, size)
    with file.opened() as stream:
        stream.seek(offset)
        return read_sparse(stream)


def _decoded(name: str, content: bytes) -> Any:
    extension = name.rpartition(".")[2].lower()
    if f".{extension}" in SUFFIXES:
        return decode_image(content)
    decode = _DECODERS.get(extension)
    return content if decode is None else decode(content)


def _firsts(keys: Array) -> Array:
    """Return the place of the first file of each example, whose files are adjacent in the index."""
    return np.sort(np.unique(keys, return_index=True)[1])
