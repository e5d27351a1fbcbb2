"""``mpitrain stage``: a copy of the Python environment on a disk of every host, from which ranks start.

A rank opens thousands of files before it works, most of them modules. If all ranks open them on one shared file system,
starting takes minutes on many hosts. Here one process copies the environment from there, once. The other hosts get this
copy as the stream of a tar archive, which MPI broadcasts in a tree.

The copy is ``FOLDER/mpitrain-UID/NAME``, with the same path on all hosts. NAME is a digest of what is installed
(``_digest``), so a copy is used again until a package is installed or removed. A copy gets its name when it is
complete. Therefore an interrupted copy is never used, and two jobs may copy at the same time. The process that writes
a copy has locked its folder, so that others can remove the copies of processes that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import tarfile
import traceback
from collections.abc import Callable, Iterator
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
# The lines of a script that start its interpreter. pip, uv and conda let a shell start Python if its path is too long
# for the first line, or contains spaces.
_INTERPRETER = re.compile(
    rb"""#!(?:/bin/sh\n'''exec' ["']?(?P<quoted>/.+?)["']? "\$0" "\$@"(?: #|\n' )'''"""
    rb"""|(?P<path>/\S+)(?P<arguments>[^\n]*))(?=\n)"""
)


def stage(folder: Path) -> int:
    """Copy this environment to a folder of every host, and print the path of the copy's Python; return an exit status.

    Collective over ``COMM_WORLD``, with at least one rank on each host. The first rank prints.

    Args:
        folder: An absolute path, on a disk of each host.
    """
    prefix, world = Path(sys.prefix), start()
    signal.signal(signal.SIGTERM, _end)
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
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGTERM)  # ending MPI would wait for the other ranks
    except Exception:
        traceback.print_exc()
        world.Abort(1)  # the other ranks would wait
    if world.rank == 0 and problem is None:
        # In one piece: launchers may mark the beginning of each piece.
        print(f"{copy / Path(sys.executable).relative_to(prefix)}\n", end="", flush=True)
    elif world.rank == 0:
        print_wrapped(f"mpitrain: the environment cannot be copied to {folder}: {problem}")
    world.Barrier()  # launchers end the other ranks when one exits with an error
    return 0 if problem is None else LaunchError.exit_status


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # launchers send it again
    raise KeyboardInterrupt


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
    for folder in (prefix / "conda-meta", *sorted(paths)):
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name == "__pycache__":
                    continue
                digest.update(os.fsencode(f"{entry.path}\n"))
                # The time of a package's folder changes when its modules are compiled.
                if not entry.is_dir(follow_symlinks=False) or entry.name.endswith((".dist-info", ".egg-info")):
                    status = entry.stat(follow_symlinks=False)
                    digest.update(f"{status.st_mtime_ns} {status.st_size}\n".encode())
    return digest.hexdigest()[:16]


def _make_parent(parent: Path) -> str | None:
    """Make the folder of this user's copies; return a problem, such as a folder that other users may change."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = parent.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            return f"{parent} must be a folder that belongs to this user, and that no other user can write"
        with _locked(parent):
            for left in parent.glob(".partial-*"):
                with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_NB):
                    shutil.rmtree(left)
        return None
    except OSError as error:
        return f"{parent}: {error.strerror}"


@contextlib.contextmanager
def _locked(folder: Path, flag: int = 0) -> Iterator[None]:
    """Lock a folder inside the block; wait for another process that has locked it, or with LOCK_NB raise OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flag)
        yield
    finally:
        os.close(descriptor)


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
    partial = copy.parent / f".partial-{secrets.token_hex(8)}"
    try:
        with contextlib.ExitStack() as lock:
            with _locked(copy.parent):
                partial.mkdir()
                lock.enter_context(_locked(partial))
            write(partial)
            try:
                partial.rename(copy)
            except OSError:
                if not copy.is_dir():  # which another job could have made meanwhile
                    raise
        return None
    except (OSError, EOFError, tarfile.TarError) as error:
        where = getattr(error, "filename2", None) or getattr(error, "filename", None) or copy.parent
        return f"{where}: {getattr(error, 'strerror', None) or one_line(error)}"
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(prefix: Path, partial: Path, copy: Path) -> None:
    """Copy the environment; its commands then start the Python of the copy."""
    scripts, copied = Path(sysconfig.get_path("scripts")), list[Future[None]]()

    def copy_file(source: Path, target: Path) -> None:
        shutil.copy2(source, target, follow_symlinks=False)
        if source.parent == scripts and not source.is_symlink():
            _let_start(target, scripts, copy / scripts.relative_to(prefix))

    def copy_folder(source: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)  # can be written, although the folder of the environment may be read-only
        with os.scandir(source) as entries:
            is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        names = set(is_folder) - {copy.parent.name}  # because the copy may be in the environment
        if source == prefix:
            names = names & _OF_VENV if "pyvenv.cfg" in names else names - _OF_OTHERS
        for name in names:
            if is_folder[name]:
                copy_folder(source / name, target / name)
            else:
                copied.append(threads.submit(copy_file, source / name, target / name))

    threads = ThreadPoolExecutor(_THREADS)
    try:
        copy_folder(prefix, partial)
        for each in copied:
            each.result()
    finally:
        threads.shutdown(cancel_futures=True)


def _let_start(script: Path, scripts: Path, copied: Path) -> None:
    """Let a script whose interpreter is in the folder ``scripts`` start with the interpreter in ``copied``."""
    with script.open("rb") as file:
        content = b"#!" + file.read() if file.read(2) == b"#!" else b""
    found = _INTERPRETER.match(content)
    if found is None:
        return
    folder, name = os.path.split(found["quoted"] or found["path"])
    if not os.path.isdir(folder) or not os.path.samefile(folder, scripts):
        return
    start, arguments = os.fsencode(copied / os.fsdecode(name)), found["arguments"] or b""
    if name.startswith(b"python"):
        start = b"/bin/sh\n'''exec' " + os.fsencode(shlex.quote(os.fsdecode(start)))
        arguments += b' "$0" "$@"\n' + b"' '''"
    mode = script.stat().st_mode
    script.chmod(mode | stat.S_IWUSR)
    script.write_bytes(b"#!" + start + arguments + content[found.end() :])
    script.chmod(mode)


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
