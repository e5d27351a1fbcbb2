"""The size of the scheduler's allocation, read from environment variables."""

from __future__ import annotations

from collections.abc import Mapping


def allocated_ranks(environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks (tasks) of the Slurm allocation, or None outside one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    for variable in ("SLURM_NTASKS", "SLURM_NPROCS"):
        if environ.get(variable, "").isdigit():
            return int(environ[variable])
    return _tasks(environ.get("SLURM_TASKS_PER_NODE", ""))


def _tasks(per_node: str) -> int | None:
    """Return the sum of ``SLURM_TASKS_PER_NODE``, such as ``4(x2),3``; None if it cannot be parsed."""
    total = 0
    for part in per_node.split(","):
        tasks, _, times = part.removesuffix(")").partition("(x")
        if not tasks.isdigit() or (times and not times.isdigit()):
            return None
        total += int(tasks) * int(times or 1)
    return total
