"""Detect the MPI implementation that mpi4py uses, and find its launcher."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ..core.words import one_line
from ..errors import LaunchError
from ..process.launcher_env import set_home
from .hydra import IntelMpi, Mpich
from .mpi_launcher import Launcher
from .open_mpi import OpenMpi

_LAUNCHER_TYPES: tuple[type[Launcher], ...] = (OpenMpi, IntelMpi, Mpich)  # Intel MPI's output also names Hydra


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
                return launcher
    raise LaunchError(
        f"{failures}mpi4py uses {library}, but no working mpirun of {library} is in {Path(sys.prefix) / 'bin'} or on "
        f"PATH; add its directory to PATH, or run pip install 'mpitrain[{flavor}]'"
    )


def library_flavor() -> tuple[str, str]:
    """Return the flavor of mpi4py's MPI library and the library's own name; does not initialize MPI.

    Raises:
        LaunchError: There is no MPI library, or an unsupported one.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # this process starts ranks, but is not a rank
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = one_line(error)
        raise LaunchError(f"no MPI library: {text}; install one with pip install 'mpitrain[openmpi]'") from error
    text = MPI.Get_library_version()
    for launcher_type in _LAUNCHER_TYPES:
        if launcher_type.mpi_version_mark in text:
            return launcher_type.flavor, launcher_type.mpi_version_mark
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
    launcher_type = next((kind for kind in _LAUNCHER_TYPES if kind.launcher_version_mark in answer), None)
    version = re.search(r"(\d+)\.\d+", answer)
    return None if launcher_type is None else launcher_type(program, int(version[1]) if version else 0)
