"""The checkpoint commands: ``mpitrain verify``, ``inspect``, ``diff``, ``export``."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core.files import writing
from ..errors import CheckpointError, DamagedCheckpoint
from ..monitor.console import print_wrapped
from ..plan.options import examples

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

# Each command imports the checkpoint package when it runs, so that --help does not wait for the import.
_PATH = click.Path(path_type=Path)
_PATH_HELP = "PATH is a checkpoint, a run directory (uses its newest checkpoint), or RUN/best."


@click.command(epilog=examples("mpitrain verify runs/mnist_mlp-20261121-141119"))
@click.argument("paths", type=_PATH, nargs=-1, required=True, metavar="PATH...")
def verify(paths: tuple[Path, ...]) -> int:
    """Check that checkpoints are undamaged.

    PATH is a checkpoint, or a run directory (checks all of its checkpoints). The exit status is 1 if any checkpoint is
    damaged, or contains values that are not finite.
    """
    from .. import checkpoint

    status = 0
    for path in chain.from_iterable(map(checkpoint.find, paths)):
        try:
            with checkpoint.Checkpoint(path) as opened:
                opened.verify_structure()
                not_finite = opened.verify()
                finding = f"contains values that are not finite: {', '.join(not_finite)}" if not_finite else "ok"
                print_wrapped(f"{path}: {finding}, step {opened.step:,}", error=False)
                status = max(status, int(bool(not_finite)))
        except DamagedCheckpoint as error:
            print_wrapped(str(error), error=False)
            status = 1
    return status


@click.command(
    help=f"Print the contents of a checkpoint.\n\n{_PATH_HELP}",
    epilog=examples("mpitrain inspect runs/mnist_mlp-20261121-141119"),
)
@click.argument("path", type=_PATH)
def inspect(path: Path) -> None:
    """Print a table of the contents."""
    from ..checkpoint.summary import describe

    with _open(path) as opened:
        for line in describe(opened):
            print_wrapped(line, error=False)


@click.command(
    help=f"Compare two checkpoints.\n\n{_PATH_HELP} The exit status is 1 if they differ.",
    epilog=examples("mpitrain diff runs/a runs/b/checkpoints/step-000002000.h5"),
)
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
def diff(a: Path, b: Path) -> int:
    """Print one line per difference."""
    from ..checkpoint.summary import differences

    with _open(a) as first, _open(b) as second:
        names = []
        for name, description in differences(first, second):
            click.echo(f"{name}: {description}")
            names.append(name)
        has_equal_arrays = not ({*first.datasets, *second.datasets} & {*names})
    if not names:
        click.echo("identical")
    elif has_equal_arrays:
        click.echo("all arrays are identical")
    return int(bool(names))


@click.command(
    help=f"Write a checkpoint's parameters in another format.\n\n{_PATH_HELP}",
    epilog=examples("mpitrain export runs/mnist_mlp-20261121-141119 --output model.safetensors"),
)
@click.argument("path", type=_PATH)
@click.option(
    "--to", type=click.Choice(["safetensors", "npz"]), default="safetensors", show_default=True, help="Output format."
)
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "float16", "bfloat16"]),
    help="Convert to this dtype.  [default: unchanged]",
)
@click.option("--averages", is_flag=True, help="Export the moving averages instead of the parameters.")
@click.option(
    "--output", type=_PATH, metavar="FILE", help="Output file.  [default: RUN-step-N.FORMAT in this directory]"
)
def export(path: Path, to: str, dtype: str | None, averages: bool, output: Path | None) -> None:
    """Write the arrays to a file."""
    from ..checkpoint.export import export as write

    with _open(path) as opened:
        target = output or Path(_export_name(opened.path, to))
        if target.exists():
            raise CheckpointError(f"{target} already exists; remove it, or pass another --output")
        with writing(target, "--output", CheckpointError):
            count = write(opened, target, to, dtype, averages)
    print_wrapped(f"wrote {count:,} arrays to {target}", error=False)


def _open(path: Path) -> Checkpoint:
    from .. import checkpoint

    return checkpoint.Checkpoint(checkpoint.find(path)[0])


def _export_name(path: Path, to: str) -> str:
    """Return the default name of an exported file: the names of the run and of the checkpoint, and the format."""
    folder = path.absolute().parent
    run = f"{folder.parent.name}-" if folder.name == "checkpoints" else ""
    return f"{run}{path.stem}.{to}"
