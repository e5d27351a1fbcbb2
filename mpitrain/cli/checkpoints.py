"""The commands for checkpoints: ``mpitrain verify``, ``inspect``, ``diff``, ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

# The package of checkpoints is imported when a command runs: ranks that train start without waiting for it.
_PATH = click.Path(path_type=Path)
_PATH_HELP = "PATH is a checkpoint, or a run directory for its newest."


@click.command()
@click.argument("paths", type=_PATH, nargs=-1, required=True, metavar="PATH...")
def verify(paths: tuple[Path, ...]) -> int:
    """Check that checkpoints are as they were written.

    PATH is a checkpoint, or a run directory for all of its. The exit status is 1 if any does not verify.
    """
    from .. import checkpoint

    status = 0
    for path in (each for given in paths for each in _checkpoints(given)):
        try:
            with checkpoint.Checkpoint(path) as opened:
                opened.verify()
                click.echo(f"{path}: whole, step {opened.step:,}")
        except DamagedCheckpoint as error:
            click.echo(str(error))
            status = 1
    return status


@click.command(help=f"Print what a checkpoint holds.\n\n{_PATH_HELP}")
@click.argument("path", type=_PATH)
def inspect(path: Path) -> None:
    """Print a table."""
    from ..checkpoint.summary import describe

    with _open(path) as opened:
        for line in describe(opened):
            click.echo(line)


@click.command(help=f"Tell where two checkpoints differ.\n\n{_PATH_HELP} The exit status is 1 if they do.")
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
def diff(a: Path, b: Path) -> int:
    """Print a line for each difference."""
    from ..checkpoint.diff import differences

    with _open(a) as first, _open(b) as second:
        count = 0
        for line in differences(first, second):
            click.echo(line)
            count += 1
    if not count:
        click.echo("the same in every bit")
    return int(count > 0)


@click.command(help=f"Write a checkpoint's parameters in another format.\n\n{_PATH_HELP}")
@click.argument("path", type=_PATH)
@click.option("--to", type=click.Choice(["safetensors", "npz"]), required=True, help="The format.")
@click.option("--dtype", type=click.Choice(["float64", "float32", "float16", "bfloat16"]), help="[default: as it is]")
@click.option("--averages", is_flag=True, help="The moving averages in place of the parameters.")
@click.option("--output", type=_PATH, metavar="FILE", help="[default: the checkpoint's name in this folder]")
def export(path: Path, to: str, dtype: str | None, averages: bool, output: Path | None) -> None:
    """Write a file."""
    from ..checkpoint.export import export as write

    with _open(path) as opened:
        target = output or Path(f"{opened.path.stem}.{to}")
        if target.exists():
            raise CheckpointError(f"{target} exists already: give another --output, or remove it")
        try:
            count = write(opened, target, to, dtype, averages)
        except OSError as error:
            raise CheckpointError(f"{target} cannot be written: {error.strerror}; give another --output") from error
    click.echo(f"{count:,} arrays in {target}")


COMMANDS = [verify, inspect, diff, export]


def _open(path: Path) -> Checkpoint:
    from .. import checkpoint

    return checkpoint.Checkpoint(_checkpoints(path)[0])


def _checkpoints(path: Path) -> list[Path]:
    """A checkpoint, or those of a run directory or of its folder ``checkpoints``, the newest first."""
    from .. import checkpoint

    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint or run directory")
    if not path.is_dir():
        return [path]
    found = [*checkpoint.steps(path).values()] or [*checkpoint.steps(path / "checkpoints").values()]
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: give one, or a run directory that has some")
    return found
