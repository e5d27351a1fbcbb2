"""How PBS (PBS Professional, OpenPBS) is told what a batch job wants."""

from __future__ import annotations

import re

from ...errors import ConfigError
from .job import Batch, one_line, plain, refuse, shell
from .resources import seconds_of

PREFIX = "#PBS"
INDEX = "PBS_ARRAY_INDEX"


def directives(batch: Batch) -> list[str]:
    """Lines for ``#PBS``.

    Raises:
        ConfigError: PBS has nothing of the kind, or cannot be told it in a line.
    """
    asked = batch.resources
    refuse(asked, ("qos", "constraint", "gres", "ps_nodes"), "PBS")
    lines = [
        f"-N {_name(batch.name)}",
        "-j oe",
        f"-o {plain(str(batch.log_dir), PREFIX)}/",
        f"-l select={_chunk(batch)}",
    ]
    if asked.time is not None:
        lines.append(f"-l walltime={clock(seconds_of(asked.time))}")
    lines.append("-l place=scatter" + (":excl" if asked.exclusive else ""))
    said = {"-q": asked.partition or asked.reservation, "-A": asked.account, "-J": _array(batch)}
    said |= {
        "-W": asked.dependency and f"depend={asked.dependency}",
        "-M": asked.mail_user,
        "-m": _rpc(asked.mail_type),
    }
    lines += [f"{option} {plain(value, PREFIX)}" for option, value in said.items() if value]
    lines.append(f"-r {'y' if asked.requeue else 'n'}")
    return lines + [one_line(words) for words in batch.extra]


def command(batch: Batch) -> str:
    """What starts the ranks, as a shell reads it."""
    words = [batch.python, "-m", "mpitrain", "run", "-n", str(batch.resources.ranks)]
    hosts = ' --hostfile "$PBS_NODEFILE"' if batch.resources.nodes > 1 else ""
    return f"{shell(words)}{hosts} {shell(batch.arguments)}"


def again(batch: Batch) -> str:
    """What brings the job back; nothing for a task of an array, which cannot be submitted alone."""
    return "" if batch.in_tasks else shell(["qsub", batch.script])


def clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _chunk(batch: Batch) -> str:
    asked = batch.resources
    ranks = asked.ranks_per_node
    cores = ranks * (asked.cpus_per_task or 1)
    chunk = f"{asked.nodes}:ncpus={cores}:mpiprocs={ranks}"
    if asked.node_gpus:
        chunk += f":ngpus={asked.node_gpus}"
    if asked.mem is not None or asked.mem_per_cpu is not None:
        size = re.fullmatch(r"(\d+)([KMGT]?)", (asked.mem or asked.mem_per_cpu or "").upper())
        assert size is not None
        chunk += f":mem={int(size[1]) * (1 if asked.mem is not None else cores)}{(size[2] or 'M').lower()}b"
    return chunk


def _array(batch: Batch) -> str | None:
    if not batch.in_tasks:
        return None
    if "," in (batch.array or ""):
        raise ConfigError(f"--array {batch.array}: PBS takes one range of indexes, such as 0-9")
    return batch.array


def _rpc(when: str | None) -> str:
    known = {"BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe", "NONE": "n"}
    return "".join(known.get(word.strip().upper(), "") for word in (when or "").split(","))


def _name(name: str) -> str:
    """A name as PBS takes it: no blanks, a letter first, at most 230 characters."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:230]
    return text if text[:1].isalpha() else f"j{text}"
