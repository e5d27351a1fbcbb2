"""LSF: directives and the command of a batch job."""

from __future__ import annotations

import re

from ...process.signals import STOPPED_EARLY
from .job import Batch, one_line, plain, refuse, run_command
from .resources import seconds_of

PREFIX = "#BSUB"
INDEX = "LSB_JOBINDEX"


def directives(batch: Batch) -> list[str]:
    """Return the ``#BSUB`` directives, without the prefix.

    Raises:
        ConfigError: LSF does not support an option, or a value is not valid in a directive.
    """
    resources = batch.resources
    refuse(resources, ("qos", "gres", "ps_nodes"), "LSF")
    ranks = resources.ranks_per_node
    number = "%J_%I" if batch.in_tasks else "%J"
    lines = [f'-J "{_name(batch)}"', f"-o {plain(str(batch.log_dir), PREFIX)}/{number}.log", f"-n {resources.ranks}"]
    lines.append(f'-R "span[ptile={ranks}]"')
    if resources.cpus_per_task:
        lines.append(f'-R "affinity[core({resources.cpus_per_task})]"')
    if resources.constraint is not None:
        lines.append(f'-R "select[{plain(resources.constraint, PREFIX)}]"')
    memory = resources.mem or resources.mem_per_cpu
    if memory is not None:
        lines.append(f"-M {memory.upper() if memory[-1].isalpha() else memory + 'M'}")
    if resources.node_gpus:
        lines.append(f'-gpu "num={resources.node_gpus}:mode=shared"')
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
    lines += [f"{option} {plain(value, PREFIX)}" for option, value in flags.items() if value]
    lines += ["-N"] * (resources.mail_type is not None) + ["-x"] * resources.exclusive
    if resources.requeue:
        lines += ["-r", f"-Q {STOPPED_EARLY}"]  # LSF requeues a job that exits with this status
    return lines + [one_line(words) for words in batch.extra]


def command(batch: Batch) -> str:
    """Return the shell command that starts the ranks."""
    return run_command(batch, "LSB_DJOB_HOSTFILE")


def _name(batch: Batch) -> str:
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", batch.name)
    if not batch.in_tasks:
        return text
    # LSF array indexes start at 1.
    indexes, _, at_once = (batch.array or "").partition("%")
    shifted = re.sub(r"(?<!:)\b\d+", lambda number: str(int(number[0]) + 1), indexes)
    return f"{text}[{shifted}]" + (f"%{at_once}" if at_once else "")
