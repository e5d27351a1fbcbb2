"""Slurm."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping

from ..errors import ConfigError, LaunchError
from .base import BatchSystem, Directives, JobState, query
from .job import RUN_DIR, Batch, plain, shell
from .resources import Resources

_PREFIX = "#SBATCH"
_DIRECT = re.compile(r"[A-Za-z0-9_@%+=:,./&|()\[\]{}*!-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# After sbatch --export=NONE, srun would start ranks without what the script has set, such as modules.
_EXPORT = "SLURM_EXPORT_ENV=ALL"
_END_TIMEOUT_S = 20.0  # long, because a run that does not know its time limit could not save before this limit
_ALLOCATION_TIMEOUT_S = 4.0
_STEP_ENDS_S = 60  # time for the other ranks to exit after the first one has exited
_ENDED = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
_FORGOTTEN = JobState("no longer known to Slurm", has_ended=True, is_known=False)


class Slurm(BatchSystem):
    """Slurm."""

    name = "slurm"
    title = "Slurm"
    prefix = _PREFIX
    submit_command = ("sbatch", "--parsable")
    id_pattern = r"^(\d+)"
    index_variable = "SLURM_ARRAY_TASK_ID"
    id_variables = ("SLURM_JOB_ID",)
    allocation_variable = "SLURM_JOB_ID"
    starters = ("mpirun", "srun")
    # With --mpi=pmix, srun cannot start a rank on a node that still has the folder of an earlier job step. Before the
    # requeue, that step had the same number.
    unreliable_starters = ("srun",)
    sets_end_time = True
    node_check = (
        'srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" true'
    )
    remote_agent = """sh -c 'exec srun --overlap --mem=0 --quiet --nodes=1 --ntasks=1 --nodelist="$1" sh -c "$2"' sh"""
    # After a node failure, the job step of the killed ranks keeps its CPUs and memory until Slurm notices the failure.
    restart_arguments = "--overlap --mem=0"
    restart_count_variable = "SLURM_RESTART_COUNT"
    excludes_hosts = True
    can_follow = True
    advice = (
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

    def directives(self, batch: Batch) -> Directives:
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
        return Directives(lines, words)

    def command(self, batch: Batch) -> str:
        if batch.starter == "mpirun":
            words = [batch.python, "-m", "mpitrain", "run", *batch.launch_flags]
            return f"{_EXPORT} {shell(words)} {RUN_DIR} {shell(batch.arguments)}"
        # srun ends all ranks 60 s after the first has exited. The other ranks have enough time to finish their logs,
        # and do not keep the allocation if a rank has died. A program's ranks may end at any time; a rank that fails
        # ends the others.
        ends = [f"--wait={_STEP_ENDS_S}"] if batch.keeps_checkpoints else ["--wait=0", "--kill-on-bad-exit=1"]
        words = ["srun", f"--mpi={batch.mpi}", *ends]
        rank = [batch.python, "-m", "mpitrain", batch.rank_command]
        if batch.resources.ps_nodes:
            words.append("--het-group=0,1")
            rank += ["--ps", str(batch.resources.servers), "--ps-placement", "first"]
        elif batch.resources.cpus_per_task:
            words.append(f"--cpus-per-task={batch.resources.cpus_per_task}")  # srun does not inherit it from sbatch
        return f"{_EXPORT} {shell([*words, *rank])} {RUN_DIR} {shell(batch.arguments)}"

    def cancel_command(self, job_id: str, running: bool) -> list[str]:
        # The signal is for the batch script, which lets the run save.
        return ["scancel", *(["--batch", "--signal=TERM"] if running else []), job_id]

    def choose_starter(self, requested: str | None, resources: Resources) -> str:
        if not resources.ps_nodes:
            return super().choose_starter(requested, resources)
        if requested == "mpirun":
            raise ConfigError(
                "--launcher mpirun does not support --ps-nodes (a heterogeneous job); remove it to use srun"
            )
        return super().choose_starter(requested or "srun", resources)

    def mpi_plugin(self, starter: str, requested: str | None, flavor: Callable[[], str]) -> str:
        if starter == "srun":
            return requested or ("pmix" if flavor() == "openmpi" else "pmi2")
        if requested is not None:
            raise ConfigError(f"--mpi {requested} is for srun; add --launcher srun, or remove --mpi")
        return ""

    def requeue_command(self, batch: Batch) -> str:
        return 'scontrol requeue "$SLURM_JOB_ID"'  # also correct in an array: each task has its own SLURM_JOB_ID

    def stop_signal(self, batch: Batch) -> str:
        return "USR1" if batch.starter == "srun" else "TERM"

    def task_id(self, job_id: str, index: int) -> str:
        return f"{job_id}_{index}"

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Return the states of jobs; empty if Slurm is not installed here or does not answer.

        One query for all jobs; a second one, to the accounting database, if the controller has forgotten some.

        Args:
            job_ids: The ids of array tasks are ``JOB_INDEX``.
        """
        jobs = set(job_ids)
        if not jobs:
            return {}
        numbers = ",".join(sorted({job.partition("_")[0] for job in jobs}))
        current = _query("squeue", "--noheader", "--array", "--states=all", f"--jobs={numbers}", "--format=%i|%T")
        if current is None:
            return {}
        names = {job: name for job in jobs if (name := _state_in(current, job))}
        if missing := jobs - names.keys():
            past = _query(
                "sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={numbers}", "--format=JobID,State"
            )
            names |= {job: _state_in(past or "", job) for job in missing}
        return {job: _state(name) if name else _FORGOTTEN for job, name in names.items()}

    def end_time(self, environ: Mapping[str, str]) -> float | None:
        end, job = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_JOB_ID", "")
        if end.isdigit():
            return float(end)
        if not job.isdigit():
            return None
        # Older versions of Slurm do not set the end in the environment.
        words = ["squeue", "--noheader", "--jobs", job, "--format", "%A %e"]
        done = query(words, {"SLURM_TIME_FORMAT": "%s"}, _END_TIMEOUT_S)
        return None if done is None else end_in(done.stdout, job)

    def current_ids(self, environ: Mapping[str, str]) -> set[str]:
        task = [environ.get(name, "") for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")]
        return super().current_ids(environ) | ({"_".join(task)} if all(task) else set())

    def allocated_hosts(self, environ: Mapping[str, str]) -> list[tuple[str, int]]:
        if not (nodes := environ.get("SLURM_JOB_NODELIST")):
            return []
        names = (_query("scontrol", "show", "hostnames", nodes) or "").split()
        tasks = _tasks(environ.get("SLURM_TASKS_PER_NODE", ""))
        return list(zip(names, tasks, strict=True)) if len(names) == len(tasks) else []

    def allocated_ranks(self, environ: Mapping[str, str]) -> int | None:
        if "SLURM_JOB_ID" not in environ:
            return None
        for variable in ("SLURM_NTASKS", "SLURM_NPROCS"):
            if environ.get(variable, "").isdigit():
                return int(environ[variable])
        return sum(_tasks(environ.get("SLURM_TASKS_PER_NODE", ""))) or None

    def only_node(self, environ: Mapping[str, str]) -> str:
        return environ.get("SLURM_JOB_NODELIST", "") if environ.get("SLURM_JOB_NUM_NODES") == "1" else ""

    def can_start_ranks(self, environ: Mapping[str, str]) -> bool:
        job = environ.get("SLURM_JOB_ID", "")
        if shutil.which("srun") is None:
            return False
        done = query(["squeue", "--noheader", "--jobs", job, "--format", "%T"], timeout_s=_ALLOCATION_TIMEOUT_S)
        if done is None:
            return True  # squeue is busy, and the job may run
        states = done.stdout.split()
        if "Invalid job id" in done.stderr or (not done.returncode and _ENDED.issuperset(states)):
            raise LaunchError(
                f"SLURM_JOB_ID={job}: this job has ended; in a shell that has outlived its job, run unset ${{!SLURM_*}}"
            )
        return not done.returncode


def end_in(output: str, job: str) -> float | None:
    """Return the end of a job, or None, from the output of ``squeue``: a line with id and end for each array task."""
    ends = dict(line.split()[:2] for line in output.splitlines() if len(line.split()) >= 2)
    end = ends.get(job, "")
    return float(end) if end.isdigit() else None  # for jobs without a time limit the value is not a number


def _log_pattern(batch: Batch) -> str:
    """Return the path of the output file, with Slurm's placeholders for the job id and the task index.

    Raises:
        ConfigError: The path contains a backslash, which Slurm interprets.
    """
    folder = str(batch.log_dir)
    if "\\" in folder:
        raise ConfigError(f"--run-dir {batch.run_dir}: Slurm cannot write logs to a path with a backslash; rename it")
    return folder.replace("%", "%%") + ("/%A_%a.log" if batch.in_tasks else "/%j.log")


def _options(batch: Batch) -> list[str]:
    resources = batch.resources
    options = [f"--job-name={batch.name}", f"--output={_log_pattern(batch)}", "--open-mode=append"]
    options.append("--requeue" if resources.requeue else "--no-requeue")
    if resources.warning_s:
        options.append(f"--signal=B:USR1@{resources.warning_s}")
    for name in ("dependency", "mail_type", "mail_user"):
        options += _flag(name, getattr(resources, name))
    if batch.in_tasks:
        options.append(f"--array={batch.array}")
    if resources.ps_nodes:
        options += [*_servers(batch), *_shared(batch, resources.ps_partition or resources.partition), "hetjob"]
    if resources.spare_hosts:
        options.append("--no-kill")  # the allocation must survive a lost node
    options += [f"--nodes={resources.nodes + resources.spare_hosts}", f"--ntasks-per-node={resources.ranks_per_node}"]
    for name in ("cpus_per_task", "mem", "mem_per_cpu", "gpus", "gpus_per_node", "gres", "constraint"):
        options += _flag(name, getattr(resources, name))
    if resources.gpus_per_task is not None:
        options.append(_gpus(batch))
    return [*options, *_shared(batch, resources.partition), *_extra(batch)]


def _servers(batch: Batch) -> list[str]:
    """Return the options of a heterogeneous job's first component, the servers."""
    resources = batch.resources
    options = [f"--nodes={resources.ps_nodes}", f"--ntasks-per-node={resources.ps_tasks_per_node}"]
    options += _flag("cpus_per_task", resources.ps_cpus_per_task)
    return options + _flag("mem", resources.ps_mem) + _flag("constraint", resources.ps_constraint)


def _shared(batch: Batch, partition: str | None) -> list[str]:
    """Return the options that both components of a heterogeneous job need."""
    resources = batch.resources
    options = _flag("partition", partition)
    for name in ("account", "qos", "time", "reservation"):
        options += _flag(name, getattr(resources, name))
    options += [f"--exclude={','.join(batch.bad_hosts)}"] if batch.bad_hosts else []
    return options + (["--exclusive"] if resources.exclusive else [])


def _gpus(batch: Batch) -> str:
    """Return the option for GPUs per rank; for ``mpirun`` per node, because Slurm's tasks are then its daemons."""
    resources = batch.resources
    if batch.starter == "srun":
        return f"--gpus-per-task={resources.gpus_per_task}"
    kind = str(resources.gpus_per_task).rpartition(":")
    return f"--gpus-per-node={kind[0]}{kind[1]}{resources.node_gpus}"


def _extra(batch: Batch) -> list[str]:
    words = []
    for line in batch.extra:
        try:
            words += shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"--sbatch {line!r}: {error}; quote it as for the sbatch command") from error
    for word in words:
        if not word.startswith("-") or (not word.startswith("--") and len(word) == 2):
            raise ConfigError(f"--sbatch {word!r}: give sbatch flags in their long form, such as --licenses=matlab")
    return words


