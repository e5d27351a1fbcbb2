"""Read the HDF5 structure of a checkpoint in a child process with limits, because crafted files crash the HDF5 library.

The child gets a copy of the structure and of compressed values, not the file. It can open no files or connections, and
write only its answer; it can start processes only as root. The answer is not trusted: it is checked like a manifest.
"""

from __future__ import annotations

import io
import json
import math
import os
import resource
import subprocess
import sys
import time
from typing import Any

from .container import memory_file
from .manifest import parse_json
from .structure import MALFORMED, Structure, UnsupportedStructure

# Limits of the child: always, and in addition for each MiB or byte of the structure.
_SECONDS, _SECONDS_PER_MIB = 5, 4
_MEMORY_BYTES, _ANSWER_BYTES, _BYTES_PER_BYTE = 1 << 28, 1 << 20, 8
_MAX_ANSWER_BYTES = 1 << 28
_START_S = 60  # the start on a slow file system
_CODE = "import sys; sys.path[:] = {path!r}; from mpitrain.checkpoint.isolation import answer; answer({size})"


def structure_in_child(memory: int, size: int) -> Structure:
    """Return the HDF5 structure of a file that may be crafted; it is not validated.

    Args:
        memory: Descriptor of the file, or of a copy without values.
        size: Number of bytes of the structure, which limits time and memory.

    Raises:
        UnsupportedStructure: HDF5 cannot read the structure within the limits, or checkpoints do not support it.
        OSError: The child cannot be started.
    """
    words = [sys.executable, "-c", _CODE.format(path=sys.path, size=size)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # each thread reserves memory
    limit_s = _START_S + _seconds(size)
    with open(f"/proc/self/fd/{memory}", "rb") as copy, memory_file() as out:  # the child cannot change the copy
        try:
            done = subprocess.run(
                words, stdin=copy, stdout=out, stderr=subprocess.DEVNULL, env=environment, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UnsupportedStructure(f"HDF5 does not read its structure within {limit_s} s") from error
        text = os.pread(out.fileno(), os.fstat(out.fileno()).st_size, 0)
    if done.returncode:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise UnsupportedStructure(f"HDF5 crashes or exceeds its limits when it reads the structure ({how})")
    return _parse(text)


def _parse(text: bytes) -> Structure:
    """Return the structure in an answer.

    Raises:
        UnsupportedStructure: The answer states why there is no structure, or is malformed.
    """
    try:
        content = parse_json(text)
        reason = content if isinstance(content, str) and content.isprintable() else None
        places = {} if reason else {name: (start, stop) for name, (start, stop) in content["places"].items()}
        if any(type(n) is not int for place in places.values() for n in place):
            raise ValueError("not an offset")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnsupportedStructure(MALFORMED) from error
    if reason:
        raise UnsupportedStructure(f"its HDF5 structure is not valid: {reason[:300]}")
    return Structure.from_json(content, places)


def answer(size: int) -> None:
    """Write the structure of the file at standard input to standard output; the child runs this."""
    from ..core.h5 import h5py
    from .hdf5 import structure_of

    _limit(size)
    content: Any
    try:
        with h5py.File(io.FileIO(0), "r") as file:
            structure = structure_of(file)
        places = {name: dataset.place for name, dataset in structure.datasets.items() if dataset.place}
        content = {**structure.to_json(), "places": places}
    except Exception as error:  # HDF5's errors have many types
        content = str(error) or type(error).__name__
    with open(1, "w", encoding="ascii") as out:
        json.dump(content, out)


def _limit(size: int) -> None:
    """Limit this process, which has all its modules and descriptors."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_CPU: math.ceil(time.process_time()) + _seconds(size),
        resource.RLIMIT_AS: used + _MEMORY_BYTES + _BYTES_PER_BYTE * size,
        resource.RLIMIT_FSIZE: min(_ANSWER_BYTES + _BYTES_PER_BYTE * size, _MAX_ANSWER_BYTES),
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most),) * 2)


def _seconds(size: int) -> int:
    return _SECONDS + _SECONDS_PER_MIB * (size >> 20)
