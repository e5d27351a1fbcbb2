"""Files of examples that must not change during a run, and indices of their contents in the user's cache."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import glob
import hashlib
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np

from ..core.layout import Array
from ..core.words import one_line
from ..errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_INDEX_VERSION = 2
_FIRST_BYTES = 512

# The first bytes of files that are often given in place of a data file, and what such a file is.
_FOREIGN = (
    (rb"\x1f\x8b\x08", "is compressed with gzip: decompress it with gunzip"),
    (rb"BZh[1-9]1AY&SY", "is compressed with bzip2: decompress it with bunzip2"),
    (rb"\x28\xb5\x2f\xfd", "is compressed with zstd: decompress it with unzstd"),
    (rb"\xfd7zXZ\0", "is compressed with xz: decompress it with unxz"),
    (rb"\x04\x22\x4d\x18", "is compressed with lz4: decompress it with unlz4"),
    (rb"PK(\x03\x04|\x05\x06)", "is a zip archive (or a spreadsheet): unpack or export it"),
    (rb"7z\xbc\xaf\x27\x1c", "is a 7z archive: unpack it"),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is a document of Microsoft Office: export it"),
    (rb"%PDF-", "is a PDF document"),
    (rb"\s*<(!doctype|html|\?xml)", "is HTML or XML, perhaps the error page of a download"),
    (rb"version https://git-lfs", "is a pointer of Git LFS: fetch the file with git lfs pull"),
    (rb"PAR1[^ -~\s]", "is a Parquet file"),
    (rb"ARROW1\0|\xff\xff\xff\xff.{3}\0\x10", "is an Arrow file"),
    (rb"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
    (rb"\x93NUMPY", "is a NumPy file: load it with numpy.load, for data.from_arrays"),
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "is text in UTF-32"),
    (rb"\xff\xfe|\xfe\xff|[\t -~]\0[\t -~]\0|\0[\t -~]\0[\t -~]", "is text in UTF-16"),
    (rb"\x78[\x01\x9c\xda]", "is compressed with zlib: decompress it"),
)


class UnchangedFile:
    """A file whose size and modification time are compared whenever it is read.

    Attributes:
        path: As given.
        size: Size in bytes.

    Raises:
        DataError: There is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = os.stat(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode):
            raise DataError(f"{path} is a folder: give a file, or a pattern such as {path / '*'}")
        self._state, self.size = _state(status), status.st_size

    def check(self) -> None:
        """Check that the file has not changed.

        Raises:
            DataError: The file has been changed, replaced or removed.
        """
        try:
            state = _state(os.stat(self.path))
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; it was removed during the run") from error
        if state != self._state:
            raise DataError(
                f"{self.path} was changed during the run: its size ({self._state[0]:,} bytes before, {state[0]:,} now) "
                "or modification time differs; start the run again with files that do not change"
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Yield the file, and close it afterwards, because a process may read 1,000 files.

        Raises:
            DataError: The file has been changed, replaced or removed, or cannot be read.
        """
        self.check()
        try:
            with open(self.path, "rb") as file:
                yield file
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or one_line(error)}") from error

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of the file.

        Raises:
            DataError: The file has been changed, replaced or removed, or is shorter.
        """
        with self.opened() as file:
            file.seek(offset)
            content = file.read(size)
        if len(content) < size:
            raise DataError(f"{self.path} is truncated: it has {len(content):,} of {size:,} bytes at {offset:,}")
        return content

    def index(self, kind: str, make: Callable[[Path], Array]) -> Array:
        """Return an index of the file's contents, which is stored in the user's cache directory.

        If several ranks of a node need an index that does not exist, one rank makes the index, and the others wait.

        Args:
            kind: Name of the index's format.
            make: Makes the index; called only if no index is stored.
        """
        status = os.stat(self.path)
        key = repr((_INDEX_VERSION, kind, str(self.path.resolve()), self._state, status.st_ino, status.st_ctime_ns))
        stored = index_directory() / f"{hashlib.sha256(os.fsencode(key)).hexdigest()[:32]}.npy"
        if (index := _stored(stored)) is not None:
            return index
        with self.opened() as file, _one_at_a_time(file):
            if (index := _stored(stored)) is None:
                index = make(self.path)
                with contextlib.suppress(OSError):  # without a cache, each run indexes the file
                    _store(index, stored)
            return index


@contextlib.contextmanager
def _one_at_a_time(file: BinaryIO) -> Iterator[None]:
    """Lock a file: one process enters the block first; processes that have waited for it then enter together.

    Therefore, if the first process fails, the others do not fail one after another. On file systems without locks, no
    process waits.
    """
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
    yield


def _stored(path: Path) -> Array | None:
    """Return a stored index; None if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]
    return None


def _store(index: Array, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            np.save(file, index)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def index_directory() -> Path:
    """Return the directory of indices: in ``$XDG_CACHE_HOME`` or ``~/.cache``, or else in the temporary directory."""
    with contextlib.suppress(RuntimeError):  # no home directory
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpitrain" / "data"
    return Path(tempfile.gettempdir()) / f"mpitrain-{os.getuid()}" / "data"


def expand(paths: Paths) -> list[Path]:
    """Return in order the files of a path, of a pattern such as ``train-*.tar``, or of several paths and patterns.

    Raises:
        DataError: A pattern matches no file, or ``paths`` is empty.
    """
    several = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    files: list[Path] = []
    for path in (os.fspath(path) for path in several):
        matches = (
            sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        )
        if not matches:
            raise DataError(f"no file matches {path!r}")
        files.extend(map(Path, matches))
    if not files:
        raise DataError("got no files: must have at least one")
    return files


def foreign(content: bytes) -> str | None:
    """Return what content is by its first bytes, for example "is compressed with gzip: ..."; None if unknown."""
    return next((what for start, what in _FOREIGN if re.match(start, content, re.I | re.S)), None)


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file, for ``foreign``; none if the file cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(_FIRST_BYTES)
    return b""


def unreadable(path: Path, kind: str, error: object) -> DataError:
    """Return the error of a file that cannot be read as a file of this kind: what it is by its first bytes, or why."""
    what = foreign(first_bytes(path))
    if what is None or what.lower() in (f"is a {kind} file".lower(), f"is an {kind} file".lower()):
        what = f"cannot be read as {kind}: {one_line(error)}"
    return DataError(f"{path} {what}")


def describe(files: Sequence[Path]) -> str:
    """Return the names of files, for messages."""
    return ", ".join(map(str, files[:2])) + (" ..." if len(files) > 2 else "")


def names_and_sizes(files: Sequence[UnchangedFile], indices: Sequence[Array] = ()) -> bytes:
    """Return what must be the same on all hosts and after a resume: the names and sizes of files, and their indices."""
    digests = [hashlib.sha256(index.tobytes()).hexdigest() for index in indices]
    return repr([digests, *((file.path.name, file.size) for file in files)]).encode("utf-8", "backslashreplace")


def left_out(source: str, kind: str, names: Sequence[str]) -> str | None:
    """Return a note to the user about files or columns that are no examples; None if there are none."""
    if not names:
        return None
    count = f"{len(names):,} {kind}s are" if len(names) > 1 else f"1 {kind} is"
    return f"{source}: {count} left out: {', '.join(names[:3])}{' ...' * (len(names) > 3)}"


def required(module: str, use: str) -> ModuleType:
    """Import a module of the extra ``data``.

    Args:
        use: The feature that needs the package, for the error message.

    Raises:
        DataError: The package is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"{use} needs {module.partition('.')[0]}: pip install 'mpitrain[data]' ({error})") from error


def file_of(starts: Sequence[int], index: int) -> tuple[int, int]:
    """Return which file holds an example, and its index in the file.

    Args:
        starts: Index of the first example of each file.
    """
    file = bisect.bisect_right(starts, index) - 1
    return file, index - starts[file]


def by_file(starts: Sequence[int], indices: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Return for each file the places of its examples in ``indices``, and their indices in the file."""
    places: dict[int, list[tuple[int, int]]] = {}
    for place, index in enumerate(indices):
        number, own = file_of(starts, index)
        places.setdefault(number, []).append((place, own))
    return places


def starts_of(counts: Iterable[int]) -> tuple[list[int], int]:
    """Return the index of the first example of each file, and the number of all examples."""
    *starts, count = itertools.accumulate(counts, initial=0)
    return starts, count
