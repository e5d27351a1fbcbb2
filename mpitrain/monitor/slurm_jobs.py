"""How Slurm jobs ended, for runs that had no chance to record it themselves."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

FORGOTTEN = "no longer known to Slurm"
ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
_ANSWERS_S = 10.0


def ask_ends(jobs: Iterable[str]) -> dict[str, str]:
    """Return how each of the jobs that have ended did so; empty if Slurm is not installed here or does not answer.

    One query for all jobs; a second one, to the accounting database, if the controller has forgotten some.

    Args:
        jobs: Job ids; those of array tasks are ``JOB_INDEX``.

    Returns:
        Slurm's state, such as ``OUT_OF_MEMORY``, or ``FORGOTTEN``.
    """
    jobs = set(jobs)
    if not jobs:
        return {}
    numbers = ",".join(sorted({job.partition("_")[0] for job in jobs}))
    current = _query("squeue", "--noheader", "--array", "--states=all", f"--jobs={numbers}", "--format=%i|%T")
    if current is None:
        return {}
    states = {job: state for job in jobs if (state := state_in(current, job))}
    if missing := jobs - states.keys():
        past = _query(
            "sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={numbers}", "--format=JobID,State"
        )
        states |= {job: state_in(past or "", job) or FORGOTTEN for job in missing}
    return {job: state for job, state in states.items() if state in ENDED or state == FORGOTTEN}


def is_queued(job: str) -> bool:
    """Return whether a job is running or waiting; False also if Slurm is not installed here or does not answer."""
    current = _query("squeue", "--noheader", "--array", "--states=all", f"--jobs={job}", "--format=%i|%T")
    return current is not None and state_in(current, job) not in ("", *ENDED)


def state_in(output: str, job: str) -> str:
    """Return the state of a job from lines ``ID|STATE``; empty if there is none.

    Components of a heterogeneous job are ``JOB+N``. Tasks that never started may share a line ``JOB_[INDEXES]``.
    """
    states = {}
    for line in output.splitlines():
        name, _, state = line.partition("|")
        states[re.sub(r"\+\d+$|_\[.*", "", name)] = (state.split() or [""])[0]  # CANCELLED may be followed by a user
    return states.get(job) or states.get(job.partition("_")[0], "")


def _query(*words: str) -> str | None:
    """Return the output of one of Slurm's commands; None if it gave no answer."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ANSWERS_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode and "Invalid job id" not in done.stderr else done.stdout
