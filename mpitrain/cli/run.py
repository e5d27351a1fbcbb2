"""``mpitrain run``, ``mpitrain demo`` and ``mpitrain scale``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..core.deferral import defer
from ..launcher import first_server
from ..launcher.scaling import ScaleRequest, send_request
from ..plan import options as flags
from ..plan.launch_options import LaunchOptions
from ..plan.request import LaunchRequest
from .job_command import JOB_HELP, JobCommand
from .program import MODULE, find_program, own_options, parse_flags, program_options

_DEMO = Path(__file__).parents[1] / "demo.py"
_PROGRAM = "program"  # key of the program's arguments in the context
_EXAMPLES = (
    "mpitrain run -n 2 jobs/mnist_mlp.py --train-steps 500 --hidden-units 50",
    "mpitrain run -n 2 -- python train.py --lr 0.1",
)


class RunCommand(JobCommand):
    """``mpitrain run``.

    Args:
        start: Called with the request in place of a start of the ranks; the command returns the result of this call.
    """

    def __init__(self, start: Callable[[LaunchRequest], Any] | None = None) -> None:
        description = (
            f"Start ranks with the mpirun that mpi4py was built for. {JOB_HELP} JOB may also be any other Python "
            "script, a module after -m, or a command after --."
        )
        super().__init__("run", [*flags.options_of(LaunchOptions), MODULE], self._launch, description, _EXAMPLES)
        self._program = own_options()
        self._start = start

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        program = None if ctx.resilient_parsing else find_program([*self._own, *self._run, *self._program], args)
        if program is None:
            if self._start is None:
                defer()
            return super().parse_args(ctx, args)
        if (server := first_server.started()) is not None:
            server.close()
        ctx.meta[_PROGRAM] = program
        ctx.params = parse_flags([*self._own, *self._program], program.flags)
        return []

    def _launch(self, **values: Any) -> Any:
        names = {field.name for field in dataclasses.fields(LaunchOptions)}
        options = LaunchOptions(**{name: value for name, value in values.items() if name in names})
        program = click.get_current_context().meta.get(_PROGRAM)
        workload = self.job_request(values) if program is None else program.request(program_options(values))
        request = LaunchRequest(options, workload)
        if self._start is not None:
            return self._start(request)
        from ..launcher.supervisor import run

        return run(request, first_server.started() if program is None else None)


@click.command(
    "demo",
    options_metavar="",
    context_settings={"ignore_unknown_options": True},
    epilog=flags.examples("mpitrain demo", "mpitrain demo -n 4 --mode async"),
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]")
def demo_command(words: tuple[str, ...]) -> int:
    """Train a small model on handwritten digits, on two ranks of this machine.

    The digits are part of mpitrain. OPTIONS are those of mpitrain run.
    """
    return RunCommand().main(["-n", "2", str(_DEMO), *words], prog_name="mpitrain run", standalone_mode=False)


@click.command("scale", epilog=flags.examples("mpitrain scale runs/mnist_mlp-20261121-141119 --ranks 4"))
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("-n", "--ranks", type=click.IntRange(min=1), metavar="N", help="Number of ranks.")
@click.option("--hosts", metavar="HOST:RANKS,...", help="Hosts to run on.")
def scale_command(run: Path, ranks: int | None, hosts: str | None) -> None:
    """Continue a live run on another number of ranks, or on other hosts.

    RUN is the directory of a run that mpitrain run has started. The run saves a checkpoint, and its ranks start again
    from this checkpoint. --max-restarts does not count this restart. If this is impossible, a message states the
    reason, and the run continues unchanged.
    """
    send_request(run, ScaleRequest(ranks, hosts))
    click.echo(f"{run} saves a checkpoint, and its ranks start again")


@click.command("stop", epilog=flags.examples("mpitrain stop runs/digits"))
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
def stop_command(run: Path) -> None:
    """Let a run save a checkpoint and end, and wait until it has ended.

    RUN is the directory of a run, on any host that sees it; of a run that learners have joined, all of them are
    stopped. A batch job that waits is removed from the queue. Start the run again with the same command to continue it.
    """
    from ..api.run import stop_runs

    for path, state in stop_runs(run):
        click.echo(f"{path}: {state}")
