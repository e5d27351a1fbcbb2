"""``mpitrain horovodrun``: the flags of Horovod's launcher as those of ``mpitrain run``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

import click

from ..plan.options import examples
from ..version import __version__


def _option(names: str, metavar: str | None, help: str, kind: Any = None, **more: Any) -> click.Option:
    return click.Option(names.split(), metavar=metavar, help=help, type=kind, **more)


_COUNT, _NOT_NEGATIVE = click.IntRange(min=1), click.FloatRange(min=0)
# Options that are named after a variable set this variable for ``mpitrain.horovod``. Other options, except ``--mpi``
# and the options of ssh, are named after the flag of ``mpitrain run`` that replaces them.
_OPTIONS = [
    _option("ranks -np --num-proc", "N", "Number of ranks.", _COUNT),
    _option("hosts -H --hosts", "HOST:RANKS,...", "Hosts, and the ranks on each."),
    _option("hostfile -hostfile --hostfile", "FILE", "A file with hosts and ranks."),
    _option("network --network-interfaces --network-interface", "NAME", "Network interface."),
    _option("port -p --ssh-port", "PORT", "Port of ssh.", click.IntRange(1, 65535)),
    _option("identity -i --ssh-identity-file", "FILE", "Private key of ssh."),
    _option("launcher_args --mpi-args", "ARGS", "Further arguments of mpirun."),
    _option("min_ranks --min-np --min-num-proc", "N", "Restart without lost hosts, with at least N ranks.", _COUNT),
    _option("max_restarts --reset-limit", "N", "Maximum number of restarts.", click.IntRange(min=0)),
    _option(
        "HOROVOD_FUSION_THRESHOLD --fusion-threshold-mb", "MB", "Size of the buffer in which small tensors are fused.",
        _NOT_NEGATIVE, callback=lambda ctx, option, value: None if value is None else int(value * (1 << 20)),
    ),
    _option("HOROVOD_CYCLE_TIME --cycle-time-ms", "MS", "Time between two cycles.", _NOT_NEGATIVE),
    _option("HOROVOD_TIMELINE --timeline-filename", "FILE", "Write a timeline."),
    _option(
        "HOROVOD_TIMELINE_MARK_CYCLES --timeline-mark-cycles/--no-timeline-mark-cycles", None,
        "Show cycles in the timeline.",
    ),
    _option(
        "HOROVOD_STALL_CHECK_DISABLE --no-stall-check/--stall-check", None,
        "Do not report tensors that some ranks have not submitted.",
    ),
    _option(
        "HOROVOD_STALL_CHECK_TIME_SECONDS --stall-check-warning-time-seconds", "SECONDS",
        "Time until tensors that some ranks have not submitted are reported.", _NOT_NEGATIVE,
    ),
    _option(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS --stall-check-shutdown-time-seconds", "SECONDS",
        "Time until tensors that some ranks have not submitted are an error.", _NOT_NEGATIVE,
    ),
    _option("--mpi", None, "Without effect.", is_flag=True, expose_value=False),
]  # fmt: skip

# Replacements for the other flags of Horovod's launcher.
_INSTEAD = {
    "--gloo": "remove it: the ranks communicate over MPI",
    "--jsrun": "remove it: in a batch job of LSF, mpitrain run uses the job's hosts",
    "--tcp": "use --mpi-args to choose MPI's transports",
    "--binding-args": "pass them with --mpi-args",
    "--output-filename": "use 'mpitrain run --run-dir DIR': DIR/logs has the output of each rank",
    "--prefix-output-with-timestamp": "remove it: the logs in the run directory have no timestamps",
    "--start-timeout": "remove it: hosts that do not answer are named within 15 s",
    "--host-discovery-script": "list the hosts with -H; with --min-np, restarts leave out hosts that are lost",
    "--max-np": "use -np, or 'mpitrain scale' for a run of a job file",
    "--max-num-proc": "use -np, or 'mpitrain scale' for a run of a job file",
    "--slots-per-host": "give the number of ranks of each host, as in -H a:4,b:4",
    "--elastic-timeout": "remove it: a restart begins at once",
    "--blacklist-cooldown-range": "remove it: hosts that are lost are left out of restarts",
    "--check-build": "use 'mpitrain doctor'",
    "-cb": "use 'mpitrain doctor'",
    "--config-file": "give the flags on the command line",
    "--verbose": "use 'mpitrain run --dry-run' to see the command that starts the ranks",
    "--mpi-threads-disable": "remove it: threads are needed",
} | dict.fromkeys(
    """
    --autotune --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --autotune-log-file
    --autotune-steps-per-sample --autotune-warmup-samples --cache-capacity --disable-cache --gloo-timeout-seconds
    --hierarchical-allgather --hierarchical-allreduce --log-level --log-with-timestamp --no-autotune
    --no-hierarchical-allgather --no-hierarchical-allreduce --no-torus-allreduce --num-nccl-streams
    --thread-affinity --torus-allreduce
    """.split(),
    "remove it: the engine has no such setting",
)


def _run_arguments(command: Sequence[str], port: int | None, identity: str | None, **values: Any) -> list[str]:
    """Return the arguments for ``mpitrain run``."""
    words = []
    for name, value in values.items():
        if name.isupper() and value is not None and value is not False:
            words += ["--env", f"{name}={value:d}" if isinstance(value, bool) else f"{name}={value}"]
        elif not name.isupper() and value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    ssh = [] if port is None else ["-p", str(port)]
    ssh += [] if identity is None else ["-i", identity]
    agent = ["--remote-agent", shlex.join(["ssh", *ssh])] if ssh else []
    return [*words, *agent, "--", *command]


class HorovodRunCommand(click.Command):
    """``mpitrain horovodrun``.

    Args:
        run: ``mpitrain run``, called with its arguments.
    """

    def __init__(self, run: Callable[[list[str]], Any]) -> None:
        command = click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, required=True)
        super().__init__(
            "horovodrun",
            callback=lambda **values: run(_run_arguments(**values)),
            params=[command, *_OPTIONS],
            help="Start ranks with the flags of Horovod's launcher. Use 'mpitrain run' for new scripts.",
            context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
            epilog=examples("mpitrain horovodrun -np 4 -H a:2,b:2 python train.py"),
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in _INSTEAD:
                raise click.UsageError(
                    f"{error.option_name} is not supported; {_INSTEAD[error.option_name]}", ctx
                ) from None
            raise


def horovodrun_command() -> HorovodRunCommand:
    """Return ``mpitrain horovodrun``."""
    from .run import RunCommand

    command = HorovodRunCommand(lambda words: RunCommand().main(words, prog_name="mpitrain run", standalone_mode=False))
    return click.version_option(__version__, "-v", "--version")(command)
