"""Slurm, if installed: version, MPI plugins, partitions, and the current allocation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator

from ..batch_systems.registry import end_of_time
from ..comm.mpi import library_name
from ..core.words import counted
from ..monitor.format import duration
from .finding import Finding

TOPIC = "Slurm"


def check() -> Iterator[Finding]:
    """Check Slurm. Local; only rank 0's findings are printed."""
    if shutil.which("sbatch") is None:
        yield Finding(TOPIC, "sbatch", "none", "not on PATH; start jobs with mpitrain run")
        return
    version, problem = _query("sbatch", "--version")
    if problem:
        advice = "no job can be submitted from here; ask your site's support, or start ranks with mpitrain run"
        yield Finding(TOPIC, "sbatch", "warning", problem, advice)
        return
    yield Finding(TOPIC, "sbatch", "pass", version)
    yield _plugins()
    yield from _partitions()
    yield from _allocation()


def plugins(answer: str) -> list[str]:
    """Return the plugins listed by ``srun --mpi=list``."""
    return [word for word in re.findall(r"^\s*(\w+)$", answer, re.MULTILINE) if word != "none"]


def _plugins() -> Finding:
    answer, problem = _query("srun", "--mpi=list")
    if problem:
        return Finding(TOPIC, "srun", "warning", problem, "use mpirun inside the allocation, as mpitrain submit does")
    available_plugins = plugins(answer)
    wanted = "pmix" if "Open MPI" in library_name() else "pmi2"
    available = f"--mpi: {', '.join(available_plugins) or 'none'}"
    if any(name.startswith(wanted) for name in available_plugins):
        return Finding(TOPIC, "srun", "pass", available)
    advice = f"{library_name()} needs srun --mpi={wanted}; use mpirun inside the allocation, as mpitrain submit does"
    return Finding(TOPIC, "srun", "warning", available, advice)


def _partitions() -> Iterator[Finding]:
    answer, problem = _query("sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G")
    if problem:
        yield Finding(
            TOPIC, "partitions", "warning", problem, "the controller does not answer; ask your site's support"
        )
        return
    for line in answer.splitlines()[:12]:
        name, state, limit, nodes, cpus, memory, gres = line.split("|")
        gpus = f", {gres}" if gres != "(null)" else ""
        details = f"{nodes} nodes of {cpus} cores, {memory} MB{gpus}; time limit {limit}"
        if state == "up":
            yield Finding(TOPIC, f"partition {name}", "pass", details)
        else:
            yield Finding(TOPIC, f"partition {name}", "warning", f"{details}; state {state}", "use another partition")


def _allocation() -> Iterator[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        yield Finding(TOPIC, "allocation", "none", "not inside an allocation; request one with salloc or sbatch")
        return
    nodes, tasks = (os.environ.get(name, "?") for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS"))
    details = f"job {job}: {counted(int(nodes), 'node')}, {counted(int(tasks), 'task')}"
    end = end_of_time(None)
    if end is None:
        advice = "pass --time-limit S, so that the run saves before the job ends"
        yield Finding(TOPIC, "allocation", "warning", f"{details}; its end time is unknown", advice)
    else:
        yield Finding(TOPIC, "allocation", "pass", f"{details}, {duration(end - time.time())} left")


def _query(*words: str) -> tuple[str, str]:
    """Return the output of a Slurm command and an error message, one of them empty."""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{words[0]} does not answer: {error}"
    if answer.returncode:
        lines = (answer.stderr or answer.stdout).strip().splitlines()
        return "", f"{words[0]}: {lines[0].removeprefix(f'{words[0]}: ') if lines else 'no reason given'}"
    return (answer.stdout or answer.stderr).strip(), ""
