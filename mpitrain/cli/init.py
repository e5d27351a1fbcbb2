"""``mpitrain init``: files to start a project from."""

from __future__ import annotations

import shlex
from pathlib import Path

import click
import jinja2

from ..errors import ConfigError
from ..monitor.console import print_wrapped
from ..plan.options import examples

_STARTERS = Path(__file__).with_name("starters")
# The name of the job or script of each kind, and an option in the batch script's example.
_KINDS = {"native": ("job", "train-steps 5000"), "torch": ("job", "train-steps 5000"), "script": ("train", "epochs 50")}


@click.command("init", epilog=examples("mpitrain init digits", "mpitrain init digits --from torch"))
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--from",
    "kind",
    type=click.Choice(list(_KINDS)),
    default="native",
    show_default=True,
    help="native: a job file with mpitrain's own layers. torch: a job file with a PyTorch module. script: a PyTorch "
    "script with its own training loop.",
)
def init_command(folder: Path, kind: str) -> None:
    """Write a commented job, a batch script and a test into DIR, to start a project from.

    The job trains on handwritten digits that are part of mpitrain.
    """
    name, flag = _KINDS[kind]
    texts = starter(kind, name, flag)
    existing = [folder / file for file in texts if (folder / file).exists()]
    if existing:
        raise ConfigError(f"{existing[0]} already exists; remove it, or give another directory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder}: no files can be written there: {error.strerror}; give another directory"
        ) from error
    print_wrapped(f"wrote {', '.join(texts)} into {folder}", error=False)
    print_wrapped(f"next: cd {shlex.quote(str(folder))}; pytest; mpitrain run -n 2 {name}.py", error=False)


def starter(kind: str, name: str, flag: str) -> dict[str, str]:
    """Return the texts of a kind of project, by the names of the files."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    templates = {f"{name}.sbatch": _STARTERS / "batch.sbatch.j2"}
    if name == "job":
        templates["test_job.py"] = _STARTERS / "test_job.py.j2"
    templates |= {path.stem: path for path in sorted((_STARTERS / kind).iterdir())}
    return {
        file: environment.from_string(path.read_text(encoding="utf-8")).render(name=name, flag=flag)
        for file, path in sorted(templates.items())
    }
