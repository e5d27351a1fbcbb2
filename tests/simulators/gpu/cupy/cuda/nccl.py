"""Sums over processes through files: each process writes its part, and continues when all processes have written
theirs.

SIMULATED_NCCL: 1 if NCCL is available
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .stream import by_number, submit

available = os.environ.get("SIMULATED_NCCL") == "1"
NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 7, 8, 0
_TYPES = {NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}


def get_unique_id() -> tuple[int, ...]:
    return tuple(tempfile.mkdtemp(prefix="simulated-nccl-").encode())


class NcclCommunicator:
    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:  # noqa: N803
        self._folder, self._size, self._rank = Path(bytes(commId).decode()), ndev, rank
        self._calls = 0

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
                part = files[self._rank].with_suffix(".part")
                part.write_bytes(ctypes.string_at(sendbuf, nbytes))
                part.rename(files[self._rank])
            return all(file.exists() for file in files)

        def run() -> None:
            total = np.sum([np.frombuffer(file.read_bytes(), dtype) for file in files], axis=0, dtype=dtype)
            ctypes.memmove(recvbuf, total.ctypes.data, nbytes)

        submit(run, ready, by_number(stream))

    def destroy(self) -> None:
        pass
