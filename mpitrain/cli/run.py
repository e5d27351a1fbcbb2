"""``mpitrain run``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..launcher.request import LaunchOptions
from ..plan import options as flags
from .job_command import JOB_HELP, JobCommand, request_of

if TYPE_CHECKING:
    from ..plan.script import ScriptRequest
    from ..training.session import TrainRequest


class RunCommand(JobCommand):
    """``mpitrain run``: also stores the arguments to pass on to the ranks.

    Args:
        start: Called with the launch options, the request, the ranks' arguments, and a script with its own arguments;
            its result is the command's.
    """

    def __init__(self, start: Callable[..., Any] | None = None) -> None:
        about = f"Start ranks with the mpirun that mpi4py was built for, and train. {JOB_HELP}"
        super().__init__("run", flags.options_of(LaunchOptions), self._request, about)
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
        options = LaunchOptions(**{str(option.name): values.pop(str(option.name)) for option in self._own})
        request = request_of(**values)  # reports invalid flags before any rank starts
        meta = click.get_current_context().meta
        return self._start(options, request, meta["rank_arguments"], meta["rank_script"])


def _supervise(
    options: LaunchOptions, request: TrainRequest | ScriptRequest, arguments: list[str], script: list[str]
) -> int:
    from ..launcher.supervisor import run

    return run(options, request.name, request.config, arguments, script)
