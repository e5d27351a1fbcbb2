"""``mpitrain run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..plan import options as flags
from .job_command import JOB_HELP, JobCommand, request_of

if TYPE_CHECKING:
    from ..launcher.supervisor import Options
    from ..plan.script import ScriptRequest
    from ..training.session import TrainRequest

_RANKS_HELP = "Number of ranks.  [default: all slots of --hosts, or all tasks of the allocation; else 1]"
_NETWORK_HELP = "Network between the hosts: a subnet such as 10.1.0.0/16, or an interface name."
_RESTARTS_HELP = "Restart from the newest checkpoint after a rank or host has died, at most N times."
_MIN_RANKS_HELP = "Restart without lost hosts if the remaining hosts have slots for at least M ranks."
_LINK_HELP = "End the ranks if another host has not answered for S seconds."
_ENV_HELP = "Set a variable for the ranks; may be repeated."
_ARGS_HELP = "Extra arguments for mpirun, quoted as in a shell."
_AGENT_HELP = "Program that starts processes on other hosts.  [default: ssh]"
_LAUNCH = [
    flags.option("-n", "--ranks", type=click.IntRange(min=1), help=_RANKS_HELP),
    flags.option("--hosts", metavar="HOST:RANKS,...", help="Hosts to run on.  [default: this host]"),
    flags.option("--hostfile", type=flags.PATH, metavar="FILE", help="File with the hosts, one per line."),
    flags.option("--remote-agent", metavar="PROGRAM", help=_AGENT_HELP),
    flags.option("--network", metavar="NET", help=_NETWORK_HELP),
    flags.option("--env", multiple=True, metavar="NAME[=VALUE]", help=_ENV_HELP),
    flags.option("--launcher-args", default="", metavar="WORDS", help=_ARGS_HELP),
    flags.option("--max-restarts", type=click.IntRange(min=0), default=0, metavar="N", help=_RESTARTS_HELP),
    flags.option("--min-ranks", type=click.IntRange(min=1), metavar="M", help=_MIN_RANKS_HELP),
    flags.option(
        "--link-timeout", type=click.FloatRange(min=5), default=30.0, show_default=True, metavar="S", help=_LINK_HELP
    ),
    flags.option("--dry-run", is_flag=True, help="Print the command without running it."),
]


class RunCommand(JobCommand):
    """``mpitrain run``: also stores the arguments to pass on to the ranks.

    Args:
        start: Called with the launch options, the request, the ranks' arguments, and a script with its own arguments;
            its result is the command's.
    """

    def __init__(self, start: Callable[..., Any] | None = None) -> None:
        about = f"Start ranks with the mpirun that mpi4py was built for, and train. {JOB_HELP}"
        super().__init__("run", _LAUNCH, self._request, about)
        self._start = start or _supervise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = self.script_in(args)
        args, after = (args, []) if at is None else (args[:at], args[at:])
        with click.Context(click.Command("run", params=list(self._own)), ignore_unknown_options=True) as context:
            context.resilient_parsing = True
            parser = context.command.make_parser(context)
            _, rest, _ = parser.parse_args(list(args))
        ctx.meta["rank_arguments"], ctx.meta["rank_script"] = rest, after
        return super().parse_args(ctx, [*args, *after])

    def _request(self, **values: Any) -> Any:
        from ..launcher.supervisor import Options

        options = Options(**{option.name: values.pop(option.name) for option in _LAUNCH if option.name is not None})
        request = request_of(**values)  # reports invalid flags before any rank starts
        meta = click.get_current_context().meta
        return self._start(options, request, meta["rank_arguments"], meta["rank_script"])


def _supervise(options: Options, request: TrainRequest | ScriptRequest, arguments: list[str], script: list[str]) -> int:
    from ..launcher.supervisor import run

    return run(options, request.name, request.config, arguments, script)
