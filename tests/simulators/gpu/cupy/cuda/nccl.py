"""Sums and messages between processes through files: a process continues when all that it needs has been written.

SIMULATED_NCCL: 1 if NCCL is available
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from .schedule import work_alone
from .stream import by_number, submit

available = os.environ.get("SIMULATED_NCCL") == "1"
NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 7, 8, 0
_group: list[tuple[bool, Path, int, int, int]] | None = None  # messages: whether sent, file, place, bytes, stream
_TYPES = {NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}


def get_unique_id() -> tuple[int, ...]:
    return tuple(tempfile.mkdtemp(prefix="simulated-nccl-").encode())


class NcclCommunicator:
    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:  # noqa: N803
        self._folder, self._size, self._rank = Path(bytes(commId).decode()), ndev, rank
        self._calls = 0
        work_alone()
        self._sent, self._received = Counter[int](), Counter[int]()  # number of messages to and from each rank

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:  # noqa: N802
        assert op == NCCL_SUM and count > 0
        self._calls += 1
        number = self._calls
        dtype: Any = np.dtype(_TYPES[datatype])
        nbytes = count * dtype.itemsize
        files = [self._folder / f"{number}-{rank}" for rank in range(self._size)]
        given = False

        def ready() -> bool:
            nonlocal given
            if not given:
                given = True
                _write(files[self._rank], sendbuf, nbytes)
            return all(file.exists() for file in files)

        def run() -> None:
            total = np.sum([np.frombuffer(file.read_bytes(), dtype) for file in files], axis=0, dtype=dtype)
            ctypes.memmove(recvbuf, total.ctypes.data, nbytes)

        submit(run, ready, by_number(stream))

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._sent[peer] += 1
        file = self._folder / f"{self._rank}-to-{peer}-{self._sent[peer]}"
        _add(True, file, sendbuf, count, datatype, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._received[peer] += 1
        file = self._folder / f"{peer}-to-{self._rank}-{self._received[peer]}"
        _add(False, file, recvbuf, count, datatype, stream)

    def destroy(self) -> None:
        pass


def _add(is_sent: bool, file: Path, place: int, count: int, datatype: int, stream: int) -> None:
    assert _group is not None and count > 0, "a message outside of a group may wait for ever"
    _group.append((is_sent, file, place, count * np.dtype(_TYPES[datatype]).itemsize, stream))


def groupStart() -> None:  # noqa: N802
    global _group
    assert _group is None
    _group = []


def groupEnd() -> None:  # noqa: N802
    """Submit the messages of the group as one operation."""
    global _group
    assert _group is not None
    messages, _group = _group, None
    given = False

    def ready() -> bool:
        nonlocal given
        if not given:
            given = True
            for is_sent, file, place, nbytes, _ in messages:
                if is_sent:
                    _write(file, place, nbytes)
        return all(file.exists() for is_sent, file, *_ in messages if not is_sent)

    def run() -> None:
        for is_sent, file, place, nbytes, _ in messages:
            if not is_sent:
                content = file.read_bytes()
                assert len(content) == nbytes, "the sender and the receiver give different counts"
                ctypes.memmove(place, content, nbytes)

    if messages:
        (stream,) = {stream for *_, stream in messages}
        submit(run, ready, by_number(stream))


def _write(file: Path, place: int, nbytes: int) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(ctypes.string_at(place, nbytes))
    part.rename(file)
