"""Flux (flux-core).

A batch script is the initial program of a new Flux instance. Flux removes the variables of jobs from its environment,
except for ``FLUX_ENCLOSING_ID``, which is the id of the batch job. The options are described in flux-batch(1).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from ..errors import ConfigError
from ..plan.option import flag
from .base import BatchSystem, Directives, JobState, query
from .job import Batch, one_line, run_command, shell
from .resources import Resources, seconds_of

_UNQUOTABLE = re.compile(r"[\x00-\x1f\x7f]|\"\"\"")  # three double quotes begin a value of several lines
_ENDED = frozenset(["COMPLETED", "FAILED", "CANCELED", "TIMEOUT", "INACTIVE"])
_FORGOTTEN = JobState("no longer known to Flux", has_ended=True, is_known=False)


class Flux(BatchSystem):
    """Flux."""

    name = "flux"
    title = "Flux"
    prefix = "# flux:"
    submit_command = ("flux", "batch")
    id_pattern = r"^([ƒf]\w+)"
    id_variables = ("FLUX_ENCLOSING_ID",)
    unsupported = (
        *("spare_hosts", "gres", "mem", "mem_per_cpu", "qos", "reservation", "mail_type", "mail_user"),
        "ps_nodes",
    )
    # The broker sends SIGHUP to the script when its job receives SIGTERM.
    cancel_signals = ("TERM", "HUP")
    can_follow = True
    advice = (
        ("queue", "flux queue list lists the queues"),
        ("bank", "flux account view-user $USER lists your banks"),
        ("unsatisfiable", "flux resource list shows nodes, cores and GPUs"),
        ("unable to connect", "this machine is not part of a Flux instance; submit from a login node"),
    )

    def directives(self, batch: Batch) -> Directives:
        resources = batch.resources
        options = [("job-name", batch.name), ("output", _log_pattern(batch)), *_slots(resources)]
        if resources.time is not None:
            options.append(("time-limit", f"{seconds_of(resources.time)}s"))
            if resources.warning_s:
                options.append(("signal", f"SIGUSR1@{resources.warning_s}s"))
        requested = {
            "queue": resources.partition,
            "bank": resources.account,
            "requires": resources.constraint,
            "dependency": resources.dependency,
        }
        options += [(name, value) for name, value in requested.items() if value is not None]
        lines = [f"--{name}={_quoted(value, f'--{name}')}" for name, value in options]
        lines += ["--exclusive"] * resources.exclusive
        return Directives(lines + [_extra(line) for line in batch.extra])

    def command(self, batch: Batch) -> str:
        return run_command(batch, "--hosts", '"$(flux hostlist --expand --delimiter=, instance)"')

    def cancel_command(self, job_id: str, running: bool) -> list[str]:
        # flux cancel would kill the job after a few seconds, which may not suffice for a save.
        return ["flux", "job", "kill", "--signal=TERM", job_id] if running else ["flux", "cancel", job_id]

    def requeue_command(self, batch: Batch) -> str:
        return shell(["flux", "--parent", "batch", batch.script])

    def states(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        """Return the states of jobs; empty if Flux is not installed here or does not answer."""
        ids = sorted(set(job_ids))
        done = query(["flux", "jobs", "-n", "--format={id.f58} {status}", *ids]) if ids else None
        if done is None:
            return {}
        rows = [line.split() for line in done.stdout.splitlines()]
        states = {_ascii(row[0]): _state(row[1]) for row in rows if len(row) == 2}
        states |= {_ascii(job): _FORGOTTEN for job in ids if f" {job} unknown" in done.stderr}
        return {job: states[_ascii(job)] for job in ids if _ascii(job) in states}

    def current_ids(self, environ: Mapping[str, str]) -> set[str]:
        ids = super().current_ids(environ)
        return ids | {_ascii(job) for job in ids} | {"ƒ" + _ascii(job)[1:] for job in ids}


def _state(name: str) -> JobState:
    return JobState(name, name in _ENDED, succeeded=name == "COMPLETED", is_cleaning_up=name == "CLEANUP")


def _slots(resources: Resources) -> list[tuple[str, str]]:
    """Return the options for nodes, cores and GPUs: one slot per node, so that all nodes get the same number of each.

    Raises:
        ConfigError: A type of GPU is given.
    """
    for name in ("gpus", "gpus_per_node", "gpus_per_task"):
        value = getattr(resources, name)
        if value is not None and ":" in value:
            raise ConfigError(f"{flag(name)} {value}: Flux has no types of GPUs; give a number, and add --constraint")
    nodes = str(resources.nodes)
    cores = resources.ranks_per_node * (resources.cpus_per_task or 1)
    slots = [("nodes", nodes), ("nslots", nodes), ("cores-per-slot", str(cores))]
    return slots + ([("gpus-per-slot", str(resources.node_gpus))] if resources.node_gpus else [])


def _log_pattern(batch: Batch) -> str:
    """Return the path of the output file, with Flux's placeholder for the job id.

    Raises:
        ConfigError: The path contains a placeholder.
    """
    if "{{" in str(batch.log_dir):
        raise ConfigError(f"--run-dir {batch.run_dir}: Flux cannot write logs to a path with {{{{; rename it")
    return f"{batch.log_dir}/{{{{id}}}}.log"


def _extra(line: str) -> str:
    """Return the user's extra arguments, quoted again for a directive."""
    try:
        words = shlex.split(one_line(line))
    except ValueError as error:
        raise ConfigError(f"--sbatch {line!r}: {error}; quote it as for the flux batch command") from error
    return " ".join(_quoted(word, "--sbatch") for word in words)


def _quoted(value: str, option: str) -> str:
    """Quote a value for a directive, which Flux splits into words as a shell does.

    Raises:
        ConfigError: The value contains a line break, another control character, or three double quotes.
    """
    if _UNQUOTABLE.search(value):
        raise ConfigError(f"{option} {value!r}: a directive for Flux must be one line without three double quotes")
    return shlex.quote(value)


def _ascii(job_id: str) -> str:
    """Return a job id with ``f`` in place of ``ƒ``; commands print one or the other, depending on the locale."""
    return "f" + job_id[1:] if job_id.startswith("ƒ") else job_id
