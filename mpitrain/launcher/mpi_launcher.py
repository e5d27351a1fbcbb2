"""The ranks to start, the machine, and the interface of the launchers of MPI libraries."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ..batch_systems.registry import allocation
from ..core.cpus import usable_cores
from ..core.openblas import without_chosen
from .hosts import Host

# Launcher arguments and variables by which users choose process placement or binding themselves.
_BINDING_WORDS = ("bind-to", "map-by", "rank-by", "cpu-set", "cpu-list", "rankfile", "rf", "binding", "cpu-bind", "ppn")
_BINDING_VARIABLES = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
    "HYDRA_BINDING",
    "HYDRA_BIND",
    "I_MPI_PIN",
    "I_MPI_PIN_DOMAIN",
    "I_MPI_PIN_PROCESSOR_LIST",
)


# Launcher arguments by which users choose themselves where output goes, and how it is marked.
_OUTPUT_WORDS = (
    "output output-filename tag-output timestamp-output merge-stderr-to-stdout xterm stdin l prepend-rank "
    "prepend-pattern outfile-pattern errfile-pattern s ordered-output"
).split()


@dataclass(frozen=True)
class LaunchSpec:
    """The user's requests to the launcher.

    Attributes:
        ranks: Number of ranks; None for as many as the launcher has slots for in an allocation.
        hosts: Hosts and their numbers of ranks; None for the launcher's default: the allocation's hosts, or this host.
        agent: Program that starts processes on other hosts; None for ``ssh``, or the program that the environment
            names.
        network: Network between the hosts, as ``10.1.0.0/16`` or an interface name; None for the launcher's choice.
        env: Variables for the ranks.
        words: Extra arguments for the launcher.
        spares: Hosts without ranks, which can replace others.
        may_spawn: Whether ranks may start further processes by MPI, which need cores that no rank is bound to.
        python: The Python that starts the ranks.
    """

    ranks: int | None
    hosts: Sequence[Host] | None = None
    agent: str | None = None
    network: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    spares: Sequence[Host] = ()
    may_spawn: bool = False
    python: str = sys.executable


@dataclass(frozen=True)
class LocalMachine:
    """The properties of this machine that the command depends on.

    Attributes:
        cores: Number of cores that this process may use.
        root: Whether this process runs as the superuser.
        environ: The environment of this process, without the variables that this package has set.
        ignores_allocation: Whether ranks start on this host although the environment describes an allocation.
    """

    cores: int
    root: bool
    environ: Mapping[str, str]
    ignores_allocation: bool = False

    @classmethod
    def detect(cls) -> LocalMachine:
        """Return the machine that this process runs on."""
        return cls(len(usable_cores()), os.geteuid() == 0, without_chosen(os.environ))

    @property
    def allocated(self) -> bool:
        """Whether a scheduler's allocation determines the placement of ranks."""
        return not self.ignores_allocation and allocation(self.environ) is not None


class Arguments(NamedTuple):
    """The arguments and variables with which a launcher is started.

    Attributes:
        words: The launcher's arguments, except ``-n`` and the program.
        environment: Variables to set, unless the user has set them.
    """

    words: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Launcher(ABC):
    """An ``mpirun`` program; a subclass for each MPI library.

    Attributes:
        program: The path of the program.
        major: The major version of the library.
        flavor: The name of the MPI library, as in ``pip install 'mpitrain[FLAVOR]'``.
        mpi_version_mark: Part of the text that ``MPI_Get_library_version`` returns.
        launcher_version_mark: Part of the text that ``mpirun --version`` prints.
        oversubscribe_word: The argument by which ranks may exceed the tasks of an allocation; empty if none is needed.
        agent_takes_arguments: Whether the program that starts processes on other hosts may have arguments.
    """

    program: str
    major: int = 0

    flavor: ClassVar[str]
    mpi_version_mark: ClassVar[str]
    launcher_version_mark: ClassVar[str]
    oversubscribe_word: ClassVar[str] = ""
    agent_takes_arguments: ClassVar[bool] = True

    @abstractmethod
    def arguments(self, spec: LaunchSpec, machine: LocalMachine) -> Arguments:
        """Return the arguments that start the ranks of ``spec``."""

    @abstractmethod
    def restart_arguments(self, start_arguments: str, environ: Mapping[str, str]) -> Arguments:
        """Return the further arguments of a restart in an allocation, and variables that replace those in ``environ``.

        Args:
            start_arguments: Arguments for the command that starts the launcher's daemons in the allocation, such as
                ``srun``.
        """

    def protected(self, words: list[str]) -> list[str]:
        """Return the command of a rank such that the launcher does not change its arguments."""
        return words

    def network_argument(self, network: str) -> str:
        """Return the value of ``--network`` as the launcher expects it.

        Raises:
            LaunchError: No interface of this host is in the network.
        """
        return network


def is_oversubscribed(spec: LaunchSpec, machine: LocalMachine) -> bool:
    """Return whether ranks share cores, assuming that other hosts have as many cores as this one."""
    slots = max((host.slots for host in spec.hosts), default=0) if spec.hosts is not None else spec.ranks or 0
    return slots > machine.cores


def binds_itself(spec: LaunchSpec, machine: LocalMachine) -> bool:
    """Return whether the user chose the binding or placement of ranks."""
    return _has_option(spec, _BINDING_WORDS) or any(name in machine.environ for name in _BINDING_VARIABLES)


def leaves_cores(spec: LaunchSpec, machine: LocalMachine) -> bool:
    """Return whether ranks must not be bound, so that there are cores for the processes that they may start."""
    return spec.may_spawn and spec.ranks is not None and spec.ranks < machine.cores


def chooses_output(spec: LaunchSpec) -> bool:
    """Return whether the user chose how the launcher passes on input and output of ranks."""
    return _has_option(spec, _OUTPUT_WORDS)


def _has_option(spec: LaunchSpec, names: Sequence[str]) -> bool:
    return any(word.startswith("-") and word.lstrip("-").split("=")[0] in names for word in spec.words)
