"""``--stage-env``: ranks start from copies of the Python environment, made by ``program.staging``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..batch_systems.registry import allocated_hosts
from ..core.activity import LONG_LIMIT_S
from ..core.openblas import without_chosen
from ..errors import LaunchError
from .command_line import Command, compose
from .hosts import Host
from .interrupts import Interrupts
from .launcher_process import begin_session
from .mpi_launcher import Launcher, LaunchSpec, LocalMachine, binds_itself
from .terminal import say

_POLL_S = 0.2


def staging_command(
    launcher: Launcher, machine: LocalMachine, spec: LaunchSpec, folder: Path, is_restart: bool = False
) -> Command:
    """Return the command that copies the environment to the hosts of ``spec``, with one process for each host.

    If the user has chosen how ranks are placed, or the hosts are not known, it starts as many processes as ranks.
    """
    hosts = spec.hosts
    if hosts is None and machine.allocated:
        hosts = [Host(*host) for host in allocated_hosts(machine.environ)]
    if hosts and not binds_itself(spec, machine):
        spec = replace(spec, ranks=len(hosts), hosts=[host._replace(slots=1) for host in hosts])
    elif hosts is None:  # this host
        spec = replace(spec, ranks=1)
    return compose(launcher, spec, machine, [str(folder)], "stage", is_restart)


class Staging:
    """Copies the environment to the hosts of a run.

    Args:
        folder: The value of ``--stage-env``.
    """

    def __init__(self, launcher: Launcher, machine: LocalMachine, folder: Path, interrupts: Interrupts) -> None:
        self._launcher, self._machine, self._folder, self._interrupts = launcher, machine, folder, interrupts
        self._python: Path | None = None
        self._have_copies: set[str] = set()

    def forget(self, hosts: Iterable[str]) -> None:
        """Declare that these hosts may have lost their copies."""
        self._have_copies -= set(hosts)

    def from_copies(self, spec: LaunchSpec, is_restart: bool) -> LaunchSpec:
        """Make the copies that hosts of ``spec`` lack; return the spec of ranks that start from the copies.

        Raises:
            LaunchError: A host cannot have a copy, or a signal has ended the copying.
        """
        names = {host.name for host in spec.hosts or ()}
        if self._python is None or not names <= self._have_copies:
            began, is_first = time.monotonic(), self._python is None
            self._python = self._stage(staging_command(self._launcher, self._machine, spec, self._folder, is_restart))
            self._have_copies |= names
            if is_first:
                _describe(self._python, time.monotonic() - began)
        known = {**self._machine.environ, **spec.env}
        environment = {"PATH": f"{self._python.parent}:{known.get('PATH', os.defpath)}"}
        copy = self._python.parents[len(Path(sys.executable).relative_to(sys.prefix).parts) - 1]
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
            if name in known and os.path.isdir(known[name]) and os.path.samefile(known[name], sys.prefix):
                environment[name] = str(copy)
        return replace(spec, python=str(self._python), env={**spec.env, **environment})

    def in_copy(self, word: str) -> str:
        """Return a word of a program's command line; a command of the environment becomes that of the copy."""
        folder, name = os.path.split(word)
        if self._python is None or not os.path.isdir(folder) or not name:
            return word
        return str(self._python.parent / name) if os.path.samefile(folder, Path(sys.executable).parent) else word

    def _stage(self, command: Command) -> Path:
        """Copy the environment; return the path of the Python of the copies."""
        environment = without_chosen(os.environ) | command.environment
        null, pipe, deadline = subprocess.DEVNULL, subprocess.PIPE, time.monotonic() + LONG_LIMIT_S
        with subprocess.Popen(
            command.words, env=environment, stdin=null, stdout=pipe, stderr=pipe, text=True, preexec_fn=begin_session
        ) as process:
            while True:
                try:
                    out, errors = process.communicate(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    if self._interrupts.received or time.monotonic() > deadline:
                        os.killpg(process.pid, signal.SIGKILL if len(self._interrupts.received) > 1 else signal.SIGTERM)
        # --launcher-args may let the launcher begin each line with a rank, or write no line at all.
        pythons = re.findall(f"{re.escape(str(self._folder / 'mpitrain-'))}.*", out)
        if self._interrupts.received or process.returncode or not pythons:
            lines = [line for line in errors.splitlines() if line.strip()]
            ours = [line.partition("mpitrain: ")[2] for line in lines if "mpitrain: " in line]
            nothing = f"{Path(command.words[0]).name} has not printed where the copy is; see --launcher-args"
            raise LaunchError(f"--stage-env: {[nothing, *lines[-1:], *ours[:1]][-1]}")
        return Path(pythons[-1])


def _describe(python: Path, seconds: float) -> None:
    """Print where the copy is, and which packages are not part of it."""
    editable = []
    for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info/direct_url.json"):
        with contextlib.suppress(OSError, ValueError):  # PEP 610
            if json.loads(path.read_text(encoding="utf-8")).get("dir_info", {}).get("editable"):
                editable.append(path.parent.name.partition("-")[0])
    stay = f"; installed in editable mode, so not copied: {', '.join(sorted(editable))}" if editable else ""
    say(f"the ranks start from {python}, after {seconds:.1f} s{stay}")
