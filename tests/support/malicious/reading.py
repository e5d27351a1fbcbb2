"""Reads malicious checkpoints, each in a forked process with limited memory and time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import h5py
import ml_dtypes  # noqa: F401  imported before memory is limited
import numpy as np
import safetensors.numpy  # noqa: F401

from mpitrain import checkpoint
from mpitrain.checkpoint.export import export
from mpitrain.checkpoint.summary import describe, differences
from mpitrain.errors import CheckpointError

from ..damage import LAYOUT, NAMES
from .shards import MAX_FILES

SECRET = b"the content of a secret file " * 8
MEMORY_BYTES, TIME_S = 500 << 20, 5


def read_all(path: Path) -> dict[str, str]:
    """Perform all actions that read a checkpoint; return the errors by action."""
    errors: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except CheckpointError as error:
            errors[name] = str(error)

    out = path.parent / "out"

    def inspect(opened: checkpoint.Checkpoint) -> None:
        attempt("verify", lambda: (opened.verify_structure(), opened.verify()))
        attempt("inspect", lambda: [*describe(opened)])
        attempt("diff", lambda: [*differences(opened, opened)])
        for to in ("npz", "safetensors"):
            attempt(f"export {to}", lambda to=to: export(opened, out, to))  # type: ignore[misc]
            attempt(f"export {to} averages", lambda to=to: export(opened, out, to, None, True))  # type: ignore[misc]
            if out.exists():
                assert SECRET[:29] not in out.read_bytes() and b"root:" not in out.read_bytes(), "a secret was exported"
                out.unlink()

    attempt("verify", lambda: _with(path, inspect))
    vectors = {name: np.zeros(LAYOUT.size, np.float32) for name in NAMES}
    attempt("resume", lambda: checkpoint.read(path, LAYOUT, vectors, 0))
    attempt("init", lambda: checkpoint.load_matching(path, LAYOUT, vectors["params"]))
    assert not any(SECRET[:29] in vector.tobytes() for vector in vectors.values()), "a secret was read"
    return errors


def _with(path: Path, action: Callable[[checkpoint.Checkpoint], object]) -> None:
    with checkpoint.Checkpoint(path) as opened:
        action(opened)


def read_with_hdf5(path: Path) -> str:
    """Compare the values of a checkpoint that ``verify`` accepts with those that the HDF5 library reads."""
    with checkpoint.Checkpoint(path) as opened, h5py.File(path) as file:
        for name in opened.datasets:
            assert opened.read(name).tobytes() == file[name][()].tobytes(), f"{name} has other values for HDF5"
    return "equal"


def run_forked(words: list[str], *, stdin: IO[bytes], stdout: IO[bytes], **_: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -c CODE`` in a forked process, because a new one would import modules for most of its time."""
    child = os.fork()
    if not child:
        try:
            os.dup2(stdin.fileno(), 0)
            os.dup2(stdout.fileno(), 1)
            exec(words[2], {})
            os._exit(0)
        finally:
            os._exit(1)
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def check(path: Path, secret: Path) -> str:
    """Read a checkpoint; return ``accepted`` or ``refused``. Fails if reading does harm or an error is not one line."""
    subprocess.run = run_forked  # type: ignore[assignment]
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(os.fsdecode(args[0])) if _opens(event, args) else None)
    errors = read_all(path)
    inside = {Path(file).name for file in opened if file.startswith(str(secret.parent))}
    assert all(name.startswith(("step-", "out", path.parent.name)) for name in inside), f"opened {inside}"
    assert "/etc/passwd" not in opened
    for error in errors.values():
        assert str(path.parent) in error and error.isprintable(), f"not one line with the file's name: {error!r}"
    assert "verify" in errors or "diff" not in errors, "both read all values, but verify accepts the file"
    return "refused" if "verify" in errors else "accepted"


def _opens(event: str, args: tuple[Any, ...]) -> bool:
    return event == "open" and isinstance(args[0], (str, bytes, os.PathLike))


class Outcome(NamedTuple):
    """The result of an action, or its error; its CPU time in seconds, and the peak memory of its process in bytes."""

    result: str
    seconds: float
    peak_bytes: int


def in_child(action: Callable[[], str]) -> Outcome:
    """Run an action in a forked process with limited memory and time."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.close(receive)
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES,) * 2)
            signal.setitimer(signal.ITIMER_PROF, TIME_S)  # CPU time, as other processes may keep the cores busy
            signal.alarm(30 * TIME_S)
            result = action()
        except BaseException as error:
            result = f"FAILED {type(error).__name__}: {error}"[:1000]
        os.write(send, result.encode("utf-8", "replace"))
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        result = pipe.read().decode()
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status):
        result = f"FAILED with signal {os.WTERMSIG(status)}"
    return Outcome(result, usage.ru_utime + usage.ru_stime, usage.ru_maxrss << 10)
