"""Slurm, where it is: version, plugins for MPI, partitions, and the allocation that this runs in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator

from ..comm.mpi import library_name
from ..monitor.format import duration
from ..process.signals import ask_slurm, end_of_time
from .finding import Finding

TOPIC = "Slurm"


def check() -> Iterator[Finding]:
    """Local; rank 0's counts."""
    if shutil.which("sbatch") is None:
        yield Finding(TOPIC, "sbatch", "none", "not on PATH: jobs are started with mpitrain run")
        return
    version, problem = _ask("sbatch", "--version")
    if problem:
        advice = "no job can be submitted from here: ask your site, or start ranks with mpitrain run"
        yield Finding(TOPIC, "sbatch", "warning", problem, advice)
        return
    yield Finding(TOPIC, "sbatch", "pass", version)
    yield _plugins()
    yield from _partitions()
    yield from _allocation()


def plugins(answer: str) -> list[str]:
    """The plugins in the answer of ``srun --mpi=list``."""
    return [word for word in re.findall(r"^\s*(\w+)$", answer, re.MULTILINE) if word != "none"]


def _plugins() -> Finding:
    answer, problem = _ask("srun", "--mpi=list")
    if problem:
        return Finding(TOPIC, "srun", "warning", problem, "use mpirun inside the allocation: mpitrain submit does")
    found = plugins(answer)
    wanted = "pmix" if "Open MPI" in library_name() else "pmi2"
    told = f"--mpi: {', '.join(found) or 'none'}"
    if any(name.startswith(wanted) for name in found):
        return Finding(TOPIC, "srun", "pass", told)
    advice = f"{library_name()} needs srun --mpi={wanted}: use mpirun inside the allocation (mpitrain submit does)"
    return Finding(TOPIC, "srun", "warning", told, advice)


def _partitions() -> Iterator[Finding]:
    answer, problem = _ask("sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G")
    if problem:
        yield Finding(TOPIC, "partitions", "warning", problem, "the controller does not answer: ask your site")
        return
    for line in answer.splitlines()[:12]:
        name, state, limit, nodes, cpus, memory, gres = line.split("|")
        gpus = f", {gres}" if gres != "(null)" else ""
        told = f"{nodes} nodes of {cpus} cores, {memory} MB{gpus}; time limit {limit}"
        if state == "up":
            yield Finding(TOPIC, f"partition {name}", "pass", told)
        else:
            yield Finding(TOPIC, f"partition {name}", "warning", f"{told}; it is {state}", "choose another")


def _allocation() -> Iterator[Finding]:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        yield Finding(TOPIC, "allocation", "none", "not in one; salloc or sbatch gives one")
        return
    nodes, tasks = (os.environ.get(name, "?") for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS"))
    told = f"job {job}: {nodes} node{'s' * (nodes != '1')}, {tasks} task{'s' * (tasks != '1')}"
    end = end_of_time(None, ask=ask_slurm)
    if end is None:
        advice = "give --time-limit S, or the run is ended without a checkpoint"
        yield Finding(TOPIC, "allocation", "warning", f"{told}; its end is not told", advice)
    else:
        yield Finding(TOPIC, "allocation", "pass", f"{told}, {duration(end - time.time())} left")


def _ask(*words: str) -> tuple[str, str]:
    """What a command of Slurm's says, or why it does not."""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{words[0]} does not answer: {error}"
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        return "", f"{words[0]}: {said[0].removeprefix(f'{words[0]}: ') if said else 'no reason given'}"
    return (answer.stdout or answer.stderr).strip(), ""