def _flag(name: str, value: object) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}={value}"]


def _quoted(option: str) -> str:
    """Quote an option for an ``#SBATCH`` line, where sbatch interprets only double quotes and backslashes."""
    name, equals, value = option.partition("=")
    if not equals or _DIRECT.fullmatch(value):
        return plain(name, _PREFIX) + equals + value
    text = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{plain(name, _PREFIX)}="{text}"'


def _tasks(per_node: str) -> list[int]:
    """Return the number of tasks of each node from ``SLURM_TASKS_PER_NODE``, such as ``4(x2),3``; empty if invalid."""
    counts = []
    for part in per_node.split(","):
        tasks, _, times = part.removesuffix(")").partition("(x")
        if not tasks.isdigit() or (times and not times.isdigit()):
            return []
        counts += [int(tasks)] * int(times or 1)
    return counts


def _state(name: str) -> JobState:
    return JobState(name, name in _ENDED, succeeded=name == "COMPLETED", is_cleaning_up=name == "COMPLETING")


def _state_in(output: str, job: str) -> str:
    """Return the state of a job from lines ``ID|STATE``; empty if there is none.

    Components of a heterogeneous job are ``JOB+N``. Tasks that never started may share a line ``JOB_[INDEXES]``.
    """
    states = {}
    for line in output.splitlines():
        name, _, state = line.partition("|")
        states[re.sub(r"\+\d+$|_\[.*", "", name)] = (state.split() or [""])[0]  # CANCELLED may be followed by a user
    return states.get(job) or states.get(job.partition("_")[0], "")


def _query(*words: str) -> str | None:
    """Return the output of one of Slurm's commands; None if the command failed or did not answer."""
    done = query(words)
    return None if done is None or (done.returncode and "Invalid job id" not in done.stderr) else done.stdout
