"""The resources that a batch job requests, independent of the batch system."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError
from ..plan.option import OptionGroup, flag, option

_DURATION = re.compile(
    r"(?P<m>\d+)(:(?P<s>\d+))?|(?P<h>\d+):(?P<hm>\d+):(?P<hs>\d+)|(?P<d>\d+)-(?P<dh>\d+)(:(?P<dm>\d+)(:(?P<ds>\d+))?)?"
)
_SECONDS = {"d": 86400, "h": 3600, "dh": 3600, "m": 60, "hm": 60, "dm": 60, "s": 1, "hs": 1, "ds": 1}
_MEMORY = re.compile(r"\d+[KMGT]?", re.IGNORECASE)
_ARRAY = re.compile(r"(\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*)?(%\d+)?")


@dataclass(frozen=True)
class Resources(OptionGroup):
    """The resources of the batch job.

    The scheduler's defaults apply to options that are None.

    Raises:
        ConfigError: A value is invalid, or options contradict each other.
    """

    nodes: int = option(1, "Number of nodes.", "N", minimum=1, also="-N", is_common=True)
    spare_hosts: int = option(
        0,
        "Extra nodes that stay idle; a node that is lost is replaced by one of them. Ranks restart at most 3 N times.",
        "N",
        minimum=0,
    )
    ntasks: int | None = option(
        None, "Total number of ranks, without servers of --ps-nodes.", "N", minimum=1, also="-n"
    )
    tasks_per_node: int | None = option(
        None,
        "Ranks per node.",
        "N",
        minimum=1,
        default_text="one per GPU, else 1",
        also="--ntasks-per-node",
        is_common=True,
    )
    cpus_per_task: int | None = option(None, "Cores per rank.", "N", minimum=1, is_common=True)
    gpus: str | None = option(None, "GPUs of the whole job.", "[TYPE:]N")
    gpus_per_node: str | None = option(None, "GPUs per node.", "[TYPE:]N", is_common=True)
    gpus_per_task: str | None = option(None, "GPUs per rank.", "[TYPE:]N")
    gres: str | None = option(None, "Generic resources per node.", "NAME[:TYPE]:N,...")
    mem: str | None = option(None, "Memory per node, such as 16G.", "SIZE", is_common=True)
    mem_per_cpu: str | None = option(None, "Memory per core.", "SIZE")
    time: str | None = option(None, "Time limit: minutes, HH:MM:SS or D-HH:MM:SS.", "TIME", also="-t", is_common=True)
    partition: str | None = option(None, "Partition or queue.", "NAME", also="-p", is_common=True)
    account: str | None = option(None, "Account or project to charge.", "NAME", also="-A", is_common=True)
    qos: str | None = option(None, "Quality of service.", "NAME")
    constraint: str | None = option(None, "Required node features.", "FEATURES")
    array: str | None = option(None, "Array indexes; add %N to run at most N tasks at once.", "0-9%2")
    dependency: str | None = option(
        None, "Dependency on other jobs, in the batch system's syntax, such as afterok:123.", "WHAT"
    )
    mail_type: str | None = option(None, "Events for which to send mail, such as END,FAIL.", "WHEN")
    mail_user: str | None = option(None, "Mail address to notify.", "ADDRESS")
    exclusive: bool = option(False, "Do not share the nodes with other jobs.")
    reservation: str | None = option(None, "Reservation to use.", "NAME")
    requeue: bool = option(True, "Requeue the job automatically after preemption and at the time limit.")
    signal_secs: int | None = option(
        None,
        "Save and stop this many seconds before the time limit.",
        "S",
        minimum=0,
        default_text="60, at most 5 % of --time",
    )
    ps_nodes: int = option(0, "Extra nodes for parameter servers; makes the job heterogeneous.", "N", minimum=0)
    ps_tasks_per_node: int = option(1, "Parameter servers per server node.", "N", minimum=1)
    ps_cpus_per_task: int | None = option(None, "Cores per server.", "N", minimum=1)
    ps_mem: str | None = option(None, "Memory per server node.", "SIZE")
    ps_partition: str | None = option(None, "Partition of the server nodes.", "NAME", default_text="--partition")
    ps_constraint: str | None = option(None, "Required features of the server nodes.", "FEATURES")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mem", "mem_per_cpu", "ps_mem"):
            self._matches(name, _MEMORY, "a number with an optional K, M, G or T, such as 16G")
        self._matches("array", _ARRAY, "indexes such as 0-9, 1,3,5 or 0-9%2")
        if self.time is not None and (self.signal_secs or 0) >= seconds_of(self.time):
            raise ConfigError(
                f"--signal-secs {self.signal_secs} must be less than the {seconds_of(self.time)} seconds of --time "
                f"{self.time}; change one"
            )
        self._check_ntasks()
        if self.mem is not None and self.mem_per_cpu is not None:
            raise ConfigError("--mem and --mem-per-cpu are both given; remove one")
        if self.gpus is not None and self.gpus_per_node is not None:
            raise ConfigError("--gpus and --gpus-per-node are both given; remove one")
        if self.gpus is not None and self.spare_hosts:
            raise ConfigError("--gpus is a number for all nodes; with --spare-hosts, give --gpus-per-node instead")
        if self.ps_nodes and self.array is not None:
            raise ConfigError("--ps-nodes (a heterogeneous job) cannot be combined with --array; remove one")

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node: as given, else one per GPU, else 1."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        if self.ntasks is not None:
            return self.ntasks // self.nodes
        if self.gpus_per_node is not None:
            return _number_in(self.gpus_per_node) or 1
        if self.gpus is not None:
            return max(1, (_number_in(self.gpus) or 1) // self.nodes)
        return 1

    @property
    def node_gpus(self) -> int:
        """GPUs per node as given by the options, ignoring ``gres``; 0 for none."""
        if self.gpus_per_node is not None:
            return _number_in(self.gpus_per_node)
        if self.gpus_per_task is not None:
            return _number_in(self.gpus_per_task) * self.ranks_per_node
        return 0 if self.gpus is None else -(-_number_in(self.gpus) // self.nodes)

    @property
    def servers(self) -> int:
        """Total number of ranks on the server nodes."""
        return self.ps_nodes * self.ps_tasks_per_node if self.ps_nodes else 0

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node + self.servers

    @property
    def warning_s(self) -> int:
        """Seconds before the time limit at which the run is asked to save and stop."""
        if self.signal_secs is not None:
            return self.signal_secs
        return 60 if self.time is None else min(60, seconds_of(self.time) // 20)

    def _check_ntasks(self) -> None:
        if self.ntasks is None:
            return
        if self.ntasks % self.nodes:
            raise ConfigError(f"--ntasks {self.ntasks} must be a multiple of --nodes {self.nodes}; change one")
        if self.tasks_per_node is not None and self.ntasks != self.nodes * self.tasks_per_node:
            raise ConfigError(
                f"--ntasks {self.ntasks} differs from --nodes {self.nodes} times --tasks-per-node "
                f"{self.tasks_per_node}; remove one of them"
            )

    def _matches(self, name: str, pattern: re.Pattern[str], valid: str) -> None:
        value = getattr(self, name)
        if value is not None and not (value and pattern.fullmatch(value)):
            raise ConfigError(f"{flag(name)} is {value!r}: must be {valid}")


def seconds_of(duration: str) -> int:
    """Convert a Slurm duration (``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``) to seconds.

    Raises:
        ConfigError: The text is not a duration, or the duration is zero.
    """
    match = _DURATION.fullmatch(duration)
    seconds = sum(int(n) * _SECONDS[unit] for unit, n in match.groupdict().items() if n) if match else 0
    if not seconds:
        raise ConfigError(f"--time is {duration!r}: must be minutes, HH:MM:SS or D-HH:MM:SS, such as 02:30:00")
    return seconds


def _number_in(gpus: str) -> int:
    """Return ``N`` of ``[TYPE:]N``."""
    number = gpus.rpartition(":")[2]
    if not number.isdigit():
        raise ConfigError(f"{gpus!r} is not a number of GPUs; give a number, or a type and a number, such as a100:4")
    return int(number)
