"""``mpitrain stage``: a copy of the Python environment on a disk of every host, from which ranks start.

A rank opens thousands of files before it works, most of them modules. If all ranks open them on one shared file system,
starting takes minutes on many hosts. Here one process copies the environment from there, once. The other hosts get this
copy as the stream of a tar archive, which MPI broadcasts in a tree.

The copy is ``FOLDER/mpitrain-UID/NAME``, with the same path on all hosts. NAME is a digest of what is installed
(``_digest``), so a copy is used again until a package is installed or removed. A copy gets its name when it is
complete. Therefore an interrupted copy is never used, and two jobs may copy at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import stat
import sys
import sysconfig
import tarfile
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..comm.mpi import MPI, start
from ..core.words import one_line
from ..errors import LaunchError
from ..monitor.console import print_wrapped

_CHUNK = 1 << 22  # bytes of a broadcast
_THREADS = 16  # threads that copy files, because opening them takes long
_SYSTEM = (Path("/"), Path("/usr"), Path("/usr/local"))
# What a virtual environment contains: its folder may also be that of a project, with data.
_OF_VENV = {"bin", "etc", "include", "lib", "lib64", "libexec", "share", "pyvenv.cfg"}
_OF_OTHERS = {"envs", "pkgs"}  # what conda's first environment contains of other environments


def stage(folder: Path) -> int:
    """Copy this environment to a folder of every host, and print the path of the copy's Python; return an exit status.

    Collective over ``COMM_WORLD``, with at least one rank on each host. The first rank prints.

    Args:
        folder: An absolute path, on a disk of each host.
    """
    prefix, world = Path(sys.prefix), start()
    try:
        of_host = world.Split_type(MPI.COMM_TYPE_SHARED)
        hosts = world.Split(of_host.rank > 0)  # of the first rank of each host
        copy = folder / f"mpitrain-{os.getuid()}" / world.bcast(_digest(prefix) if world.rank == 0 else "")
        problem: str | None = None
        if prefix in _SYSTEM or not Path(sys.executable).is_relative_to(prefix):
            problem = f"{sys.executable} belongs to the system: use a virtual environment or conda"
        elif of_host.rank == 0:
            problem = _copy_to_all(hosts, prefix, copy)
        problem = world.bcast(problem)
    except Exception:
        traceback.print_exc()
        world.Abort(1)  # the other ranks would wait
    if world.rank == 0 and problem is None:
        print(copy / Path(sys.executable).relative_to(prefix), flush=True)
    elif world.rank == 0:
        print_wrapped(f"mpitrain: the environment cannot be copied to {folder}: {problem}")
    world.Barrier()  # launchers end the other ranks when one exits with an error
    return 0 if problem is None else LaunchError.exit_status


def _copy_to_all(hosts: MPI.Comm, prefix: Path, copy: Path) -> str | None:
    """Make the copies that are missing; return the problem of the first host that has one. Collective over hosts."""
    problem = _first(hosts, _make_parent(copy.parent)) or _check_disks(hosts, copy.parent)
    if problem is not None:
        return problem
    if not any(hosts.allgather(copy.is_dir())):
        if hosts.rank == 0:
            problem = _written(copy, lambda partial: _copy(prefix, partial, copy))
        problem = _first(hosts, problem)
    have_copies = hosts.allgather(copy.is_dir())
    if problem is not None or all(have_copies):
        return problem
    sender = have_copies.index(True)
    team = hosts.Split(0 if hosts.rank == sender or not copy.is_dir() else MPI.UNDEFINED, key=hosts.rank != sender)
    if team != MPI.COMM_NULL:
        stream = _Stream(team)
        problem = _sent(copy, stream) if team.rank == 0 else _written(copy, stream.extract)
        team.Free()
    return _first(hosts, problem)


def _first(hosts: MPI.Comm, problem: str | None) -> str | None:
    """Return the problem of the first host that has one, with its name. Collective over the hosts."""
    problems = hosts.allgather(None if problem is None else f"{socket.gethostname()}: {problem}")
    return next(filter(None, problems), None)


def _digest(prefix: Path) -> str:
    """Return a digest of what is installed: the entries of the folders that installing and removing packages change."""
    digest = hashlib.sha256(f"{prefix} {sys.version}".encode())
    paths = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "scripts")}
    for folder in (prefix, prefix / "conda-meta", *sorted(paths)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name != "__pycache__":
                    status = entry.stat(follow_symlinks=False)
                    digest.update(
                        f"{entry.path} {status.st_mtime_ns} {status.st_size}\n".encode(errors="surrogateescape")
                    )
    return digest.hexdigest()[:16]


def _make_parent(parent: Path) -> str | None:
    """Make the folder of this user's copies; return a problem, such as a folder that other users may change."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = parent.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            return f"{parent} must be a folder that belongs to this user, and that no other user can write"
        return None
    except OSError as error:
        return f"{parent}: {error.strerror}"


