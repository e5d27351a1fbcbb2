"""The newest states of a run in files in memory, from which its ranks restart.

A file has a head, the flat vectors, other arrays, and a description of these. There are two files: one file holds a
complete state while the other file is written. A killed process has executed all stores up to some instruction and none
after it. The flag in the head is therefore reliable, and no digest is needed. Nothing is pickled.

    head         identifier, whether the state is complete, step, and the description's place and checksum
    arrays       each begins on a page
    description  JSON: key, layout, seed, record, data cursor, extra state, and dtype, shape and offset of each array
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.checkpoint_files import path_for
from ..core.extra_state import StoredState, Versioned
from ..core.host_memory import available_bytes
from ..core.layout import PAGE, Array, Entry, Layout
from ..plan.progress import Progress
from ..process import state_folder
from .snapshot import Snapshot
from .state import write

_HEAD = struct.Struct("<16s5Q")  # identifier, is_complete, step; offset, length and CRC-32 of the description
_MAGIC = b"mpitrain state 1"
_FILES = ("0", "1")
_VECTORS = ""  # key of the vectors, in place of a namespace

NamedArray = tuple[str, str, Array]  # namespace, name, values


class StateInMemory(NamedTuple):
    """A complete state.

    Attributes:
        step: The number of completed steps.
        path: Its file.
    """

    step: int
    path: Path


def state_key(layout: Layout, vectors: Iterable[str], dtype: Any, seed: int) -> str:
    """Return a text that differs between two runs if neither can continue from the other run's state."""
    facts = repr((sorted(vectors), np.dtype(dtype).str, seed)).encode()
    return hashlib.blake2b(layout.digests().tobytes() + facts, digest_size=16).hexdigest()


class StateWriter:
    """Keeps the newest state of a run on this host. Local; at most one rank per host has a writer.

    Args:
        run_dir: The absolute path of the run directory.
        key: See ``state_key``.
        layout, seed, record: As for ``state.write``.
    """

    def __init__(self, run_dir: str, key: str, layout: Layout, seed: int, record: Mapping[str, Any]) -> None:
        self._run_dir = run_dir
        self._facts = {"key": key, "layout": asdict(layout), "seed": seed, "record": record}
        newest = newest_state(run_dir)
        self._next = 1 if newest is not None and newest.path.name == _FILES[0] else 0
        self._files: dict[int, _File] = {}

    def write(self, snapshot: Snapshot) -> None:
        """Copy a state into memory; it replaces the older of the two states there.

        Raises:
            OSError: There is not enough memory for the state, or no folder for it.
        """
        arrays: list[NamedArray] = [(_VECTORS, name, vector) for name, vector in snapshot.vectors.items()]
        extra: dict[str, tuple[int, dict[str, Any]]] = {}
        for namespace, (version, values) in snapshot.extra_state.items():
            extra[namespace] = version, {}
            for name, value in values.items():
                if isinstance(value, (bool, int, float, str)):
                    extra[namespace][1][name] = value
                else:
                    arrays.append((namespace, name, np.asarray(value)))
        facts = {**self._facts, "data_cursor": snapshot.data_cursor, "extra": extra}
        if self._next not in self._files:
            self._files[self._next] = self._open(sum(_pages(array) for _, _, array in arrays) + 2 * PAGE)
        self._files[self._next].write(snapshot.step, facts, arrays)
        self._next = 1 - self._next

    def remove(self) -> None:
        """Remove the states on this host."""
        self._files.clear()
        state_folder.remove(self._run_dir)

    def _open(self, nbytes: int) -> _File:
        """Return the next file, in the first folder that has room.

        Raises:
            OSError: No folder has room.
        """
        error = OSError()
        for folder in state_folder.folders(self._run_dir):
            path = folder / _FILES[self._next]
            try:
                if nbytes > available_bytes() // 2:  # the kernel must not kill the training process for lack of memory
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                state_folder.make(folder, self._run_dir)
                return _File(path, nbytes)
            except OSError as caught:
                error = caught
                with suppress(OSError):
                    path.unlink()
        raise error


def states(run_dir: str, key: str | None = None) -> list[StateInMemory]:
    """Return the complete states of a run on this host, the highest step first.

    Args:
        run_dir: The absolute path of the run directory.
        key: Only states with this key; None for all.
    """
    complete = []
    for folder in state_folder.existing(run_dir):
        for name in _FILES:
            with suppress(OSError, ValueError, KeyError):
                step, facts = _read_facts(folder / name)
                if key in (None, facts["key"]):
                    complete.append(StateInMemory(step, folder / name))
    return sorted(complete, reverse=True)


