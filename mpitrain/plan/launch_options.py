"""How ``mpitrain run`` starts the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ConfigError
from .option import OptionGroup, option


@dataclass(frozen=True)
class LaunchOptions(OptionGroup):
    """How the ranks are started.

    These are the options of ``mpitrain run`` that are not options of the run.

    Raises:
        ConfigError: A number is outside of its limits, or ``stage_env`` is not an absolute path.
    """

    ranks: int | None = option(
        None,
        "Number of ranks.",
        "N",
        minimum=1,
        default_text="all slots of --hosts, or all tasks of the allocation; else 1",
        also="-n",
        is_common=True,
    )
    hosts: str | None = option(
        None, "Hosts to run on.", "HOST:RANKS,...", default_text="this host", is_common=True, names_hosts=True
    )
    hostfile: Path | None = option(None, "File with the hosts, one per line.", "FILE", names_hosts=True)
    remote_agent: str | None = option(
        None,
        "Program that starts processes on other hosts, such as ssh.",
        "PROGRAM",
        default_text="ssh",
        names_hosts=True,
    )
    network: str | None = option(
        None, "Network between the hosts: a subnet such as 10.1.0.0/16, or an interface name.", "NET", names_hosts=True
    )
    env: tuple[str, ...] = option(
        (), "Set an environment variable for the ranks; may be repeated.", "NAME[=VALUE]", is_repeated=True
    )
    launcher_args: str | None = option(None, "Extra arguments for mpirun, quoted as in a shell.", "WORDS")
    max_restarts: int = option(
        0,
        "Restart from the newest state after a rank or host has died, at most N times.",
        "N",
        minimum=0,
        is_common=True,
        is_for_restarts=True,
    )
    recover: Literal["memory", "checkpoint"] | None = option(
        None,
        "State that --max-restarts restarts from: the newest state, which is kept in memory, or the newest checkpoint.",
        default_text="memory",
        is_for_restarts=True,
    )
    min_ranks: int | None = option(
        None,
        "Restart without lost hosts if the remaining hosts have slots for at least M ranks.",
        "M",
        minimum=1,
        is_for_restarts=True,
    )
    spare_hosts: int = option(
        0,
        "Leave the last N hosts idle; a host that is lost is replaced by one of them at the restart.",
        "N",
        minimum=0,
        is_for_restarts=True,
    )
    link_timeout: float = option(30.0, "End the ranks if another host has not answered for S seconds.", "S", minimum=5)
    stage_env: Path | None = option(
        None,
        "Copy the Python environment to FOLDER on a disk of every host, such as /tmp, and start the ranks from there.",
        "FOLDER",
    )
    show_binding: bool = option(
        False, "Print rank, host, cores, NUMA nodes and devices of every rank before they work.", has_negative=False
    )
    debug: int | None = option(
        None,
        "Give standard input, such as the terminal, to RANK, so that breakpoint() works there; hangs are not detected.",
        "RANK",
        minimum=0,
    )
    dry_run: bool = option(False, "Print the command without running it.", has_negative=False, is_common=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_disk(self.stage_env)


def check_disk(folder: Path | None) -> None:
    """Check that the value of ``--stage-env`` is an absolute path; an empty one comes from a variable that is not set.

    Raises:
        ConfigError: The path is relative.
    """
    if folder is not None and not folder.is_absolute():
        raise ConfigError(f"--stage-env {folder}: must be an absolute path on a disk of every host, such as /tmp")
