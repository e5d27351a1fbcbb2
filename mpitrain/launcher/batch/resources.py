"""What a batch job asks a scheduler for, whichever scheduler that is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError
from ...plan.config import flag

_DURATION = re.compile(
    r"(?P<m>\d+)(:(?P<s>\d+))?|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<d>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
)
_SECONDS = {"d": 86400, "h": 3600, "dh": 3600, "m": 60, "hm": 60, "dm": 60, "s": 1, "hs": 1, "ds": 1}
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_ARRAY = re.compile(r"(\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*)?(%\d+)?")


def _option(help: str, metavar: str | None = None, default: Any = None) -> Any:
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True)
class Resources:
    """What to ask for; what is None is the site's to choose.

    Raises:
        ConfigError: A value cannot be meant; the message says what is valid.
    """

    nodes: int = _option("Nodes.", "N", 1)
    tasks_per_node: int | None = _option("Ranks on each node.  [default: one for each GPU, else 1]", "N")
    cpus_per_task: int | None = _option("Cores for each rank.", "N")
    gpus: str | None = _option("GPUs of the whole job.", "[TYPE:]N")
    gpus_per_node: str | None = _option("GPUs of each node.", "[TYPE:]N")
    gpus_per_task: str | None = _option("GPUs of each rank.", "[TYPE:]N")
    gres: str | None = _option("Generic resources of each node.", "NAME[:TYPE]:N,...")
    mem: str | None = _option("Memory of each node, such as 16G.", "SIZE")
    mem_per_cpu: str | None = _option("Memory for each core.", "SIZE")
    time: str | None = _option("Longest time: minutes, HH:MM:SS or D-HH:MM:SS.", "TIME")
    partition: str | None = _option("Partition or queue.", "NAME")
    account: str | None = _option("Account or project to charge.", "NAME")
    qos: str | None = _option("Quality of service.", "NAME")
    constraint: str | None = _option("Features that nodes must have.", "FEATURES")
    array: str | None = _option("Tasks of an array; %N for at most N at once.", "0-9%2")
    dependency: str | None = _option("Begin after other jobs, such as afterok:123.", "WHAT")
    mail_type: str | None = _option("When to send mail, such as END,FAIL.", "WHEN")
    mail_user: str | None = _option("Whom to send mail to.", "ADDRESS")
    exclusive: bool = _option("Share the nodes with nobody.", None, False)
    reservation: str | None = _option("Reservation to use.", "NAME")
    requeue: bool = _option("Go on by itself after preemption and at the time limit.", None, True)
    signal_secs: int | None = _option(
        "Ask the run to save and end so many seconds before the limit.  [default: 60, at most 5 % of the time]", "S"
    )
    ps_nodes: int = _option("Beside those, nodes for parameter servers: a heterogeneous job.", "N", 0)
    ps_tasks_per_node: int = _option("Servers on each of these.", "N", 1)
    ps_cpus_per_task: int | None = _option("Cores for each server.", "N")
    ps_mem: str | None = _option("Memory of each of their nodes.", "SIZE")
    ps_partition: str | None = _option("Their partition.  [default: --partition]", "NAME")
    ps_constraint: str | None = _option("Features that their nodes must have.", "FEATURES")

    def __post_init__(self) -> None:
        for name in ("nodes", "tasks_per_node", "cpus_per_task", "ps_tasks_per_node", "ps_cpus_per_task"):
            self._at_least(name, 1)
        for name in ("signal_secs", "ps_nodes"):
            self._at_least(name, 0)
        for name in ("mem", "mem_per_cpu", "ps_mem"):
            self._matches(name, _MEMORY, "a number and K, M, G or T, such as 16G")
        self._matches("array", _ARRAY, "indexes, such as 0-9, 1,3,5 or 0-9%2")
        if self.time is not None:
            seconds_of(self.time)
        if self.mem is not None and self.mem_per_cpu is not None:
            raise ConfigError("--mem and --mem-per-cpu are given: give the memory of a node or of a core, not both")
        if self.ps_nodes and self.array is not None:
            raise ConfigError(
                "--ps-nodes makes a heterogeneous job, and no scheduler has arrays of these: leave out one"
            )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node: as told, else one for each GPU."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        if self.gpus_per_node is not None:
            return _number_in(self.gpus_per_node) or 1
        if self.gpus is not None:
            return max(1, (_number_in(self.gpus) or 1) // self.nodes)
        return 1

    @property
    def node_gpus(self) -> int:
        """GPUs of each node as far as they are told in any way but ``gres``; 0 for none."""
        if self.gpus_per_node is not None:
            return _number_in(self.gpus_per_node)
        if self.gpus_per_task is not None:
            return _number_in(self.gpus_per_task) * self.ranks_per_node
        return 0 if self.gpus is None else -(-_number_in(self.gpus) // self.nodes)

    @property
    def servers(self) -> int:
        """Ranks on the servers' nodes."""
        return self.ps_nodes * self.ps_tasks_per_node if self.ps_nodes else 0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node + self.servers

    @property
    def warning_s(self) -> int:
        """Seconds before the limit at which the run is asked to end."""
        if self.signal_secs is not None:
            return self.signal_secs
        return 60 if self.time is None else min(60, seconds_of(self.time) // 20)

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ConfigError(f"{flag(name)} is {value}: give {least} or more")

    def _matches(self, name: str, pattern: re.Pattern[str], valid: str) -> None:
        value = getattr(self, name)
        if value is not None and not (value and pattern.fullmatch(value)):
            raise ConfigError(f"{flag(name)} is {value!r}: give {valid}")


def seconds_of(duration: str) -> int:
    """Seconds of a duration as Slurm writes it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``.

    Raises:
        ConfigError: It is none.
    """
    found = _DURATION.fullmatch(duration)
    seconds = sum(int(n) * _SECONDS[unit] for unit, n in found.groupdict().items() if n) if found else 0
    if not seconds:
        raise ConfigError(f"--time is {duration!r}: give minutes, HH:MM:SS or D-HH:MM:SS, such as 02:30:00")
    return seconds


def _number_in(gpus: str) -> int:
    """``N`` of ``[TYPE:]N``."""
    number = gpus.rpartition(":")[2]
    if not number.isdigit():
        raise ConfigError(f"{gpus!r} is no number of GPUs: give a number, or a type and a number, such as a100:4")
    return int(number)
