"""LSF."""

from __future__ import annotations

import re

from ..process.signals import STOPPED_EARLY
from .base import BatchSystem, Directives
from .job import Batch, one_line, plain, run_command
from .resources import Resources, seconds_of

_PREFIX = "#BSUB"


class Lsf(BatchSystem):
    """LSF."""

    name = "lsf"
    title = "LSF"
    prefix = _PREFIX
    submit_command = ("bsub",)
    reads_stdin = True  # bsub parses directives only from standard input
    id_pattern = r"<(\d+)>"
    index_variable = "LSB_JOBINDEX"
    first_index = 1
    id_variables = ("LSB_JOBID",)
    allocation_variable = "LSB_JOBID"
    unsupported = ("spare_hosts", "qos", "gres", "ps_nodes")
    requeue_status = STOPPED_EARLY

    def directives(self, batch: Batch) -> Directives:
        resources = batch.resources
        number = "%J_%I" if batch.in_tasks else "%J"
        lines = [f'-J "{_name(batch)}"', f"-o {plain(str(batch.log_dir), _PREFIX)}/{number}.log"]
        lines += [f"-n {resources.ranks}", f'-R "span[ptile={resources.ranks_per_node}]"', *_node_options(resources)]
        if resources.time is not None:
            minutes = max(1, seconds_of(resources.time) // 60)
            lines.append(f"-W {minutes // 60}:{minutes % 60:02}")
            lines += ["-wa USR1", f"-wt {max(1, resources.warning_s // 60)}"]
        flags = {
            "-q": resources.partition,
            "-P": resources.account,
            "-w": resources.dependency,
            "-U": resources.reservation,
            "-u": resources.mail_user,
        }
        lines += [f"{option} {plain(value, _PREFIX)}" for option, value in flags.items() if value]
        lines += ["-N"] * (resources.mail_type is not None) + ["-x"] * resources.exclusive
        if resources.requeue:
            lines += ["-r", f"-Q {self.requeue_status}"]
        return Directives(lines + [one_line(words) for words in batch.extra])

    def command(self, batch: Batch) -> str:
        return run_command(batch, "--hostfile", '"$LSB_DJOB_HOSTFILE"')

    def cancel_command(self, job_id: str, running: bool) -> list[str]:
        return ["bkill", *(["-s", "TERM"] if running else []), job_id]


def _node_options(resources: Resources) -> list[str]:
    """Return the options for a node's cores, features, memory and GPUs."""
    options = []
    if resources.cpus_per_task:
        options.append(f'-R "affinity[core({resources.cpus_per_task})]"')
    if resources.constraint is not None:
        options.append(f'-R "select[{plain(resources.constraint, _PREFIX)}]"')
    memory = resources.mem or resources.mem_per_cpu
    if memory is not None:
        options.append(f"-M {memory.upper() if memory[-1].isalpha() else memory + 'M'}")
    if resources.node_gpus:
        options.append(f'-gpu "num={resources.node_gpus}:mode=shared"')
    return options


def _name(batch: Batch) -> str:
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", batch.name)
    if not batch.in_tasks:
        return text
    # LSF array indexes start at 1.
    indexes, _, at_once = (batch.array or "").partition("%")
    shifted = re.sub(r"(?<!:)\b\d+", lambda number: str(int(number[0]) + 1), indexes)
    return f"{text}[{shifted}]" + (f"%{at_once}" if at_once else "")
