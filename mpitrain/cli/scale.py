"""``mpitrain scale``."""

from __future__ import annotations

from pathlib import Path

import click

from ..launcher.scaling import ScaleRequest, send_request
from ..plan.options import examples


@click.command("scale", epilog=examples("mpitrain scale runs/mnist_mlp-20261121-141119 --ranks 4"))
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