def _check_disks(hosts: MPI.Comm, parent: Path) -> str | None:
    """Return a problem if the folder cannot be used: hosts share it, or programs cannot start there. Collective."""
    seen = parent / hosts.bcast(f".seen-{secrets.token_hex(8)}")  # made by the first host
    problem = f"{parent} is on a disk mounted noexec" if os.statvfs(parent).f_flag & os.ST_NOEXEC else None
    try:
        if hosts.rank == 0:
            seen.touch()
    except OSError as error:
        problem = f"{parent}: {error.strerror}"
    hosts.Barrier()
    if hosts.rank > 0 and seen.exists():
        problem = f"shares {parent} with other hosts; give a folder on a disk of each host"
    problem = _first(hosts, problem)
    if hosts.rank == 0:
        with contextlib.suppress(OSError):
            seen.unlink()
    return problem


def _written(copy: Path, write: Callable[[Path], None]) -> str | None:
    """Let ``write`` fill a folder, and give it the name of the copy; return a problem, such as a full disk."""
    for left in copy.parent.glob(".partial-*"):  # by a copy that was interrupted
        if not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
            shutil.rmtree(left, ignore_errors=True)
    partial = copy.parent / f".partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        write(partial)
        try:
            partial.rename(copy)
        except OSError:
            if not copy.is_dir():  # which another job could have made meanwhile
                raise
        return None
    except (OSError, EOFError, tarfile.TarError) as error:
        return f"{copy.parent}: {getattr(error, 'strerror', None) or one_line(error)}"
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(prefix: Path, partial: Path, copy: Path) -> None:
    """Copy the environment; its commands then start the Python of the copy."""
    copied: list[Future[str]] = []
    with ThreadPoolExecutor(_THREADS) as threads:

        def copy_file(source: str, target: str) -> None:
            copied.append(threads.submit(shutil.copy2, source, target))

        def left_out(folder: str, names: list[str]) -> set[str]:
            if Path(folder) != prefix:
                return set()
            return set(names) - _OF_VENV if "pyvenv.cfg" in names else _OF_OTHERS

        shutil.copytree(prefix, partial, symlinks=True, ignore=left_out, copy_function=copy_file)
    for each in copied:
        each.result()
    for script in (partial / Path(sysconfig.get_path("scripts")).relative_to(prefix)).iterdir():
        if script.is_file() and not script.is_symlink() and (content := script.read_bytes()).startswith(b"#!"):
            # If the path is too long for the first line, the second one starts Python.
            *heads, rest = content.split(b"\n", 2)
            heads = [line.replace(os.fsencode(prefix) + b"/", os.fsencode(copy) + b"/") for line in heads]
            script.write_bytes(b"\n".join([*heads, rest]))


def _sent(copy: Path, stream: _Stream) -> str | None:
    """Send the copy; return a problem."""
    try:
        with tarfile.open(fileobj=stream, mode="w|", bufsize=_CHUNK) as archive:  # type: ignore[call-overload]
            archive.add(copy, ".")
        stream.close()
        return None
    except OSError as error:
        stream.fail()
        return f"{copy}: {error.strerror}"


class _Stream:
    """A stream of bytes from the first rank of a communicator to all others. Collective over the communicator.

    Args:
        team: The communicator.
    """

    def __init__(self, team: MPI.Comm) -> None:
        self._team, self._chunk, self._count, self._at = team, np.empty(_CHUNK, np.uint8), np.zeros(1, np.int64), 0
        self._has_ended = False

    def write(self, data: bytes) -> int:
        """Send at most ``_CHUNK`` bytes."""
        self._send(len(data), data)
        return len(data)

    def close(self) -> None:
        """Declare that nothing follows."""
        self._send(0)

    def fail(self) -> None:
        """Declare that the rest cannot be sent."""
        self._send(-1)

    def _send(self, count: int, data: bytes = b"") -> None:
        self._count[0] = count
        self._team.Bcast(self._count)
        if count > 0:
            self._team.Bcast(np.frombuffer(data, np.uint8))

    def read(self, count: int) -> bytes:
        """Receive ``count`` bytes; fewer at the end.

        Raises:
            EOFError: The rest cannot be sent.
        """
        parts, left = [], count
        while left and not self._has_ended:
            if self._at == self._count[0]:
                self._team.Bcast(self._count)
                self._at, self._has_ended = 0, self._count[0] <= 0
                if self._count[0] < 0:
                    raise EOFError("the first host could not read its copy")
                if self._count[0]:
                    self._team.Bcast(self._chunk[: self._count[0]])
            part = self._chunk[self._at : min(self._at + left, self._count[0])].tobytes()
            self._at += len(part)
            left -= len(part)
            parts.append(part)
        return b"".join(parts)

    def extract(self, folder: Path) -> None:
        """Extract the archive that is sent, and receive all of it also if that fails."""
        try:
            with tarfile.open(fileobj=self, mode="r|", bufsize=_CHUNK) as archive:  # type: ignore[call-overload]
                archive.extraction_filter = lambda member, path: member  # type: ignore[method-assign,assignment]
                archive.extractall(folder)
        finally:
            while self.read(_CHUNK):
                pass
