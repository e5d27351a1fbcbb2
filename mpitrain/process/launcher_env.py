"""What launchers set in the environment of their ranks; does not use MPI."""

from __future__ import annotations

from collections.abc import Mapping

# The rank number: set by Open MPI's launcher; by MPICH's, Intel MPI's and srun with PMI; by launchers with PMIx.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher started this process; ``srun`` without MPI support also starts plain shells."""
    return any(name in environ for name in _RANK)


def launched_rank(environ: Mapping[str, str]) -> int:
    """Return the rank from the environment, to print messages once before MPI has started; 0 if unknown."""
    given = (environ.get(name, "") for name in (*_RANK, "SLURM_PROCID"))
    return next((int(rank) for rank in given if rank.isdigit()), 0)
