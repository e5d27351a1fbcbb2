"""PBS (PBS Professional, OpenPBS)."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import ConfigError
from .base import BatchSystem, Directives
from .job import Batch, one_line, plain, run_command, shell
from .resources import seconds_of

_PREFIX = "#PBS"


class Pbs(BatchSystem):
    """PBS."""

    name = "pbs"
    title = "PBS"
    prefix = _PREFIX
    submit_command = ("qsub",)
    id_pattern = r"^(\S+)"
    index_variable = "PBS_ARRAY_INDEX"
    id_variables = ("PBS_JOBID",)
    allocation_variable = "PBS_NODEFILE"
    unsupported = ("spare_hosts", "qos", "constraint", "gres", "ps_nodes")

    def directives(self, batch: Batch) -> Directives:
        resources = batch.resources
        lines = [
            f"-N {_name(batch.name)}",
            "-j oe",
            f"-o {plain(str(batch.log_dir), _PREFIX)}/",
            f"-l select={_chunk(batch)}",
        ]
        if resources.time is not None:
            lines.append(f"-l walltime={_clock(seconds_of(resources.time))}")
        lines.append("-l place=scatter" + (":excl" if resources.exclusive else ""))
        flags = {"-q": resources.partition or resources.reservation, "-A": resources.account, "-J": _array(batch)}
        flags |= {
            "-W": resources.dependency and f"depend={resources.dependency}",
            "-M": resources.mail_user,
            "-m": _mail_events(resources.mail_type),
        }
        lines += [f"{option} {plain(value, _PREFIX)}" for option, value in flags.items() if value]
        lines.append(f"-r {'y' if resources.requeue else 'n'}")
        return Directives(lines + [one_line(words) for words in batch.extra])

    def command(self, batch: Batch) -> str:
        return run_command(batch, "--hostfile", '"$PBS_NODEFILE"')

    def cancel_command(self, job_id: str, running: bool) -> list[str]:
        return ["qdel", job_id]

    def requeue_command(self, batch: Batch) -> str:
        # An array task cannot be submitted alone.
        return "" if batch.in_tasks else shell([*self.submit_command, batch.script])

    def log_path(self, batch: Batch, job_id: str) -> Path:
        return batch.log_dir  # PBS chooses the name of the log file


def _clock(seconds: int) -> str:
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
    text = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    return (text if text[:1].isalpha() else f"j{text}")[:230]
