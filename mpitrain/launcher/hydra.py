"""Hydra, the launcher of MPICH and of Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..process.launcher_env import UCX_LOG_LEVEL
from ..process.network import interface_of
from .mpi_launcher import Arguments, Launcher, LaunchSpec, LocalMachine, binds_itself, is_oversubscribed


@dataclass(frozen=True)
class Mpich(Launcher):
    """The ``mpirun`` of MPICH.

    Attributes:
        start_arguments_variable: The variable with arguments for the command that starts daemons.
    """

    flavor = "mpich"
    mpi_version_mark, launcher_version_mark = "MPICH", "HYDRA"
    agent_takes_arguments = False
    start_arguments_variable: ClassVar[str] = "HYDRA_LAUNCHER_EXTRA_ARGS"

    def arguments(self, spec: LaunchSpec, machine: LocalMachine) -> Arguments:
        words = _words(spec, machine, "launcher")
        fits = spec.hosts is None and spec.ranks is not None and spec.ranks <= machine.cores
        fits = fits and not spec.may_spawn  # if a bound rank starts processes by MPI, the launcher ends with an error
        if fits and not machine.allocated and not binds_itself(spec, machine):
            words += ["-bind-to", f"core:{machine.cores // (spec.ranks or 1)}"]
        return Arguments(words, _environment())

    def restart_arguments(self, start_arguments: str, environ: Mapping[str, str]) -> Arguments:
        if any(environ.get(name, "slurm") != "slurm" for name in ("HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP")):
            return Arguments([], {})
        # Some versions of Slurm set the variable in every allocation.
        value = f"{environ.get(self.start_arguments_variable, '')} {start_arguments}".strip()
        return Arguments([], {self.start_arguments_variable: value})

    def network_argument(self, network: str) -> str:
        return interface_of(network)


@dataclass(frozen=True)
class IntelMpi(Mpich):
    """``mpiexec.hydra`` of Intel MPI; ``mpirun`` is a shell script that ends on signals and does not forward them."""

    flavor = "intel"
    mpi_version_mark = launcher_version_mark = "Intel(R) MPI"
    start_arguments_variable = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"

    def __post_init__(self) -> None:
        program = Path(self.program).with_name("mpiexec.hydra")
        if program.is_file():
            object.__setattr__(self, "program", str(program))

    def arguments(self, spec: LaunchSpec, machine: LocalMachine) -> Arguments:
        environment, folder = _environment(), str(Path(self.program).parent)
        if folder not in machine.environ.get("PATH", "").split(":"):
            # The launcher finds its helpers on PATH.
            environment["PATH"] = f"{folder}:{machine.environ.get('PATH', '')}"
        if spec.hosts is None and is_oversubscribed(spec, machine) and not binds_itself(spec, machine):
            environment["I_MPI_PIN"] = "0"
        return Arguments(_words(spec, machine, "bootstrap"), environment)


def _words(spec: LaunchSpec, machine: LocalMachine, option: str) -> list[str]:
    """Return the arguments for hosts, the remote agent and the network.

    Args:
        option: The name of the option for the remote agent.
    """
    words = [f"-{option}", "fork"] if machine.ignores_allocation else []
    if spec.hosts is not None:
        words += ["-hosts", ",".join(map(str, spec.hosts))]
    if spec.agent is not None:
        words += [f"-{option}", "ssh", f"-{option}-exec", spec.agent]
    if spec.network is not None:
        words += ["-iface", spec.network]
    return words


def _environment() -> dict[str, str]:
    return {UCX_LOG_LEVEL: "error"}  # silences warnings about memory pools at exit
