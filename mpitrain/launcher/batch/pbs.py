"""PBS (PBS Professional, OpenPBS): directives and the command of a batch job."""

from __future__ import annotations

import re

from ...errors import ConfigError
from .job import Batch, one_line, plain, refuse, run_command, shell
from .resources import seconds_of

PREFIX = "#PBS"
INDEX = "PBS_ARRAY_INDEX"


def directives(batch: Batch) -> list[str]:
    """Return the ``#PBS`` directives, without the prefix.

    Raises:
        ConfigError: PBS does not support an option, or a value is not valid in a directive.
    """
    resources = batch.resources
    refuse(resources, ("qos", "constraint", "gres", "ps_nodes"), "PBS")
    lines = [
        f"-N {_name(batch.name)}",
        "-j oe",
        f"-o {plain(str(batch.log_dir), PREFIX)}/",
        f"-l select={_chunk(batch)}",
    ]
    if resources.time is not None:
        lines.append(f"-l walltime={clock(seconds_of(resources.time))}")
    lines.append("-l place=scatter" + (":excl" if resources.exclusive else ""))
    flags = {"-q": resources.partition or resources.reservation, "-A": resources.account, "-J": _array(batch)}
    flags |= {
        "-W": resources.dependency and f"depend={resources.dependency}",
        "-M": resources.mail_user,
        "-m": _mail_events(resources.mail_type),
    }
    lines += [f"{option} {plain(value, PREFIX)}" for option, value in flags.items() if value]
    lines.append(f"-r {'y' if resources.requeue else 'n'}")
    return lines + [one_line(words) for words in batch.extra]


def command(batch: Batch) -> str:
    """Return the shell command that starts the ranks."""
    return run_command(batch, "PBS_NODEFILE")


def again(batch: Batch) -> str:
    """Return the command that resubmits the job; empty for an array task, which cannot be submitted alone."""
    return "" if batch.in_tasks else shell(["qsub", batch.script])


def clock(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _chunk(batch: Batch) -> str:
    resources = batch.resources
    ranks = resources.ranks_per_node
    cores = ranks * (resources.cpus_per_task or 1)
    chunk = f"{resources.nodes}:ncpus={cores}:mpiprocs={ranks}"
    if resources.node_gpus:
        chunk += f":ngpus={resources.node_gpus}"
    if resources.mem is not None or resources.mem_per_cpu is not None:
        size = re.fullmatch(r"(\d+)([KMGT]?)", (resources.mem or resources.mem_per_cpu or "").upper())
        assert size is not None
        chunk += f":mem={int(size[1]) * (1 if resources.mem is not None else cores)}{(size[2] or 'M').lower()}b"
    return chunk


def _array(batch: Batch) -> str | None:
    if not batch.in_tasks:
        return None
    if "," in (batch.array or ""):
        raise ConfigError(f"--array {batch.array}: PBS supports only one range of indexes, such as 0-9")
    return batch.array


def _mail_events(when: str | None) -> str:
    known = {"BEGIN": "b", "END": "e", "FAIL": "a", "ALL": "abe", "NONE": "n"}
    return "".join(known.get(word.strip().upper(), "") for word in (when or "").split(","))


def _name(name: str) -> str:
    """Return a valid PBS job name: no blanks, a letter first, at most 230 characters."""
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)[:230]
    return text if text[:1].isalpha() else f"j{text}"
