"""The launcher's command line: a pure function of what the user asked for and of the machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core import openblas as blas
from .hosts import Host
from .mpi_flavors import Launcher

# Variables that ranks on other hosts get, where they are set: Open MPI passes on none but its own.
_PASSED = ("MPITRAIN_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "NUMBA_", "HDF5_", "CUDA_", "CUPY_", "NCCL_", "UCX_")
_PASSED_NAMES = ("LD_LIBRARY_PATH", "VIRTUAL_ENV", "TZ")
# What only this host's processes can use.
_NOT_PASSED = ("MPITRAIN_TERMINAL_COLUMNS",)

_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID")

# Words and variables with which users say themselves where ranks go and what they are bound to.
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
    """What the user asks of the launcher.

    Attributes:
        ranks: To start; None for as many as the launcher finds room for, in an allocation.
        hosts: Where, and how many on each; None for where the launcher finds them: an allocation's hosts, or this one.
        agent: Starts processes on other hosts; None for ``ssh``, or what the user's environment says.
        network: Of the hosts, as ``10.1.0.0/16`` or an interface's name; None for the launcher's choice.
        env: Variables for the ranks.
        words: Further words for the launcher.
    """

    ranks: int | None
    hosts: Sequence[Host] | None = None
    agent: str | None = None
    network: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()


@dataclass(frozen=True)
class LocalMachine:
    """What the command depends on beside the wish.

    Attributes:
        cores: That this process may use.
        root: Whether this is the superuser.
        environ: Of this process.
    """

    cores: int
    root: bool
    environ: Mapping[str, str]

    @classmethod
    def here(cls) -> LocalMachine:
        """The machine that this process runs on."""
        return cls(len(os.sched_getaffinity(0)), os.geteuid() == 0, os.environ)

    @property
    def allocated(self) -> bool:
        """Whether a scheduler's allocation says where ranks go."""
        return any(name in self.environ for name in _ALLOCATIONS)


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


def compose(
    launcher: Launcher, spec: LaunchSpec, machine: LocalMachine, arguments: Sequence[str], command: str = "train"
) -> Command:
    """The command line that starts the ranks of ``mpitrain COMMAND ARGUMENTS``.

    What the user has set in the environment, or says in ``spec.words``, is left as it is.
    """
    parts = _open_mpi(launcher, spec, machine) if launcher.flavor == "openmpi" else _hydra(launcher, spec, machine)
    words, environment = parts
    # Some may be set already, by this package in this process, and are not where the command is pasted.
    ours = {n: value for n, value in environment.items() if n == "PATH" or machine.environ.get(n, value) == value}
    start = [launcher.program, *(["-n", str(spec.ranks)] if spec.ranks is not None else [])]
    rank = [sys.executable, "-m", "mpitrain", command, *arguments]
    return Command([*start, *words, *spec.words, *rank], {**ours, **spec.env})


def _open_mpi(launcher: Launcher, spec: LaunchSpec, machine: LocalMachine) -> tuple[list[str], dict[str, str]]:
    environment = {"OMPI_MCA_osc": "^ucx"}  # complains where there is no such device
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
        for name in sorted(name for name in known if name in spec.env or _passed(name, known[name])):
            words += ["-x", name]
    return words, environment


def _open_mpi_binding(spec: LaunchSpec, machine: LocalMachine) -> list[str]:
    if _binds_itself(spec, machine):
        return []
    if spec.hosts is not None or spec.ranks is None or machine.allocated:
        return ["--bind-to", "none"]  # their cores are not known here; each node's ranks share them by their threads
    if spec.ranks > machine.cores:
        return ["--oversubscribe", "--bind-to", "none"]
    return ["--map-by", f"slot:PE={machine.cores // spec.ranks}", "--bind-to", "core"]


def _hydra(launcher: Launcher, spec: LaunchSpec, machine: LocalMachine) -> tuple[list[str], dict[str, str]]:
    """MPICH's and Intel MPI's."""
    intel = launcher.flavor == "intel"
    environment: dict[str, str] = {"UCX_LOG_LEVEL": "error"}  # memory pools, at the end
    folder = str(Path(launcher.program).parent)
    if intel and folder not in machine.environ.get("PATH", "").split(":"):
        environment["PATH"] = f"{folder}:{machine.environ.get('PATH', '')}"  # its mpirun looks for its parts there
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
    """Whether ranks share cores; other hosts are taken to have as many as this one."""
    here = max((host.slots for host in spec.hosts), default=0) if spec.hosts is not None else spec.ranks or 0
    return here > machine.cores


def _binds_itself(spec: LaunchSpec, machine: LocalMachine) -> bool:
    """Whether the user has said what ranks are bound to, or where they go."""
    said = {word.lstrip("-").split("=")[0] for word in spec.words if word.startswith("-")}
    return not said.isdisjoint(_BINDING_WORDS) or any(name in machine.environ for name in _BINDING_VARIABLES)


def _passed(name: str, value: str) -> bool:
    if name in _NOT_PASSED or blas.CHOSEN.get(name) == value:
        return False
    return name in _PASSED_NAMES or name.startswith((*_PASSED, "OMPI_MCA_"))
