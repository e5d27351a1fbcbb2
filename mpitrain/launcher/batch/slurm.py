"""Slurm: directives and the command of a batch job."""

from __future__ import annotations

import re
import shlex

from ...errors import ConfigError
from .job import Batch, plain, shell

PREFIX = "#SBATCH"
INDEX = "SLURM_ARRAY_TASK_ID"
AGAIN = 'scontrol requeue "$SLURM_JOB_ID"'  # also correct in an array: each task has its own SLURM_JOB_ID
ANSWERS = 'srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" true'

_DIRECT = re.compile(r"[A-Za-z0-9_@%+=:,./&|()\[\]{}*!-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_STEP_ENDS_S = 60  # for the other ranks to exit after srun's first rank has exited


def directives(batch: Batch) -> tuple[list[str], list[str]]:
    """Return the ``#SBATCH`` directives, and arguments for ``sbatch`` that no directive can express."""
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
        raise ConfigError(f"{words[0]!r} contains a line break, which a heterogeneous job cannot have; remove it")
    return lines, words


def log_pattern(batch: Batch) -> str:
    """Return the path of the output file, with Slurm's placeholders for the job id.

    Raises:
        ConfigError: The path contains a backslash, which Slurm interprets.
    """
    folder = str(batch.log_dir)
    if "\\" in folder:
        raise ConfigError(f"--run-dir {batch.run_dir}: Slurm cannot write logs to a path with a backslash; rename it")
    return folder.replace("%", "%%") + ("/%A_%a.log" if batch.in_tasks else "/%j.log")


def command(batch: Batch) -> str:
    """Return the shell command that starts the ranks."""
    if batch.starter == "mpirun":
        return shell([batch.python, "-m", "mpitrain", "run", *batch.arguments])
    # srun ends all ranks 60 s after the first has exited: long enough for the others to finish writing their logs, and
    # a rank that died does not keep the allocation.
    words = ["srun", f"--mpi={batch.mpi}", f"--wait={_STEP_ENDS_S}"]
    rank = [batch.python, "-m", "mpitrain", "train", *batch.arguments]
    if not batch.resources.ps_nodes:
        cpus = batch.resources.cpus_per_task  # srun does not inherit it from sbatch
        return shell([*words, *([f"--cpus-per-task={cpus}"] if cpus else []), *rank])
    rank += ["--ps", str(batch.resources.servers), "--ps-placement", "first"]
    return shell([*words, "--het-group=0,1", *rank])


def _options(batch: Batch) -> list[str]:
    resources = batch.resources
    options = [f"--job-name={batch.name}", f"--output={log_pattern(batch)}", "--open-mode=append"]
    options.append("--requeue" if resources.requeue else "--no-requeue")
    if resources.warning_s:
        options.append(f"--signal=B:USR1@{resources.warning_s}")
    for name in ("dependency", "mail_type", "mail_user"):
        options += _given(name, getattr(resources, name))
    if batch.in_tasks:
        options.append(f"--array={batch.array}")
    if resources.ps_nodes:
        options += [*_servers(batch), *_shared(batch, resources.ps_partition or resources.partition), "hetjob"]
    options += [f"--nodes={resources.nodes}", f"--ntasks-per-node={resources.ranks_per_node}"]
    for name in ("cpus_per_task", "mem", "mem_per_cpu", "gpus", "gpus_per_node", "gres", "constraint"):
        options += _given(name, getattr(resources, name))
    if resources.gpus_per_task is not None:
        options.append(_gpus(batch))
    return [*options, *_shared(batch, resources.partition), *_extra(batch)]


def _servers(batch: Batch) -> list[str]:
    """Return the options of a heterogeneous job's first component, the servers."""
    resources = batch.resources
    options = [f"--nodes={resources.ps_nodes}", f"--ntasks-per-node={resources.ps_tasks_per_node}"]
    options += _given("cpus_per_task", resources.ps_cpus_per_task)
    return options + _given("mem", resources.ps_mem) + _given("constraint", resources.ps_constraint)


def _shared(batch: Batch, partition: str | None) -> list[str]:
    """Return the options that both components of a heterogeneous job need."""
    resources = batch.resources
    options = _given("partition", partition)
    for name in ("account", "qos", "time", "reservation"):
        options += _given(name, getattr(resources, name))
    return options + (["--exclusive"] if resources.exclusive else [])


def _gpus(batch: Batch) -> str:
    """Return the GPUs per rank; per node for ``mpirun``, because Slurm's tasks are then its daemons."""
    resources = batch.resources
    if batch.starter == "srun":
        return f"--gpus-per-task={resources.gpus_per_task}"
    kind = str(resources.gpus_per_task).rpartition(":")
    return f"--gpus-per-node={kind[0]}{kind[1]}{resources.node_gpus}"


def _extra(batch: Batch) -> list[str]:
    words = []
    for given in batch.extra:
        try:
            words += shlex.split(given)
        except ValueError as error:
            raise ConfigError(f"--sbatch {given!r}: {error}; quote it as for the sbatch command") from error
    for word in words:
        if not word.startswith("-") or (not word.startswith("--") and len(word) == 2):
            raise ConfigError(f"--sbatch {word!r}: give sbatch flags in their long form, such as --licenses=matlab")
    return words


def _given(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}={value}"]


def _quoted(option: str) -> str:
    """Quote an option for an ``#SBATCH`` line, where sbatch interprets only double quotes and backslashes."""
    name, equals, value = option.partition("=")
    if not equals or _DIRECT.fullmatch(value):
        return plain(name, PREFIX) + equals + value
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{plain(name, PREFIX)}="{text}"'