def newest_state(run_dir: str) -> StateInMemory | None:
    """Return a run's complete state of the highest step on this host, or None."""
    return next(iter(states(run_dir)), None)


def read_state(
    path: Path, vectors: Mapping[str, Array], start: int = 0, stop: int | None = None
) -> tuple[Progress, StoredState]:
    """Fill vectors, shape (layout.size,) each, from a complete state; return its progress and extra state. Local.

    Args:
        start, stop: The range of the vectors to fill.

    Raises:
        OSError, ValueError: The state is not there any more.
    """
    snapshot = _open_state(path)[0]
    for name, vector in vectors.items():
        vector[start:stop] = snapshot.vectors[name][start:stop]
    return Progress(snapshot.step, snapshot.data_cursor), StoredState(snapshot.extra_state)


def save_as_checkpoint(state: StateInMemory, folder: Path) -> Path:
    """Write a state as a checkpoint, and return its path. Local, after the ranks have ended.

    Args:
        folder: The run's checkpoint directory.

    Raises:
        OSError, ValueError: The checkpoint cannot be written, or the state is not there any more.
    """
    snapshot, facts = _open_state(state.path)
    layout = facts["layout"]
    entries = tuple(Entry(**{**entry, "shape": tuple(entry["shape"])}) for entry in layout["entries"])
    path = path_for(folder, state.step)
    write(path, Layout(**{**layout, "entries": entries}), snapshot, facts["seed"], facts["record"])
    return path


def _open_state(path: Path) -> tuple[Snapshot, dict[str, Any]]:
    """Return a complete state and its description; the state's vectors are views of the file.

    Raises:
        OSError, ValueError: The state is not there any more.
    """
    step, facts = _read_facts(path)
    stored = np.memmap(path, np.uint8, "r")
    vectors: dict[str, Array] = {}
    state = {namespace: Versioned(version, values) for namespace, (version, values) in facts["extra"].items()}
    for namespace, name, dtype, shape, offset in facts["arrays"]:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        array = stored[offset : offset + nbytes].view(dtype).reshape(shape)
        if namespace != _VECTORS:
            facts["extra"][namespace][1][name] = np.array(array)
        else:
            vectors[name] = array
    return Snapshot(vectors, step, int(facts["data_cursor"]), state, private=True), facts


class _File:
    """A file in memory with one state.

    Raises:
        OSError: The file cannot be created, or there is not enough memory for it.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._map(nbytes)

    def _map(self, nbytes: int) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.pwrite(descriptor, bytes(_HEAD.size), 0)
            # Without this reservation, the first store to a page without room would raise SIGBUS.
            os.posix_fallocate(descriptor, 0, nbytes)
            self._mapped = mmap.mmap(descriptor, nbytes)
            self._memory = np.frombuffer(self._mapped, np.uint8)
        finally:
            os.close(descriptor)

    def write(self, step: int, facts: Mapping[str, Any], arrays: Sequence[NamedArray]) -> None:
        """Replace the state; it is not complete while this call runs.

        Raises:
            OSError: The new state is larger, and there is not enough memory for it.
        """
        places, at = [], PAGE
        for namespace, name, array in arrays:
            places.append((namespace, name, array.dtype.str, array.shape, at))
            at += _pages(array)
        description = json.dumps({**facts, "arrays": places}).encode()
        if len(self._memory) < at + len(description):
            self._map(at + 2 * len(description))
        memory = self._memory
        _HEAD.pack_into(self._mapped, 0, _MAGIC, 0, 0, 0, 0, 0)
        for (*_, start), (_, _, array) in zip(places, arrays, strict=True):
            np.copyto(memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
        memory[at : at + len(description)] = np.frombuffer(description, np.uint8)
        where = (at, len(description), zlib.crc32(description))
        _HEAD.pack_into(self._mapped, 0, _MAGIC, 0, step, *where)
        _HEAD.pack_into(self._mapped, 0, _MAGIC, 1, step, *where)


def _read_facts(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the step of a state, and its description.

    Raises:
        OSError: There is no such file.
        ValueError: The state is not complete.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise ValueError("no state")
        magic, is_complete, step, offset, length, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or not is_complete:
            raise ValueError("not complete")
        file.seek(offset)
        description = file.read(length)
    if zlib.crc32(description) != checksum:
        raise ValueError("not complete")
    facts: dict[str, Any] = json.loads(description)
    return step, facts


def _pages(array: Array) -> int:
    """Return the size of an array in bytes, rounded up to whole pages."""
    return -(-array.nbytes // PAGE) * PAGE
