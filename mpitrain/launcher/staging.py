"""``--stage-env``: ranks start from copies of the Python environment, made by ``program.staging``."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..batch_systems.registry import allocated_hosts
from ..core.openblas import without_chosen
from ..errors import ConfigError, LaunchError
from .command_line import Command, compose
from .hosts import Host
from .interrupts import Interrupts
from .mpi_launcher import Launcher, LaunchSpec, LocalMachine
from .terminal import say

_POLL_S = 0.2


def staging_command(launcher: Launcher, machine: LocalMachine, spec: LaunchSpec, folder: Path) -> Command:
    """Return the command that copies the environment to the hosts of ``spec``, with one process for each host.

    Raises:
        ConfigError: The hosts of the allocation are not known.
    """
    hosts = spec.hosts
    if hosts is None and machine.allocated:
        hosts = [Host(*host) for host in allocated_hosts(machine.environ)]
        if not hosts:
            raise ConfigError("--stage-env requires --hosts or --hostfile, or an allocation of Slurm")
    one_each = None if hosts is None else [host._replace(slots=1) for host in hosts]
    spec = replace(spec, ranks=1 if one_each is None else len(one_each), hosts=one_each)
    return compose(launcher, spec, machine, [str(folder.absolute())], "stage")


class Staging:
    """Copies the environment to the hosts of a run.

    Args:
        folder: The value of ``--stage-env``; None if ranks start from the environment itself.
    """

    def __init__(self, launcher: Launcher, machine: LocalMachine, folder: Path | None, interrupts: Interrupts) -> None:
        self._launcher, self._machine, self._folder, self._interrupts = launcher, machine, folder, interrupts
        self._python = ""
        self._have_copies: set[str] = set()

    def forget(self, hosts: Iterable[str]) -> None:
        """Declare that these hosts may have lost their copies."""
        self._have_copies -= set(hosts)

    def from_copies(self, spec: LaunchSpec) -> LaunchSpec:
        """Make the copies that hosts of ``spec`` lack; return the spec of ranks that start from the copies.

        Raises:
            LaunchError: A host cannot have a copy, or a signal has ended the copying.
        """
        if self._folder is None:
            return spec
        names = {host.name for host in spec.hosts or ()}
        if not self._python or not names <= self._have_copies:
            command = staging_command(self._launcher, self._machine, spec, self._folder)
            began = time.monotonic()
            first, self._python = not self._python, self._stage(command)
            self._have_copies |= names
            if first:
                _describe(self._python, time.monotonic() - began)
        path = spec.env.get("PATH", self._machine.environ.get("PATH", os.defpath))
        copy = str(Path(self._python).parents[len(Path(sys.executable).relative_to(sys.prefix).parts) - 1])
        environment = {"PATH": f"{Path(self._python).parent}:{path}"}
        environment |= {name: copy for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if name in self._machine.environ}
        return replace(spec, python=self._python, env={**spec.env, **environment})

    def _stage(self, command: Command) -> str:
        """Copy the environment; return the path of the Python of the copies."""
        environment = without_chosen(os.environ) | command.environment
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command.words, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        ) as process:
            while True:
                try:
                    out, errors = process.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if self._interrupts.received:
                        process.terminate()
        if self._interrupts.received:
            raise LaunchError("ended by a signal while the Python environment was copied")
        pythons = [line for line in out.splitlines() if line.startswith(f"{self._folder_path}/")]
        if process.returncode or not pythons:
            messages = [
                line.removeprefix("mpitrain: ") for line in errors.splitlines() if line.startswith("mpitrain: ")
            ]
            raise LaunchError(f"--stage-env: {messages[0] if messages else errors.strip() or 'no answer of the hosts'}")
        return pythons[-1]

    @property
    def _folder_path(self) -> Path:
        assert self._folder is not None
        return self._folder.absolute()


def _describe(python: str, seconds: float) -> None:
    """Print where the copy is, and which packages are not part of it."""
    packages = Path(sysconfig.get_path("purelib"))
    editable = sorted(
        {
            path.name.removeprefix("__editable__").strip("_.").partition("-")[0].partition("_finder")[0]
            for path in packages.glob("__editable__*")
        }
    )
    stay = f"; installed in editable mode, so not copied: {', '.join(editable)}" if editable else ""
    say(f"the ranks start from {python}, after {seconds:.1f} s{stay}")
