"""``mpitrain demo``."""

from __future__ import annotations

from pathlib import Path

import click

from ..plan.options import examples
from .run import RunCommand

_JOB = Path(__file__).parents[1] / "demo.py"


@click.command(
    "demo",
    options_metavar="",
    context_settings={"ignore_unknown_options": True},
    epilog=examples("mpitrain demo", "mpitrain demo -n 4 --mode async"),
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]")
def demo_command(words: tuple[str, ...]) -> int:
    """Train a small model on handwritten digits, on two ranks of this machine.

    The digits are part of mpitrain. OPTIONS are those of mpitrain run.
    """
    return RunCommand().main(["-n", "2", str(_JOB), *words], prog_name="mpitrain run", standalone_mode=False)
