"""Write files durably and atomically: a file has either its old content or all of its new content.

Several processes, also of several hosts, may write parts of the new content: one of them calls ``replacing``, and the
others ``joining`` while it does.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np

from ..core.layout import Array

_STAGE_BYTES = 1 << 22  # this size fits into the last-level cache, and is 1.4 times faster than 32 MiB
_BLOCK = 4096  # alignment of memory, offsets and lengths for direct I/O
_NO_SUCH_THING = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


class DiskWriter:
    """Appends bytes to a file, with direct I/O if the file system supports it.

    For a large state, direct I/O is faster than writing through the page cache, and leaves more CPU time and memory to
    the training in progress.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._stages = [np.frombuffer(mmap.mmap(-1, _STAGE_BYTES), np.uint8) for _ in range(2)]  # mmap aligns to pages
        self._staged = self._written = self._size = 0
        self._thread = ThreadPoolExecutor(1, "checkpoint-writer")
        self._writing: Future[None] | None = None

    @property
    def block_bytes(self) -> int:
        """Unit in which the file's parts may be written by different hosts: of whole pages and file system blocks."""
        return math.lcm(mmap.PAGESIZE, os.fstat(self._descriptor).st_blksize)

    def start_at(self, start: int) -> None:
        """Append from byte ``start`` on, a multiple of 4096, not from the beginning of the file."""
        self._written = self._size = start

    def append(self, data: Array) -> None:
        """Append bytes, shape (n,) uint8.

        Raises:
            OSError: These or earlier bytes cannot be written.
        """
        while len(data):
            count = min(len(data), _STAGE_BYTES - self._staged)
            np.copyto(self._stages[0][self._staged : self._staged + count], data[:count])
            self._staged += count
            self._size += count
            data = data[count:]
            if self._staged == _STAGE_BYTES:
                self._start_writing(_STAGE_BYTES)

    def write_front(self, data: Array) -> None:
        """Overwrite the first bytes of the file with ``data``, shape (n * 4096,) uint8, after all bytes were appended.

        Raises:
            OSError: These or earlier bytes cannot be written.
        """
        self._flush()
        for start in range(0, len(data), _STAGE_BYTES):
            part = data[start : start + _STAGE_BYTES]
            np.copyto(self._stages[0][: len(part)], part)
            self._write(self._stages[0][: len(part)], start)

    def finish(self) -> None:
        """Write everything to disk durably.

        Raises:
            OSError: The data cannot be written.
        """
        self._flush()
        if self._size % _BLOCK:  # otherwise nothing was padded, and other processes may have written bytes after these
            os.ftruncate(self._descriptor, self._size)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Stop writing; the file stays open."""
        self._thread.shutdown()

    def _flush(self) -> None:
        """Write the stage, padded with zeros to a full block; nothing can be appended afterwards."""
        padded = -(-self._staged // _BLOCK) * _BLOCK
        self._stages[0][self._staged : padded] = 0
        self._start_writing(padded)
        self._wait()

    def _start_writing(self, count: int) -> None:
        """Write the stage in a thread, and continue with the other stage."""
        self._wait()
        self._writing = self._thread.submit(self._write, self._stages[0][:count], self._written)
        self._stages.reverse()
        self._written += count
        self._staged = 0

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write(self, data: Array, start: int) -> None:
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._descriptor, data[done:].data, start + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not _through_page_cache(self._descriptor):
                    raise


@contextmanager
def replacing(path: Path) -> Iterator[DiskWriter]:
    """Yield a writer for the new content of ``path``, which replaces it atomically if the block ends without exception.

    Raises:
        OSError: The disk is full, or the directory cannot be written; ``path`` is unchanged.
    """
    make_folder(path.parent)
    partial = _partial(path)
    try:
        with _writing(partial, os.O_CREAT | os.O_TRUNC) as writer:
            yield writer
        os.replace(partial, path)
        flush_folder(path.parent)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def joining(path: Path) -> AbstractContextManager[DiskWriter]:
    """Yield a writer for a part of the new content of ``path``, while another process is in ``replacing(path)``.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    return _writing(_partial(path), 0)


def make_folder(folder: Path) -> None:
    """Create a directory durably if it does not exist."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        flush_folder(folder.parent)


def flush_folder(folder: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_THING:  # some network file systems make entries durable by themselves
            raise
    finally:
        os.close(descriptor)


def _partial(path: Path) -> Path:
    """Return the name of the new content until it is complete."""
    return path.with_suffix(".partial")


@contextmanager
def _writing(path: Path, flags: int) -> Iterator[DiskWriter]:
    """Yield a writer for a file; everything is on disk if the block ends without exception."""
    descriptor = _open(path, os.O_RDWR | os.O_CLOEXEC | flags)
    try:
        writer = DiskWriter(descriptor)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno not in _NO_SUCH_THING:
            raise
        return os.open(path, flags, 0o666)


def _through_page_cache(descriptor: int) -> bool:
    """Turn off direct I/O; return whether it was on."""
    flags, direct = fcntl.fcntl(descriptor, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)
