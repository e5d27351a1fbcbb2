"""Files of examples that must not change during a run, and indices of their contents in the user's cache."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import glob
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np

from ..core.layout import Array
from ..errors import DataError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_INDEX_VERSION = 1


class UnchangedFile:
    """A file whose size and modification time are compared whenever it is read.

    Raises:
        DataError: There is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._state = _state(os.stat(path))
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error

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
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the file, and close it afterwards, because a process may read 1,000 files.

        Raises:
            DataError: The file has been changed, replaced or removed.
        """
        self.check()
        with open(self.path, "rb", buffering=0) as file:
            yield file.fileno()

    def read(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes of the file.

        Raises:
            DataError: The file has been changed, replaced or removed, or is shorter.
        """
        with self.opened() as file:
            content = os.pread(file, size, offset)
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
        key = repr((_INDEX_VERSION, kind, str(self.path.resolve()), self._state))
        stored = index_directory() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        if (index := _stored(stored)) is not None:
            return index
        with _one_at_a_time(self.path):
            if (index := _stored(stored)) is None:
                index = make(self.path)
                with contextlib.suppress(OSError):  # without a cache, each run indexes the file
                    _store(index, stored)
            return index


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Lock a file: one process enters the block first; processes that have waited for it then enter together.

    Therefore, if the first process fails, the others do not fail one after another. On file systems without locks, no
    process waits.
    """
    with open(path, "rb") as file:
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
        matches = sorted(glob.glob(path)) if glob.has_magic(path) and not os.path.exists(path) else [path]
        if not matches:
            raise DataError(f"no file matches {path!r}")
        files.extend(map(Path, matches))
    if not files:
        raise DataError("got no files: must have at least one")
    return files


def describe(files: Sequence[Path]) -> str:
    """Return the names of files, for messages."""
    return ", ".join(map(str, files[:2])) + (" ..." if len(files) > 2 else "")


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


def starts_of(counts: Iterable[int]) -> tuple[list[int], int]:
    """Return the index of the first example of each file, and the number of all examples."""
    *starts, count = itertools.accumulate(counts, initial=0)
    return starts, count
