"""Compose the launcher's command line: a pure function of the launch spec and the local machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..batch_systems.registry import is_allocation, restart_arguments
from ..core.openblas import without_chosen
from ..process import fork_server
from .hosts import Host
from .mpi_flavors import Launcher

# Variables to forward to ranks on other hosts if set: Open MPI forwards only its own.
_PASSED = (
    "MPITRAIN_",
    "PYTHON",
    "OMP_",
    "OPENBLAS_",
    "MKL_",
    "NUMBA_",
    "HDF5_",
    "HOROVOD_",
    "CUDA_",
    "CUPY_",
    "NCCL_",
    "UCX_",
)
_PASSED_NAMES = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "TZ")
# Valid on this host only.
_NOT_PASSED = ("MPITRAIN_TERMINAL_COLUMNS",)

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


@dataclass(frozen=True)
class LaunchSpec:
    """What the user requested from the launcher.

    Attributes:
        ranks: Number of ranks; None for as many as the launcher has slots for in an allocation.
        hosts: Hosts and their numbers of ranks; None for the launcher's default: the allocation's hosts, or this one.
        agent: Program that starts processes on other hosts; None for ``ssh``, or the user's environment.
        network: Network between the hosts, as ``10.1.0.0/16`` or an interface name; None for the launcher's choice.
        env: Variables for the ranks.
        words: Extra arguments for the launcher.
    """

    ranks: int | None
    hosts: Sequence[Host] | None = None
    agent: str | None = None
    network: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()


@dataclass(frozen=True)
class LocalMachine:
    """The properties of this machine that the command depends on.

    Attributes:
        cores: Number of cores that this process may use.
        root: Whether this process runs as the superuser.
        environ: The environment of this process, without the variables that this package has set.
    """

    cores: int
    root: bool
    environ: Mapping[str, str]

    @classmethod
    def detect(cls) -> LocalMachine:
        """Return the machine that this process runs on."""
        return cls(len(os.sched_getaffinity(0)), os.geteuid() == 0, without_chosen(os.environ))

    @property
    def allocated(self) -> bool:
        """Whether a scheduler's allocation determines the placement of ranks."""
        return is_allocation(self.environ)


@dataclass(frozen=True)
class Command:
    """A command to run.

    Attributes:
        words: Program and arguments.
        environment: Variables to set in addition to those of this process.
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
) -> Command:
    """Return the command line that starts the ranks, each of which runs ``mpitrain COMMAND ARGUMENTS``.

    Settings in the user's environment or in ``spec.words`` take precedence. After a restart, the fork server of each
    host starts the ranks.
    """
    parts = _open_mpi(launcher, spec, machine) if launcher.flavor == "openmpi" else _hydra(launcher, spec, machine)
    words, environment = parts
    if is_restart and (arguments_of_srun := restart_arguments(machine.environ)):
        if launcher.flavor == "openmpi":
            words += ["--prtemca" if launcher.major >= 5 else "--mca", "plm_slurm_args", arguments_of_srun]
        else:
            environment["HYDRA_LAUNCHER_EXTRA_ARGS"] = arguments_of_srun
    # Include variables that this package set in this process: the shell that the command is pasted into lacks them.
    ours = {n: value for n, value in environment.items() if n == "PATH" or machine.environ.get(n, value) == value}
    start = [launcher.program, *(["-n", str(spec.ranks)] if spec.ranks is not None else [])]
    start_rank = ["-S", "-E", fork_server.__file__] if is_restart and command == "train" else ["-m", "mpitrain"]
    rank = [sys.executable, *start_rank, command, *arguments]
    return Command([*start, *words, *spec.words, *rank], {**ours, **spec.env})


def _open_mpi(launcher: Launcher, spec: LaunchSpec, machine: LocalMachine) -> tuple[list[str], dict[str, str]]:
    environment = {"OMPI_MCA_osc": "^ucx"}  # warns on machines without a UCX device
    if launcher.major == 4:
        environment["OMPI_MCA_btl_base_warn_component_unused"] = "0"
    if machine.root:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if _is_oversubscribed(spec, machine):
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    words = []
    if spec.hosts is not None:
        words += ["--host", ",".join(map(str, spec.hosts))]
    words += _open_mpi_binding(spec, machine)
    if spec.agent is not None:
        words += ["--prtemca", "plm_ssh_agent"] if launcher.major >= 5 else ["--mca", "plm_rsh_agent"]
        words += [spec.agent]
    if spec.network is not None:
        daemons = ["--prtemca", "prte_if_include"] if launcher.major >= 5 else ["--mca", "oob_tcp_if_include"]
        words += [*daemons, spec.network, "--mca", "btl_tcp_if_include", spec.network]
    if spec.hosts is not None or machine.allocated:
        known = {**machine.environ, **environment, **spec.env}
        for name in sorted(name for name in known if name in spec.env or _passed(name)):
            words += ["-x", name]
    return words, environment


def _open_mpi_binding(spec: LaunchSpec, machine: LocalMachine) -> list[str]:
    if _binds_itself(spec, machine):
        return []
    if spec.hosts is not None or spec.ranks is None or machine.allocated:
        return ["--bind-to", "none"]  # remote core counts are unknown; ranks of a node share cores by thread count
    if spec.ranks > machine.cores:
        return ["--oversubscribe", "--bind-to", "none"]
    return ["--map-by", f"slot:PE={machine.cores // spec.ranks}", "--bind-to", "core"]


def _hydra(launcher: Launcher, spec: LaunchSpec, machine: LocalMachine) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and variables for MPICH and Intel MPI."""
    intel = launcher.flavor == "intel"
    environment: dict[str, str] = {"UCX_LOG_LEVEL": "error"}  # silences warnings about memory pools at exit
    folder = str(Path(launcher.program).parent)
    if intel and folder not in machine.environ.get("PATH", "").split(":"):
        environment["PATH"] = f"{folder}:{machine.environ.get('PATH', '')}"  # its mpirun finds its helpers on PATH
    words = []
    if spec.hosts is not None:
        words += ["-hosts", ",".join(map(str, spec.hosts))]
    elif spec.ranks is not None and spec.ranks <= machine.cores and not intel and not machine.allocated:
        words += [] if _binds_itself(spec, machine) else ["-bind-to", f"core:{machine.cores // spec.ranks}"]
    elif intel and _is_oversubscribed(spec, machine) and not _binds_itself(spec, machine):
        environment["I_MPI_PIN"] = "0"
    if spec.agent is not None:
        words += ["-bootstrap", "ssh", "-bootstrap-exec"] if intel else ["-launcher", "ssh", "-launcher-exec"]
        words += [spec.agent]
    if spec.network is not None:
        words += ["-iface", spec.network]
    return words, environment


def _is_oversubscribed(spec: LaunchSpec, machine: LocalMachine) -> bool:
    """Return whether ranks share cores, assuming that other hosts have as many cores as this one."""
    slots = max((host.slots for host in spec.hosts), default=0) if spec.hosts is not None else spec.ranks or 0
    return slots > machine.cores


def _binds_itself(spec: LaunchSpec, machine: LocalMachine) -> bool:
    """Return whether the user chose the binding or placement of ranks."""
    options = {word.lstrip("-").split("=")[0] for word in spec.words if word.startswith("-")}
    return not options.isdisjoint(_BINDING_WORDS) or any(name in machine.environ for name in _BINDING_VARIABLES)


def _passed(name: str) -> bool:
    return name not in _NOT_PASSED and (name in _PASSED_NAMES or name.startswith((*_PASSED, "OMPI_MCA_")))
