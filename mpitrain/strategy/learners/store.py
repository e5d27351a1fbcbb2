"""Where learners meet: a shared folder, and registers in it that several processes change without locks.

A store needs four operations on small names, of which only ``create`` must be exclusive. On a file system, ``create``
is ``link(2)``, which creates a name exclusively and with all of its content, on NFS, too. Files are found by their
names: clients of NFS may see the list of a folder, or the absence of a name, up to a minute late.

A register is a value with a version number. Version n + 1 is a file of its own, which one process creates, and no other
process can. Therefore of several changes of the same version one wins, and the others are repeated on its result:

    ledger.6 (empty)   ledger.7   ledger.8   ledger.newest (contains 8)

Old versions become empty files, whose names stay used, so that a process that was suspended meanwhile cannot create one
of them again. ``NAME.newest`` only says from where to look for newer versions. If a process that was suspended sets it
back, the newest version is still found.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

_USED = 1000  # older versions whose names stay used
_LEFT_S = 3600.0  # age at which a temporary file was left by a process that has died
_log = logging.getLogger(__name__)


class Store(Protocol):
    """Named values that many processes on many hosts share. Methods are local, and raise OSError."""

    def create(self, name: str, data: bytes) -> bool:
        """Create a value with all of its content; return False if it exists already."""

    def replace(self, name: str, data: bytes) -> None:
        """Create or replace a value: readers see the old or the new content.

        All contents of a name should have the same length: over SFTP, readers see a new content with the length of the
        old one for up to 20 s. If a host crashes, a value may be lost, or damaged; only those that are created are
        durable.
        """

    def read(self, name: str) -> bytes | None:
        """Return a value; None if it does not exist."""

    def delete(self, name: str) -> None:
        """Delete a value, if it exists."""


class Folder:
    """A store in a folder, which is created."""

    def __init__(self, path: Path) -> None:
        self._path, self._own = str(path), f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir(parents=True, exist_ok=True)
        for left in path.glob("*.partial"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.unlink()

    def create(self, name: str, data: bytes) -> bool:
        partial = self._write(name, data, durably=True)
        try:
            os.link(partial, self._file(name))
        except OSError as error:
            # SFTP does not report that this was the reason.
            if not isinstance(error, FileExistsError) and not os.path.exists(self._file(name)):
                raise
            # A client of NFS may repeat a request that the server has performed: the link is then this one.
            return os.stat(partial).st_nlink == 2
        finally:
            with contextlib.suppress(OSError):
                os.unlink(partial)
        return True

    def replace(self, name: str, data: bytes) -> None:
        os.replace(self._write(name, data, durably=False), self._file(name))

    def read(self, name: str) -> bytes | None:
        try:
            with open(self._file(name), "rb", buffering=0) as file:
                return file.readall()
        except FileNotFoundError:
            if not os.path.isdir(self._path):
                raise
            return None

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._file(name))

    def _file(self, name: str) -> str:
        return f"{self._path}/{name}"  # a ``Path`` costs more than a small file is read in

    def _write(self, name: str, data: bytes, durably: bool) -> str:
        """Write a temporary file, and return its path."""
        partial = self._file(f"{name}.{self._own}.partial")
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                if durably:
                    os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
        return partial


class Value(NamedTuple):
    """A version of a register: its number, from 1, and its content; 0 and no content before the first version."""

    number: int
    data: bytes


class Register:
    """A value of a store that processes change one after the other. Methods are local, and raise OSError.

    Args:
        keep: Number of versions that stay as they are, at least 2.
        is_intact: Returns whether a content is valid. One that is not is replaced by that of the version before.
    """

    def __init__(
        self, store: Store, name: str, keep: int = 2, is_intact: Callable[[bytes], bool] = lambda _: True
    ) -> None:
        self._store, self._name, self._keep, self._is_intact = store, name, keep, is_intact
        self._newest = Value(0, b"")

    def read(self) -> Value:
        """Return the newest version. A version that this register has returned is never followed by an older one."""
        number = max(self._newest.number, self._recorded())
        value = self._newest if number == self._newest.number else self._version(number)
        while value is not None and (newer := self._version(value.number + 1)) is not None:
            value = newer
        if value is not None:  # else it was deleted meanwhile: the next call sees the newer one
            is_valid = value is self._newest or self._is_intact(value.data)
            self._newest = value if is_valid else self._in_place_of(value)
        return self._newest

    def _in_place_of(self, damaged: Value) -> Value:
        """Return the number of a damaged version with the newest valid content before it; raise OSError without one."""
        for number in range(damaged.number - 1, max(0, damaged.number - self._keep), -1):
            before = self._newest if number == self._newest.number else self._version(number)
            if before is not None and self._is_intact(before.data):
                files = self._file(damaged.number), self._file(number)
                _log.warning("the file %s of the learners is damaged; %s is used in its place", *files)
                return Value(damaged.number, before.data)
        raise OSError(f"the file {self._file(damaged.number)} is damaged")

    def changed(self) -> bool:
        """Return whether there may be a newer version than the last one that was read."""
        return self._recorded() > self._newest.number

    def swap(self, version: Value, data: bytes) -> bool:
        """Make ``data`` the version after this one; return False if another process has changed the value."""
        number = version.number + 1
        if not self._store.create(self._file(number), data):
            return False
        with contextlib.suppress(OSError):  # the version exists now, and is found without what follows
            if self._recorded() >= number + self._keep:  # this process was suspended until the name was deleted
                self._store.delete(self._file(number))
                return False
            if number > self._keep:  # at first, because this needs no space on a disk that is full
                self._store.replace(self._file(number - self._keep), b"")
            self._store.replace(self._file("newest"), b"%020d" % number)
            self._store.delete(self._file(number - self._keep - _USED))
        self._newest = Value(number, data)
        return True

    def _recorded(self) -> int:
        text = self._store.read(self._file("newest")) or b"0"
        return int(text) if text.isdigit() else 0

    def _version(self, number: int) -> Value | None:
        data = self._store.read(self._file(number))
        return None if data is None else Value(number, data)

    def _file(self, suffix: int | str) -> str:
        return f"{self._name}.{suffix}"
