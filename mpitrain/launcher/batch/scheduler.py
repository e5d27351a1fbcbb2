"""Submit scripts to a batch system, cancel jobs, and follow a job's log."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...batch_systems.base import BatchSystem, JobState
from ...batch_systems.job import Batch
from ...batch_systems.registry import SYSTEMS
from ...core.words import counted
from ...errors import LaunchError
from ...monitor.heartbeat import BatchJob, write_submitted
from ...process.launcher_env import leave_job
from ...process.run_directory import missing_folders, remove_empty
from .script import Script

_POLL_S = 1.0
_ASK_S = 5.0  # interval of queries, to limit the load on the controller


def submit(system: BatchSystem, batch: Batch, script: Script) -> str:
    """Write the script into the job's log directory, submit it, and return the job id; record its runs as submitted.

    Raises:
        LaunchError: The script cannot be written, the batch system is not installed here, or it rejects the job.
    """
    name, *words = system.submit_command
    program = shutil.which(name)
    if program is None:
        raise LaunchError(
            f"{name} is not on PATH; submit from a machine that has it, or print the script with --dry-run"
        )
    created = _write(batch, script)
    try:
        job_id = _hand_over(system, [program, *words, *script.words], batch, script)
    except LaunchError:
        batch.script.unlink(missing_ok=True)
        remove_empty(created)
        raise
    _record(system, batch, job_id)
    return job_id


def cancel(job: BatchJob, running: bool) -> None:
    """Request that a job saves and ends if it is ``running``; otherwise remove it from the queue. Returns immediately.

    Raises:
        LaunchError: The batch system is not known or not installed here, or its command fails.
    """
    if job.scheduler not in SYSTEMS:
        raise LaunchError(f"job {job.job_id} cannot be cancelled: its scheduler {job.scheduler!r} is not supported")
    words = SYSTEMS[job.scheduler].cancel_command(job.job_id, running)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"job {job.job_id} cannot be cancelled from here: {error}") from error
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise LaunchError(f"job {job.job_id} cannot be cancelled: {words[0]}: {reason}")


def follow(system: BatchSystem, job_id: str, log: Path) -> bool:
    """Print a job's log as it grows until the job has ended; return whether it completed.

    After Ctrl-C the job continues, and the result is True.
    """
    at, asked_at = 0, 0.0
    state: JobState | None = None  # not known yet
    try:
        while True:
            is_over = state is not None and state.has_ended
            at = _print_from(log, at)
            if is_over:
                break
            time.sleep(_POLL_S)
            if time.monotonic() - asked_at > _ASK_S or not at:
                before, asked_at = state, time.monotonic()
                state = system.states([job_id]).get(job_id, before)
                if state is not None and state != before and not state.is_cleaning_up:
                    print(f"mpitrain: job {job_id} is {state.name.lower()}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        command = shlex.join(system.cancel_command(job_id, running=False))
        print(f"\nmpitrain: job {job_id} continues; cancel it with {command}", file=sys.stderr)
        return True
    return state is not None and state.succeeded


def _print_from(log: Path, at: int) -> int:
    """Print a file from an offset on, and return the offset of its end."""
    try:
        with log.open("rb") as file:
            file.seek(at)
            while chunk := file.read(65536):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return file.tell()
    except FileNotFoundError:
        return at


def _write(batch: Batch, script: Script) -> list[Path]:
    """Write the script; return the directories created for it, innermost first."""
    missing = missing_folders(batch.log_dir)
    try:
        batch.log_dir.mkdir(parents=True, exist_ok=True)
        batch.script.write_text(script.text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run directory {batch.run_dir} cannot be written: {error.strerror}; give another --run-dir"
        ) from error
    return missing


def _record(system: BatchSystem, batch: Batch, job_id: str) -> None:
    """Record the job's runs as submitted; if a run has already started, its next heartbeat replaces this status."""
    ranks = counted(batch.resources.ranks, "rank")
    with contextlib.suppress(OSError):  # the job has been submitted and does not need the record
        for index, run_dir in batch.run_dirs(system.first_index):
            task = job_id if index is None else system.task_id(job_id, index)
            write_submitted(run_dir, ranks, BatchJob(system.name, task, batch.name))


def _hand_over(system: BatchSystem, words: Sequence[str], batch: Batch, script: Script) -> str:
    """Run the submit command; return the job id."""
    name = system.submit_command[0]
    text = script.text if system.reads_stdin else None
    words = [*words, *([] if system.reads_stdin else [str(batch.script)])]
    try:
        environment = dict(os.environ)
        leave_job(environment)
        done = subprocess.run(
            words, input=text, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{name} does not answer: {error}; check that the scheduler is up") from error
    job_id = re.search(system.id_pattern, done.stdout, re.MULTILINE)
    if done.returncode or job_id is None:
        raise LaunchError(refusal(system, done.stderr or done.stdout))
    return job_id[1]


def refusal(system: BatchSystem, output: str) -> str:
    """Return a one-line error from the submit command's output, with advice on how to fix it."""
    command = system.submit_command[0]
    lines = [re.sub(rf"^{command}: (error|fatal): ", "", line).strip() for line in output.splitlines()]
    reasons = [re.sub(r"^Batch job submission failed: ", "", line) for line in lines if line and "--help" not in line]
    reason = "; ".join(dict.fromkeys(reasons)) or "no reason given"
    advice = next((advice for word, advice in system.advice if word in reason.lower()), "")
    return f"{command} rejected the job: {reason}" + (f" ({advice})" if advice else "")
