"""``mpitrain horovodrun``: the flags of Horovod's launcher as those of ``mpitrain run``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ..errors import ConfigError

_ALIASES = {
    "--num-proc": "-np", "--hosts": "-H", "-hostfile": "--hostfile", "--network-interfaces": "--network-interface",
    "--min-num-proc": "--min-np", "--max-num-proc": "--max-np", "--ssh-port": "-p", "--ssh-identity-file": "-i",
}  # fmt: skip

# Flags that become flags of ``mpitrain run``, and those that become variables of ``mpitrain.horovod``.
_FLAGS = {
    "-np": "--ranks",
    "-H": "--hosts",
    "--hostfile": "--hostfile",
    "--network-interface": "--network",
    "--min-np": "--min-ranks",
    "--reset-limit": "--max-restarts",
    "--mpi-args": "--launcher-args",
}
_VARIABLES = {
    "--cycle-time-ms": "HOROVOD_CYCLE_TIME",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "--fusion-threshold-mb": "HOROVOD_FUSION_THRESHOLD",
}
_SWITCHES = {
    "--timeline-mark-cycles": ("--env", "HOROVOD_TIMELINE_MARK_CYCLES=1"),
    "--no-timeline-mark-cycles": (),
    "--no-stall-check": ("--env", "HOROVOD_STALL_CHECK_DISABLE=1"),
    "--stall-check": (),
    "--mpi": (),
}
_SSH = {"-p": "-p", "-i": "-i"}

# What users of other flags should do.
_INSTEAD = {
    "--gloo": "remove it: the ranks communicate over MPI",
    "--jsrun": "remove it: in a batch job of LSF, mpitrain run uses the job's hosts",
    "--tcp": "use --mpi-args to choose MPI's transports",
    "--binding-args": "pass them with --mpi-args",
    "--output-filename": "use 'mpitrain run --run-dir DIR': DIR/logs has the output of each rank",
    "--prefix-output-with-timestamp": "remove it: the logs in the run directory have no timestamps",
    "--start-timeout": "remove it: hosts that do not answer are named within 15 s",
    "--host-discovery-script": "list the hosts with -H; with --min-np, restarts leave out hosts that are lost",
    "--max-np": "use -np: ranks are not added to a run",
    "--slots-per-host": "give the number of ranks of each host, as in -H a:4,b:4",
    "--elastic-timeout": "remove it: a restart begins at once",
    "--blacklist-cooldown-range": "remove it: hosts that are lost are left out of restarts",
    "--check-build": "use 'mpitrain doctor'",
    "-cb": "use 'mpitrain doctor'",
    "--config-file": "give the flags on the command line",
    "--verbose": "use 'mpitrain run --dry-run' to see the command that starts the ranks",
    "--mpi-threads-disable": "remove it: threads are needed",
}
_NO_EFFECT = "remove it: the engine has no such setting"


@dataclass
class _Translation:
    """The words of ``mpitrain run`` for those of ``horovodrun``."""

    words: list[str] = field(default_factory=list)
    ssh: list[str] = field(default_factory=list)

    def add(self, flag: str, value: str) -> None:
        if flag in _SSH:
            self.ssh += [_SSH[flag], value]
        elif flag in _VARIABLES:
            if flag == "--fusion-threshold-mb":
                value = str(int(_number(flag, value) * (1 << 20)))
            self.words += ["--env", f"{_VARIABLES[flag]}={value}"]
        else:
            self.words += [_FLAGS[flag], value]

    def result(self, command: Sequence[str]) -> list[str]:
        agent = ["--remote-agent", shlex.join(["ssh", *self.ssh])] if self.ssh else []
        return [*self.words, *agent, "--", *command]


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``mpitrain run`` for those of ``horovodrun``.

    Raises:
        ConfigError: A flag has another equivalent, which the message names, or none; or there is no command.
    """
    translation, rest = _Translation(), list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = _ALIASES.get(flag, flag)
        if flag in _SWITCHES:
            translation.words += _SWITCHES[flag]
        elif flag in _FLAGS or flag in _VARIABLES or flag in _SSH:
            if not equals and not rest:
                raise ConfigError(f"horovodrun: {word} needs a value")
            translation.add(flag, value if equals else rest.pop(0))
        else:
            raise ConfigError(
                f"horovodrun: {word.partition('=')[0]} is not supported; {_INSTEAD.get(flag, _NO_EFFECT)}"
            )
    command = rest[1:] if rest[:1] == ["--"] else rest
    if not command:
        raise ConfigError(
            "horovodrun: there is no command; give one, such as mpitrain horovodrun -np 4 python train.py"
        )
    return translation.result(command)


def _number(flag: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"horovodrun: {flag} {value} is not a number") from None


class HorovodRunCommand(click.Command):
    """``mpitrain horovodrun``.

    Args:
        run: ``mpitrain run``, called with its arguments.
    """

    def __init__(self, run: Callable[[list[str]], Any]) -> None:
        accepted = {*_FLAGS, *_VARIABLES, *_SWITCHES, *_SSH}
        known = ", ".join(sorted(accepted | {alias for alias, flag in _ALIASES.items() if flag in accepted}))
        super().__init__(
            "horovodrun",
            callback=lambda words: run(translate(words)),
            params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS] COMMAND [ARGUMENTS]")],
            help="Start ranks with the flags of Horovod's launcher. Use 'mpitrain run' for new scripts. "
            f"Flags that are accepted: {known}.",
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] in (["--help"], ["-h"], []):
            return super().parse_args(ctx, ["--help"])
        ctx.params = {"words": tuple(args)}
        return []


def horovodrun_command() -> HorovodRunCommand:
    """Return ``mpitrain horovodrun``."""
    from .run import RunCommand

    return HorovodRunCommand(lambda words: RunCommand().main(words, prog_name="mpitrain run", standalone_mode=False))
