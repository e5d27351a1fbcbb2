"""Index of a tar file in WebDataset's layout: where the files of each sample are.

``tarfile`` reads the headers: pax and GNU names, sparse files, links. It stops without an error at a damaged header, at
data after the end, and where a file ends early; these are found here.
"""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..core.layout import Array
from ..core.words import one_line
from ..errors import DataError
from .files import unreadable

SPARSE = -1  # in place of the size of a file with holes, whose offset is that of its header
_BLOCK = tarfile.BLOCKSIZE
_ZEROS = bytes(_BLOCK)
_NO_SAMPLES = re.compile(r"(\./)?(__[^/]*__(/|$)|__MACOSX/)")  # webdataset's own files, and those of macOS
_MOST_LINKS = 40  # from one link to the next, as in Linux


def index(path: Path) -> Array:
    """Return key, extension, offset and size of each file in a tar file, sample by sample.

    The samples are in the order of their first files. Files that belong to no sample have an empty key, and their name
    as the extension.

    Raises:
        DataError: The file is damaged or truncated, contains a file twice, or a link to a file that it lacks.
    """
    members: dict[str, tarfile.TarInfo] = {}
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    others: list[str] = []
    for member in _members(path):
        members[posixpath.normpath(member.name)] = member
        key, extension = _key_and_extension(member.name)
        if key and (member.isfile() or member.islnk() or member.issym()):
            files = samples.setdefault(key, {})
            if extension in files:
                raise DataError(
                    f"{path} has {key}.{extension} twice, at bytes {files[extension].offset:,} and {member.offset:,}: "
                    "a sample must have one file of each extension"
                )
            files[extension] = member
        elif not member.isdir():
            others.append(member.name)
    rows = [(b"", _bytes(name), 0, 0) for name in others]
    for key, files in samples.items():
        for extension, member in files.items():
            target = _target(path, member, members)
            place = (target.offset, SPARSE) if target.issparse() else (target.offset_data, target.size)
            rows.append((_bytes(key), _bytes(extension), *place))
    longest_key = max((len(key) for key, *_ in rows), default=0) or 1
    longest_extension = max((len(extension) for _, extension, *_ in rows), default=0) or 1
    fields = [("key", f"S{longest_key}"), ("extension", f"S{longest_extension}"), ("offset", "i8"), ("size", "i8")]
    return np.array(rows, fields)


def read_sparse(file: BinaryIO) -> bytes:
    """Return the content of the file whose header is at this place of a tar file."""
    with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
        member = tar.next()
        content = None if member is None else tar.extractfile(member)
        if content is None:
            raise tarfile.ReadError("no file")
        return content.read()


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _key_and_extension(name: str) -> tuple[str, str]:
    """Return key and extension of a name, as webdataset does; two empty texts if the file belongs to no sample."""
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot or _NO_SAMPLES.match(name):
        return "", ""
    return folder + slash + stem, extension.lower()


def _target(path: Path, member: tarfile.TarInfo, members: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo:
    """Return the file that a link leads to, or the file itself."""
    target: tarfile.TarInfo | None = member
    for _ in range(_MOST_LINKS):
        if target is None or target.isfile():
            break
        folder = posixpath.dirname(target.name) if target.issym() else ""
        target = members.get(posixpath.normpath(posixpath.join(folder, target.linkname)))
    if target is None or not target.isfile():
        raise DataError(
            f"{path}: {member.name} at byte {member.offset:,} is a link to {member.linkname}, which is no file in this "
            "tar file: write the tar file with --dereference"
        )
    return target


def _members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the headers of a tar file, or of several that follow one another, as GNU tar reads them with ``-i``."""
    start = end = 0
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        while start < max(size, 1):
            file.seek(start)
            try:
                with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
                    while (member := tar.next()) is not None:
                        if tar.offset <= end:
                            raise tarfile.ReadError("a file has a negative size")
                        end = tar.offset
                        member.name = member.pax_headers.get("GNU.sparse.name", member.name)  # not the stored name
                        tar.members.clear()  # type: ignore[attr-defined]
                        yield member
                    end = tar.offset
            except (tarfile.TarError, OSError, ValueError, OverflowError, EOFError) as error:
                if not end:
                    raise unreadable(path, "tar", error) from error
                raise DataError(
                    f"{path} is damaged or truncated at byte {max(start, end):,}: {one_line(error)}"
                ) from error
            start = _next_archive(path, file, end, size)


def _next_archive(path: Path, file: BinaryIO, end: int, size: int) -> int:
    """Return where the next header is after the end of an archive, or the size of the file if there is none."""
    file.seek(end)
    block = file.read(_BLOCK)
    if not block:
        raise DataError(
            f"{path} ends at byte {end:,} without the two blocks of zeros that end a tar file: it was truncated, or "
            "its writer did not close it; if it is complete, append the blocks: truncate -s +1024 FILE"
        )
    if block != _ZEROS[: len(block)]:
        raise DataError(f"{path} is damaged at byte {end:,}: there is no valid header")
    while (block := file.read(_BLOCK)) and block == _ZEROS[: len(block)]:
        pass
    return file.tell() - len(block) if block else size
