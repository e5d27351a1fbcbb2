"""``mpitrain stacks``: the Python stacks of all ranks of a live run, and which rank waits for which."""

from __future__ import annotations

import textwrap
from pathlib import Path

import click

from ..errors import RecordError
from ..monitor.format import duration, format_table
from ..plan.options import examples
from ..process.stacks import ask
from .history import is_run
from .runs import latest_run, learners_of

_HEAD = ("rank", "role", "host", "process", "step", "for", "activity")
_TIMEOUT_S = 5.0


@click.command("stacks", epilog=examples("mpitrain stacks", "mpitrain stacks runs/mnist_mlp-20261121-141119"))
@click.argument("run", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
def stacks_command(run: Path | None) -> int:
    """Show the activity and the Python stacks of every rank of a live run, and the rank for which it waits.

    Without RUN, it shows the latest run in the folder runs. Works on any host that shares the run directory. The exit
    status is 1 if a rank does not answer within 5 s.
    """
    run = run or latest_run()
    ranks = _ranks_of(run)
    try:
        answers = ask(run, len(ranks), _TIMEOUT_S)
    except FileExistsError:
        raise RecordError(
            f"{run}: its stacks are being read by another process; remove {run}/logs/.stacks if not"
        ) from None
    except OSError as error:
        raise RecordError(f"{run} cannot be written: {error.strerror}") from error
    if not answers:
        raise RecordError(f"{run}: no rank answers; is the run still running, started by mpitrain run, mpirun or srun?")
    rows = [(str(s.rank), s.role, s.host, str(s.pid), f"{s.step:,}", duration(s.idle_s), s.doing) for s in answers]
    click.echo(format_table(_HEAD, rows))
    for stacks in answers:
        click.echo(f"\nrank {stacks.rank}: {stacks.doing}")
        click.echo(textwrap.indent(stacks.stacks, "  ") or "  no stacks: the process cannot run", nl=not stacks.stacks)
    missing = sorted(set(ranks) - {stacks.rank for stacks in answers})
    if missing:
        click.echo(f"\nno answer within {_TIMEOUT_S:.0f} s from rank {', '.join(map(str, missing))}")
    return int(bool(missing))


def _ranks_of(run: Path) -> list[int]:
    """Return the ranks of a run, from its table of ranks."""
    if not is_run(run):
        raise RecordError(f"{run}: no such run; give a run directory, such as runs/JOB-TIME")
    if learners := learners_of(run):
        names = ", ".join(map(str, learners))
        raise RecordError(f"{run} has no ranks of its own; give the directory of a learner: {names}")
    try:
        lines = (run / "ranks.txt").read_text(encoding="utf-8").splitlines()[1:]
        return [int(line.split()[0]) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise RecordError(f"{run}: the run has not started its ranks yet") from error
