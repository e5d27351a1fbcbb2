"""Compose the launcher's command line: a pure function of the launch spec and the local machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..batch_systems.registry import restart_arguments
from ..process import fork_server
from .mpi_launcher import Launcher, LaunchSpec, LocalMachine


@dataclass(frozen=True)
class Command:
    """A command to run.

    Attributes:
        words: Program and arguments.
        environment: Variables to set in addition to the environment of this process.
    """

    words: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """Return the command, quoted for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join(["env", *settings, shlex.join(self.words)] if settings else [shlex.join(self.words)])


def compose(
    launcher: Launcher,
    spec: LaunchSpec,
    machine: LocalMachine,
    arguments: Sequence[str],
    command: str = "train",
    is_restart: bool = False,
    forks: bool = False,
) -> Command:
    """Return the command line that starts the ranks, each of which runs ``mpitrain COMMAND ARGUMENTS``.

    Settings in the user's environment or in ``spec.words`` take precedence.

    Args:
        forks: Whether fork servers start the ranks, where there are some.
    """
    words, environment = launcher.arguments(spec, machine)
    # Include variables that this package set in this process: a shell into which a user pastes the command lacks them.
    ours = {n: value for n, value in environment.items() if n == "PATH" or machine.environ.get(n, value) == value}
    if is_restart and spec.agent is None and (start_arguments := restart_arguments(machine.environ)):
        more = launcher.restart_arguments(start_arguments, machine.environ)
        words, ours = words + more.words, ours | more.environment
    start = [launcher.program, *(["-n", str(spec.ranks)] if spec.ranks is not None else [])]
    start_rank = ["-S", "-E", fork_server.__file__] if forks else ["-m", "mpitrain"]
    rank = launcher.protected([spec.python, *start_rank, command, *arguments])
    return Command([*start, *words, *spec.words, *rank], {**ours, **spec.env})
