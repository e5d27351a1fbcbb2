"""Slurm's way to say what a batch job wants."""

from __future__ import annotations

import re
import shlex

from ...errors import ConfigError
from .job import Batch, plain, shell

PREFIX = "#SBATCH"
INDEX = "SLURM_ARRAY_TASK_ID"
AGAIN = 'scontrol requeue "$SLURM_JOB_ID"'  # one task of an array has an id of its own there, too
ANSWERS = 'srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" true'

_DIRECT = re.compile(r"[A-Za-z0-9_@%+=:,./&|()\[\]{}*!-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_STEP_ENDS_S = 60  # after the first rank of srun's has ended, in which others end in order


def directives(batch: Batch) -> tuple[list[str], list[str]]:
    """Lines for ``#SBATCH``, and words for the command line of ``sbatch`` that no line can hold."""
    lines, words = [], []
    for option in _options(batch):
        if option == "hetjob":
            lines.append(option)
            continue
        if _CONTROL.search(option):
            words.append(option)
        else:
            lines.append(_quoted(option))
    if words and "hetjob" in lines:
        raise ConfigError(f"{words[0]!r} has a line break, which a heterogeneous job's lines cannot say: leave it out")
    return lines, words


def log_pattern(batch: Batch) -> str:
    """Where the output goes, with what Slurm puts in place of the job's number.

    Raises:
        ConfigError: Slurm reads the folder's name in its own way.
    """
    folder = str(batch.log_dir)
    if "\\" in folder:
        raise ConfigError(f"--run-dir {batch.run_dir}: Slurm writes no log into a folder with a backslash; rename it")
    return folder.replace("%", "%%") + ("/%A_%a.log" if batch.in_tasks else "/%j.log")


def command(batch: Batch) -> str:
    """What starts the ranks, as a shell reads it."""
    if batch.starter == "mpirun":
        return shell([batch.python, "-m", "mpitrain", "run", *batch.arguments])
    # 60 s to end after the first has ended: a rank that died does not keep the others, and none that is still
    # writing its log is killed when another has exited.
    words = ["srun", f"--mpi={batch.mpi}", f"--wait={_STEP_ENDS_S}"]
    rank = [batch.python, "-m", "mpitrain", "train", *batch.arguments]
    if not batch.resources.ps_nodes:
        cpus = batch.resources.cpus_per_task  # which srun does not take from sbatch
        return shell([*words, *([f"--cpus-per-task={cpus}"] if cpus else []), *rank])
    rank += ["--ps", str(batch.resources.servers), "--ps-placement", "first"]
    return shell([*words, "--het-group=0,1", *rank])


def _options(batch: Batch) -> list[str]:
    asked = batch.resources
    options = [f"--job-name={batch.name}", f"--output={log_pattern(batch)}", "--open-mode=append"]
    options.append("--requeue" if asked.requeue else "--no-requeue")
    if asked.warning_s:
        options.append(f"--signal=B:USR1@{asked.warning_s}")
    for name in ("dependency", "mail_type", "mail_user"):
        options += _given(name, getattr(asked, name))
    if batch.in_tasks:
        options.append(f"--array={batch.array}")
    if asked.ps_nodes:
        options += [*_servers(batch), *_shared(batch, asked.ps_partition or asked.partition), "hetjob"]
    options += [f"--nodes={asked.nodes}", f"--ntasks-per-node={asked.ranks_per_node}"]
    for name in ("cpus_per_task", "mem", "mem_per_cpu", "gpus", "gpus_per_node", "gres", "constraint"):
        options += _given(name, getattr(asked, name))
    if asked.gpus_per_task is not None:
        options.append(_gpus(batch))
    return [*options, *_shared(batch, asked.partition), *_extra(batch)]


def _servers(batch: Batch) -> list[str]:
    """What the first part of a heterogeneous job wants."""
    asked = batch.resources
    options = [f"--nodes={asked.ps_nodes}", f"--ntasks-per-node={asked.ps_tasks_per_node}"]
    options += _given("cpus_per_task", asked.ps_cpus_per_task)
    return options + _given("mem", asked.ps_mem) + _given("constraint", asked.ps_constraint)


def _shared(batch: Batch, partition: str | None) -> list[str]:
    """What both parts of a heterogeneous job are told."""
    asked = batch.resources
    options = _given("partition", partition)
    for name in ("account", "qos", "time", "reservation"):
        options += _given(name, getattr(asked, name))
    return options + (["--exclusive"] if asked.exclusive else [])


def _gpus(batch: Batch) -> str:
    """GPUs of each rank; for ``mpirun``, whose daemons are Slurm's tasks, as GPUs of each node."""
    asked = batch.resources
    if batch.starter == "srun":
        return f"--gpus-per-task={asked.gpus_per_task}"
    kind = str(asked.gpus_per_task).rpartition(":")
    return f"--gpus-per-node={kind[0]}{kind[1]}{asked.node_gpus}"


def _extra(batch: Batch) -> list[str]:
    words = []
    for given in batch.extra:
        try:
            words += shlex.split(given)
        except ValueError as error:
            raise ConfigError(f"--sbatch {given!r}: {error}; quote it as sbatch would want it") from error
    for word in words:
        if not word.startswith("-") or (not word.startswith("--") and len(word) == 2):
            raise ConfigError(f"--sbatch {word!r}: give sbatch's flags in their long form, such as --licenses=matlab")
    return words


def _given(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}={value}"]


def _quoted(option: str) -> str:
    """An option as ``sbatch`` reads it in a line of a script: it knows double quotes and backslashes, nothing else."""
    name, equals, value = option.partition("=")
    if not equals or _DIRECT.fullmatch(value):
        return plain(name, PREFIX) + equals + value
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{plain(name, PREFIX)}="{text}"'
