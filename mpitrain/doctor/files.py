"""The run directory's file system: what saving needs of it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..checkpoint import shared_file as together
from ..checkpoint.container import write_container
from ..checkpoint.reader import Checkpoint
from ..comm.cluster import Cluster
from ..core.h5 import h5py
from ..errors import DamagedCheckpoint
from ..monitor.format import size_of
from ..process.run_directory import missing_folders, remove_empty
from .finding import Finding

TOPIC = "Files"
_STATE_BYTES = 64 << 20
_SEEN_S = 10.0  # network file systems show a new file to other hosts after a while
_LITTLE = 10 << 30


def check(cluster: Cluster, run_dir: Path) -> Iterator[Finding]:
    """Collective over all ranks; only rank 0's findings count.

    Args:
        run_dir: Where runs are to go; what is tried is removed again.
    """
    yield Finding(TOPIC, "HDF5", "pass", _hdf5())
    made = missing_folders(run_dir) if cluster.rank == 0 else []
    folder = run_dir / f".doctor-{secrets.token_hex(4)}" if cluster.rank == 0 else Path()
    folder = cluster.comm.bcast(folder, root=0)
    problem = ""
    if cluster.rank == 0:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            problem = f"{run_dir} cannot be written: {error.strerror}"
            remove_empty(made)
    problem = cluster.comm.bcast(problem, root=0)
    if problem:
        yield Finding(TOPIC, "run directory", "failure", problem, "give another --run-dir")
        return
    try:
        if cluster.rank == 0:
            yield from _try(folder, run_dir)
        yield _shared(cluster, folder)
    finally:
        cluster.comm.Barrier()
        if cluster.rank == 0:
            for path in folder.iterdir():
                path.unlink()
            remove_empty([folder, *made])


def file_system(path: Path) -> str:
    """The type of the file system that a path lies on, such as ``ext4``; local."""
    found, longest = "unknown", -1
    resolved = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")  # a space is \040 there
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) > longest:
            found, longest = kind, len(mount)
    return found


def _hdf5() -> str:
    lacks = together.lacks()
    saving = f"every node writes a file ({lacks})" if lacks else "nodes write one file together"
    return f"HDF5 {h5py.version.hdf5_version}, h5py {h5py.version.version}; of large checkpoints {saving}"


def _try(folder: Path, run_dir: Path) -> Iterator[Finding]:
    """What saving does, on one rank; local."""
    free = os.statvfs(folder)
    room = free.f_bavail * free.f_frsize
    told = f"{run_dir.resolve()} ({file_system(folder)}), {size_of(room)} free"
    little = room < _LITTLE
    advice = "a full disk fails saves: keep fewer checkpoints (--keep), or give another --run-dir" if little else ""
    yield Finding(TOPIC, "run directory", "warning" if little else "pass", told, advice)
    yield _save(folder)
    yield _locking(folder)


def _save(folder: Path) -> Finding:
    """Write a checkpoint over another, as a save does, and read it."""
    path, state = folder / "checkpoint.h5", np.arange(_STATE_BYTES // 4, dtype=np.uint32).view(np.float32)
    try:
        for _ in range(2):
            began = time.perf_counter()
            write_container(path, {"params/x": state}, {"/": {"step": 0}})
            seconds = time.perf_counter() - began
        with Checkpoint(path) as saved:
            saved.verify()
    except (OSError, DamagedCheckpoint) as error:
        advice = "checkpoints cannot be trusted here: give a --run-dir on another file system"
        return Finding(TOPIC, "save and verify", "failure", str(error), advice)
    rate = _STATE_BYTES / seconds
    return Finding(TOPIC, "save and verify", "pass", f"{size_of(rate)}/s: write, flush, rename, flush the folder")


def _locking(folder: Path) -> Finding:
    """Whether HDF5's own locks work; our files are written without any."""
    try:
        with h5py.File(folder / "locked.h5", "w", locking=True):
            pass
    except OSError as error:
        found = f"not here ({error.strerror or str(error).splitlines()[0][:60]}); checkpoints and data are read without"
        return Finding(TOPIC, "locks", "warning", found, "export HDF5_USE_FILE_LOCKING=FALSE for other HDF5 programs")
    return Finding(TOPIC, "locks", "pass", "HDF5 can lock files; checkpoints need no locks")


def _shared(cluster: Cluster, folder: Path) -> Finding:
    """Whether every host sees what rank 0 writes; collective."""
    if cluster.n_nodes == 1:
        return Finding(TOPIC, "seen by all hosts", "none", "one host")
    mark = folder / "mark"
    if cluster.rank == 0:
        mark.touch()
    cluster.comm.Barrier()
    began = time.monotonic()
    while not (seen := mark.exists()) and time.monotonic() - began < _SEEN_S:
        time.sleep(0.05)
    everyone = cluster.comm.allgather((seen, time.monotonic() - began, cluster.host))
    blind = sorted({host for found, _, host in everyone if not found})
    if blind:
        advice = (
            "give a --run-dir on a file system that all hosts share, or copy the run directory to all before a restart"
        )
        return Finding(TOPIC, "seen by all hosts", "warning", f"not by {', '.join(blind[:8])}", advice)
    return Finding(TOPIC, "seen by all hosts", "pass", f"within {max(s for _, s, _ in everyone):.1f} s")
