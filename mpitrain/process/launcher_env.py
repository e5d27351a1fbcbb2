"""What launchers tell the ranks that they start, in the environment; starts no MPI, and needs none."""

from __future__ import annotations

from collections.abc import Mapping

# Which rank a process is: Open MPI's launcher; MPICH's and Intel MPI's, srun with PMI; all that speak PMIx.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def is_launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI's started this process; ``srun`` without that starts shells, too."""
    return any(name in environ for name in _RANK)


def launched_rank(environ: Mapping[str, str]) -> int:
    """The rank that the launcher gave this process, for speaking once where MPI does not know it."""
    given = (environ.get(name, "") for name in (*_RANK, "SLURM_PROCID"))
    return next((int(rank) for rank in given if rank.isdigit()), 0)
