"""Submit scripts to a scheduler, and follow a Slurm job's log."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...errors import LaunchError
from ...monitor.heartbeat import BatchJob, write_submitted
from ...monitor.slurm_jobs import ENDED, FORGOTTEN
from ...process.run_directory import missing_folders, remove_empty
from .job import Batch, Script
from .script import FIRST_INDEX, Scheduler

_COMMANDS: dict[Scheduler, str] = {"slurm": "sbatch", "pbs": "qsub", "lsf": "bsub"}
_NUMBERS = {"slurm": r"^(\d+)", "pbs": r"^(\S+)", "lsf": r"<(\d+)>"}
# The commands that end a job, by scheduler and whether it runs. The signal is for the batch script, which lets the run
# save.
_CANCEL = {
    ("slurm", True): ["scancel", "--batch", "--signal=TERM"],
    ("slurm", False): ["scancel"],
    ("pbs", True): ["qdel"],
    ("pbs", False): ["qdel"],
    ("lsf", True): ["bkill", "-s", "TERM"],
    ("lsf", False): ["bkill"],
}
_ADVICE = (
    ("partition", "sinfo lists the partitions"),
    ("account", "sacctmgr show associations user=$USER lists your accounts"),
    ("qos", "sacctmgr show associations user=$USER lists your QOS"),
    ("feature", "sinfo -o '%N %f' lists the features of nodes"),
    ("node count", "sinfo shows the number of nodes"),
    ("configuration source", "this machine is not part of a cluster; submit from a login node"),
    ("node configuration", "no node has these resources; sinfo -o '%P %D %c %m %G' shows cores, memory and GPUs"),
    ("time limit", "sinfo shows each partition's limit"),
    ("dependency", "squeue lists the existing jobs"),
)
_POLL_S = 1.0
_ASK_S = 5.0  # between two queries, to limit the load on the controller


def submit(scheduler: Scheduler, batch: Batch, script: Script) -> str:
    """Write the script into the job's log directory, submit it, and return the job id; record its runs as submitted.

    Raises:
        LaunchError: The script cannot be written, the scheduler is not installed here, or it rejects the job.
    """
    name = _COMMANDS[scheduler]
    program = shutil.which(name)
    if program is None:
        raise LaunchError(
            f"{name} is not on PATH; submit from a machine that has it, or print the script with --dry-run"
        )
    made = _write(batch, script)
    try:
        number = _hand_over(scheduler, [program, *script.words], batch, script)
    except LaunchError:
        batch.script.unlink(missing_ok=True)
        remove_empty(made)
        raise
    _record(scheduler, batch, number)
    return number


def cancel(job: BatchJob, running: bool) -> None:
    """Ask a job to save and end, if it is ``running``; remove it from the queue if it is not. Returns immediately.

    Raises:
        LaunchError: The scheduler's command is not installed here, or fails.
    """
    words = _CANCEL[job.scheduler, running] + [job.job_id]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"job {job.job_id} cannot be cancelled from here: {error}") from error
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise LaunchError(f"job {job.job_id} cannot be cancelled: {words[0]}: {reason}")


def follow(job: str, log: Path) -> bool:
    """Print a job's log as it grows until the job has ended; return whether it completed.

    Ctrl-C stops following; the job continues.
    """
    at, asked_at, state = 0, 0.0, "PENDING"
    try:
        while True:
            over = state in ENDED or state == FORGOTTEN
            at = _print_from(log, at)
            if over:
                break
            time.sleep(_POLL_S)
            if time.monotonic() - asked_at > _ASK_S or not at:
                asked_at, before, state = time.monotonic(), state, _state(job) or state
                if state != before and state != "COMPLETING":
                    print(f"mpitrain: job {job} is {state.lower()}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"\nmpitrain: job {job} continues; cancel it with scancel {job}", file=sys.stderr)
        return True
    return state == "COMPLETED"


def _state(job: str) -> str | None:
    """Return Slurm's state of a job; None if Slurm does not answer."""
    words = ["scontrol", "--oneliner", "show", "job", job]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if "Invalid job id" in answer.stderr:
        return FORGOTTEN
    found = re.search(r"\bJobState=(\w+)", answer.stdout)
    return found[1] if found else None


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
    made = missing_folders(batch.log_dir)
    try:
        batch.log_dir.mkdir(parents=True, exist_ok=True)
        batch.script.write_text(script.text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the run directory {batch.run_dir} cannot be written: {error.strerror}; give another --run-dir"
        ) from error
    return made


def _record(scheduler: Scheduler, batch: Batch, number: str) -> None:
    """Record the job's runs as submitted; if a run has already started, its next heartbeat replaces this status."""
    ranks = f"{batch.resources.ranks} rank{'s' * (batch.resources.ranks != 1)}"
    with contextlib.suppress(OSError):  # the job has been submitted and does not need the record
        for index, run_dir in batch.run_dirs(FIRST_INDEX[scheduler]):
            task = f"{number}_{index}" if index is not None and scheduler == "slurm" else number
            write_submitted(run_dir, ranks, BatchJob(scheduler, task, batch.name))


def _hand_over(scheduler: Scheduler, words: Sequence[str], batch: Batch, script: Script) -> str:
    words = [*words, "--parsable"] if scheduler == "slurm" else list(words)
    given = None
    if scheduler == "lsf":
        given = script.text  # bsub parses directives only from standard input
    else:
        words.append(str(batch.script))
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{_COMMANDS[scheduler]} does not answer: {error}; check that the scheduler is up") from error
    number = re.search(_NUMBERS[scheduler], done.stdout, re.MULTILINE)
    if done.returncode or number is None:
        raise LaunchError(refusal(_COMMANDS[scheduler], done.stderr or done.stdout))
    return number[1]


def refusal(command: str, output: str) -> str:
    """Return a one-line error from a scheduler command's output, with advice on how to fix it."""
    lines = [re.sub(rf"^{command}: (error|fatal): ", "", line).strip() for line in output.splitlines()]
    reasons = [re.sub(r"^Batch job submission failed: ", "", line) for line in lines if line and "--help" not in line]
    reason = "; ".join(dict.fromkeys(reasons)) or "no reason given"
    advice = next((advice for word, advice in _ADVICE if word in reason.lower()), "")
    return f"{command} rejected the job: {reason}" + (f" ({advice})" if advice else "")
