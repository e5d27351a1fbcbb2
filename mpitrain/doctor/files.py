"""The run directory's file system: what saving checkpoints needs."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..checkpoint.container import write_container
from ..checkpoint.reader import Checkpoint
from ..checkpoint.state import root_attributes
from ..comm.cluster import Cluster
from ..core.h5 import h5py
from ..errors import DamagedCheckpoint
from ..monitor.format import size_of
from ..process.run_directory import missing_folders, remove_empty
from .finding import Finding

TOPIC = "Files"
_STATE_BYTES = 64 << 20
_SEEN_S = 10.0  # network file systems show a new file to other hosts with a delay
_LITTLE = 10 << 30


def check(cluster: Cluster, run_dir: Path) -> Iterator[Finding]:
    """Check the run directory. Collective over all ranks; only rank 0's findings are printed.

    Args:
        run_dir: Directory in which runs will be stored; all test files are removed again.
    """
    yield Finding(TOPIC, "HDF5", "pass", f"HDF5 {h5py.version.hdf5_version}, h5py {h5py.version.version}")
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
        yield Finding(TOPIC, "run directory", "failure", problem, "pass another --run-dir")
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
    """Return the type of the file system that contains a path, such as ``ext4``. Local."""
    mounted_kind, longest = "unknown", -1
    resolved = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        mount = mount.encode().decode("unicode_escape")  # /proc/mounts escapes a space as \040
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) > longest:
            mounted_kind, longest = kind, len(mount)
    return mounted_kind


def _try(folder: Path, run_dir: Path) -> Iterator[Finding]:
    """Check free space, saving and locking on one rank. Local."""
    free = os.statvfs(folder)
    room = free.f_bavail * free.f_frsize
    details = f"{run_dir.resolve()} ({file_system(folder)}), {size_of(room)} free"
    little = room < _LITTLE
    advice = "saving fails on a full disk; keep fewer checkpoints (--keep), or pass another --run-dir" if little else ""
    yield Finding(TOPIC, "run directory", "warning" if little else "pass", details, advice)
    yield _save(folder)
    yield _locking(folder)


def _save(folder: Path) -> Finding:
    """Overwrite a checkpoint, as saving does, and verify it."""
    path, state = folder / "checkpoint.h5", np.arange(_STATE_BYTES // 4, dtype=np.uint32).view(np.float32)
    try:
        for _ in range(2):
            began = time.perf_counter()
            write_container(path, {"params/x": state}, {"/": root_attributes(0, 0, 0)})
            seconds = time.perf_counter() - began
        with Checkpoint(path) as saved:
            saved.verify()
    except (OSError, DamagedCheckpoint) as error:
        advice = "this file system damages checkpoints; pass a --run-dir on another file system"
        return Finding(TOPIC, "save and verify", "failure", str(error), advice)
    rate = _STATE_BYTES / seconds
    return Finding(TOPIC, "save and verify", "pass", f"{size_of(rate)}/s: write, flush, rename, flush the directory")


def _locking(folder: Path) -> Finding:
    """Check whether HDF5's file locks work; mpitrain does not use them."""
    try:
        with h5py.File(folder / "locked.h5", "w", locking=True):
            pass
    except OSError as error:
        details = f"not supported ({error.strerror or str(error).splitlines()[0][:60]}); mpitrain does not need them"
        return Finding(TOPIC, "locks", "warning", details, "export HDF5_USE_FILE_LOCKING=FALSE for other HDF5 programs")
    return Finding(TOPIC, "locks", "pass", "HDF5 can lock files; checkpoints do not need locks")


def _shared(cluster: Cluster, folder: Path) -> Finding:
    """Check whether every host sees files that rank 0 writes. Collective over all ranks."""
    if cluster.n_nodes == 1:
        return Finding(TOPIC, "visible on all hosts", "none", "one host")
    mark = folder / "mark"
    if cluster.rank == 0:
        mark.touch()
    cluster.comm.Barrier()
    began = time.monotonic()
    while not (seen := mark.exists()) and time.monotonic() - began < _SEEN_S:
        time.sleep(0.05)
    all_ranks = cluster.comm.allgather((seen, time.monotonic() - began, cluster.host))
    blind = sorted({host for is_visible, _, host in all_ranks if not is_visible})
    if blind:
        advice = (
            "pass a --run-dir on a file system that all hosts share, "
            "or copy the run directory to all hosts before a restart"
        )
        return Finding(TOPIC, "visible on all hosts", "warning", f"not on {', '.join(blind[:8])}", advice)
    return Finding(TOPIC, "visible on all hosts", "pass", f"after {max(s for _, s, _ in all_ranks):.1f} s")
