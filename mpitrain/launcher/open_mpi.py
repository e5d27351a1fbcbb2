"""Open MPI's ``mpirun``, versions 4 and 5."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from .mpi_launcher import Arguments, Launcher, LaunchSpec, LocalMachine, binds_itself, is_oversubscribed, leaves_cores

# Prefixes of variables to forward to ranks on other hosts: Open MPI itself forwards only its own variables.
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
# Options that mpirun changes, or finds twice, even among the arguments of a program (seen in version 5.0.11).
_CHANGED = tuple(f"--{name}" for name in "map-by mapby rank-by rankby bind-to bindto runtime-options rtos".split())
# Variables that are valid on this host only.
_NOT_PASSED = ("MPITRAIN_TERMINAL_COLUMNS",)


@dataclass(frozen=True)
class OpenMpi(Launcher):
    """The ``mpirun`` of Open MPI; some options differ between the versions 4 and 5."""

    flavor = "openmpi"
    mpi_version_mark = launcher_version_mark = "Open MPI"
    oversubscribe_word = "--oversubscribe"

    def arguments(self, spec: LaunchSpec, machine: LocalMachine) -> Arguments:
        environment = {"OMPI_MCA_osc": "^ucx"}  # the component ``ucx`` prints a warning on hosts without a UCX device
        if self.major == 4:
            environment["OMPI_MCA_btl_base_warn_component_unused"] = "0"
        if machine.root:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if machine.ignores_allocation:
            project = "PRTE" if self.major >= 5 else "OMPI"
            environment |= {f"{project}_MCA_ras": "^slurm", f"{project}_MCA_plm": "^slurm"}
        if is_oversubscribed(spec, machine):
            environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
        words = []
        if spec.hosts is not None:
            words += ["--host", ",".join(map(str, spec.hosts))]
        words += _binding(spec, machine)
        if spec.agent is not None:
            words += [self._daemon_option, "plm_ssh_agent" if self.major >= 5 else "plm_rsh_agent", spec.agent]
        if spec.network is not None:
            words += [self._daemon_option, "prte_if_include" if self.major >= 5 else "oob_tcp_if_include", spec.network]
            words += ["--mca", "btl_tcp_if_include", spec.network]
        if spec.hosts is not None or machine.allocated:
            known = {**machine.environ, **environment, **spec.env}
            for name in sorted(name for name in known if name in spec.env or _passed(name)):
                words += ["-x", name]
        return Arguments(words, environment)

    def restart_arguments(self, start_arguments: str, environ: Mapping[str, str]) -> Arguments:
        return Arguments([self._daemon_option, "plm_slurm_args", start_arguments], {})

    def protected(self, words: list[str]) -> list[str]:
        return ["sh", "-c", shlex.join(["exec", *words])] if any(word.startswith(_CHANGED) for word in words) else words

    @property
    def _daemon_option(self) -> str:
        """The option before the name of a parameter of the launcher's daemons."""
        return "--prtemca" if self.major >= 5 else "--mca"


def _binding(spec: LaunchSpec, machine: LocalMachine) -> list[str]:
    if binds_itself(spec, machine):
        return []
    if spec.hosts is not None or spec.ranks is None or machine.allocated:
        # The core counts of remote hosts are unknown, so ranks are not bound.
        return ["--bind-to", "none"]
    if spec.ranks > machine.cores:
        return [OpenMpi.oversubscribe_word, "--bind-to", "none"]
    if leaves_cores(spec, machine):
        return ["--bind-to", "none"]
    return ["--map-by", f"slot:PE={machine.cores // spec.ranks}", "--bind-to", "core"]


def _passed(name: str) -> bool:
    """Return whether to forward a variable to ranks on other hosts."""
    return name not in _NOT_PASSED and (name in _PASSED_NAMES or name.startswith((*_PASSED, "OMPI_MCA_")))
