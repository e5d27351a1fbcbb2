"""``mpitrain run``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from ..plan import options as flags
from ..plan.launch_options import LaunchOptions
from ..plan.request import LaunchRequest
from .job_command import JOB_HELP, JobCommand
from .program import MODULE, find_program, own_options, parse_flags, program_options

_PROGRAM = "program"  # key of the program's arguments in the context
_EXAMPLES = (
    "mpitrain run -n 2 jobs/mnist_mlp.py --train-steps 500 --hidden-units 50",
    "mpitrain run -n 2 -- python train.py --lr 0.1",
)


class RunCommand(JobCommand):
    """``mpitrain run``.

    Args:
        start: Called with the request; the command returns the result of this call.
    """

    def __init__(self, start: Callable[[LaunchRequest], Any] | None = None) -> None:
        description = (
            f"Start ranks with the mpirun that mpi4py was built for. {JOB_HELP} JOB may also be any other Python "
            "script, a module after -m, or a command after --."
        )
        super().__init__("run", [*flags.options_of(LaunchOptions), MODULE], self._launch, description, _EXAMPLES)
        self._program = own_options()
        self._start = start or _supervise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        program = None if ctx.resilient_parsing else find_program([*self._own, *self._run, *self._program], args)
        if program is None:
            return super().parse_args(ctx, args)
        ctx.meta[_PROGRAM] = program
        ctx.params = parse_flags([*self._own, *self._program], program.flags)
        return []

    def _launch(self, **values: Any) -> Any:
        names = {field.name for field in dataclasses.fields(LaunchOptions)}
        options = LaunchOptions(**{name: value for name, value in values.items() if name in names})
        program = click.get_current_context().meta.get(_PROGRAM)
        workload = self.job_request(values) if program is None else program.request(program_options(values))
        return self._start(LaunchRequest(options, workload))


def _supervise(request: LaunchRequest) -> int:
    from ..launcher.supervisor import run

    return run(request)
