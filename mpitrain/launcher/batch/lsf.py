"""How LSF is told what a batch job wants."""

from __future__ import annotations

import re

from ...process.signals import STOPPED_EARLY
from .job import Batch, one_line, plain, refuse, shell
from .resources import seconds_of

PREFIX = "#BSUB"
INDEX = "LSB_JOBINDEX"


def directives(batch: Batch) -> list[str]:
    """Lines for ``#BSUB``.

    Raises:
        ConfigError: LSF has nothing of the kind, or cannot be told it in a line.
    """
    asked = batch.resources
    refuse(asked, ("qos", "gres", "ps_nodes"), "LSF")
    ranks = asked.ranks_per_node
    number = "%J_%I" if batch.in_tasks else "%J"
    lines = [f'-J "{_name(batch)}"', f"-o {plain(str(batch.log_dir), PREFIX)}/{number}.log", f"-n {asked.ranks}"]
    lines.append(f'-R "span[ptile={ranks}]"')
    if asked.cpus_per_task:
        lines.append(f'-R "affinity[core({asked.cpus_per_task})]"')
    if asked.constraint is not None:
        lines.append(f'-R "select[{plain(asked.constraint, PREFIX)}]"')
    memory = asked.mem or asked.mem_per_cpu
    if memory is not None:
        lines.append(f"-M {memory.upper() if memory[-1].isalpha() else memory + 'M'}")
    if asked.node_gpus:
        lines.append(f'-gpu "num={asked.node_gpus}:mode=shared"')
    if asked.time is not None:
        minutes = max(1, seconds_of(asked.time) // 60)
        lines.append(f"-W {minutes // 60}:{minutes % 60:02}")
        lines += ["-wa USR1", f"-wt {max(1, asked.warning_s // 60)}"]
    said = {"-q": asked.partition, "-P": asked.account, "-w": asked.dependency, "-U": asked.reservation}
    said["-u"] = asked.mail_user
    lines += [f"{option} {plain(value, PREFIX)}" for option, value in said.items() if value]
    lines += ["-N"] * (asked.mail_type is not None) + ["-x"] * asked.exclusive
    if asked.requeue:
        lines += ["-r", f"-Q {STOPPED_EARLY}"]  # LSF brings a job that exits with this status back by itself
    return lines + [one_line(words) for words in batch.extra]


def command(batch: Batch) -> str:
    """What starts the ranks, as a shell reads it."""
    words = [batch.python, "-m", "mpitrain", "run", "-n", str(batch.resources.ranks)]
    hosts = ' --hostfile "$LSB_DJOB_HOSTFILE"' if batch.resources.nodes > 1 else ""
    return f"{shell(words)}{hosts} {shell(batch.arguments)}"


def _name(batch: Batch) -> str:
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", batch.name)
    if not batch.in_tasks:
        return text
    # LSF counts from one.
    indexes, _, at_once = (batch.array or "").partition("%")
    shifted = re.sub(r"(?<!:)\b\d+", lambda number: str(int(number[0]) + 1), indexes)
    return f"{text}[{shifted}]" + (f"%{at_once}" if at_once else "")
