"""``mpitrain report``: one self-contained HTML page with plots of one or more runs."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..errors import RecordError
from ..monitor.format import amount, duration
from ..monitor.heartbeat import State, states
from ..plan.options import examples
from ..version import __version__
from .history import Run, is_run, read_run, shown_name
from .plots import COLORS, Plot, PlottedRun, as_png, as_svg, make_plots
from .runs import find, latest_run
from .time_shares import GROUPS, Shares, read_shares

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_RESTARTS = ("restarts", "steps repeated", "restarting")
_VALUES = ("loss", "validation loss", "accuracy", "examples/s")
_COLUMNS = ("run", "job", "mode", "state", "steps", "time", *_RESTARTS, *_VALUES)
_WORDS = ("run", "job", "mode", "state")  # columns without numbers
# Options that say where a run is stored, not how it trains.
_NOT_COMPARED = {"run_dir", "resume"}


_OUTPUT_HELP = "Output page, or folder with --png.  [default: report.html or plots, inside RUN if only one]"


@click.command("report", epilog=examples("mpitrain report", "mpitrain report runs -o all.html"))
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN...]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="PATH", help=_OUTPUT_HELP)
@click.option("--png", is_flag=True, help="Write only the plots, as PNG files in a folder.")
def report_command(runs: tuple[Path, ...], output: Path | None, png: bool) -> None:
    """Write a page with plots of the given runs, or of all runs in a folder: loss, accuracy, speed, time use.

    Without RUN it is about the latest run in the folder runs.
    """
    _check_installed(["matplotlib"] if png else ["matplotlib", "jinja2"])
    runs = runs or (latest_run(),)
    shown = collect(runs)
    base = runs[0] if len(runs) == 1 else Path()
    path = output or base / ("plots" if png else "report.html")
    try:
        if png:
            written = _write_pngs(path, make_plots(shown))
        else:
            path.write_text(page(shown), encoding="utf-8")
            written = str(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error.strerror}; pass another --output") from error
    print(written)


def collect(folders: Sequence[Path]) -> list[PlottedRun]:
    """Read runs, and give each a unique label and a color.

    Raises:
        RecordError: A folder is not a run directory, is given twice, or cannot be read.
    """
    folders = [run for folder in folders for run in _runs_in(folder)]
    resolved = [folder.resolve() for folder in folders]
    for folder in resolved:
        if resolved.count(folder) > 1:
            raise RecordError(f"{folder} is given twice; remove one")
    runs = [read_run(folder) for folder in folders]
    return [
        PlottedRun(run, label, COLORS[index % len(COLORS)], read_shares(run.folder))
        for index, (run, label) in enumerate(zip(runs, labels(resolved), strict=True))
    ]


def _runs_in(folder: Path) -> list[Path]:
    """Return the folder if it is a run directory, else the runs inside it, such as those of a sweep."""
    runs = [folder] if is_run(folder) or not folder.is_dir() else list(find(folder))
    return runs or [folder]


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that are unique."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        found = [str(Path(*folder.parts[-depth:])) for folder in folders]
        if len(set(found)) == len(found):
            return found
    raise AssertionError("the same folder twice")


def page(shown: Sequence[PlottedRun]) -> str:
    """Return the complete page as HTML."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    state = states([run.run.folder for run in shown])
    rows = [_Row(run, _cells(run.run, run.label, state[run.run.folder])) for run in shown]
    further = dict.fromkeys(name for run in shown for name in run.run.further_names())
    names = dict.fromkeys([*_COLUMNS, *map(shown_name, further)])
    columns = [name for name in names if any(row.cells.get(name) for row in rows)]
    return template.render(
        title=shown[0].label if len(shown) == 1 else f"{len(shown)} runs",
        written=time.strftime("%Y-%m-%d at %H:%M"),
        version=__version__,
        columns=columns,
        words=_WORDS,
        runs=[row.as_mapping() for row in rows],
        differences=differences([run.run.config for run in shown]),
        times=[
            {"label": run.label, "color": run.color, "sentence": summarize_shares(run.shares)}
            for run in shown
            if run.shares is not None
        ],
        plots=[
            {"name": plot.name, "title": plot.title, "about": plot.about, "svg": as_svg(plot)}
            for plot in make_plots(shown)
        ],
    )


def summarize_shares(shares: Shares) -> str:
    """Return a sentence that summarizes a trace."""
    parts = [f"{100 * shares.fraction(g):.0f} % {g}" for g in GROUPS if shares.fraction(g) >= 0.005]
    text = f"{', '.join(parts)} (sum over all ranks, whole run)."
    if shares.waited_for:
        rank, share = shares.waited_for[0]
        text += (
            f" In the last {shares.kept_steps:,} steps the ranks waited {duration(shares.kept_wait_s)} in total, "
            f"{100 * share:.0f} % of it for rank {rank.rank} ({rank.role}, on {rank.host})"
        )
        if len(shares.waited_for) > 1:
            rest = sum(share for _, share in shares.waited_for[1:])
            text += f" and {100 * rest:.0f} % for the other ranks"
        text += "."
    return text


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the options and versions that differ between runs, with each run's value."""
    flat = [
        {name: value for table in config.values() if isinstance(table, dict) for name, value in table.items()}
        for config in configs
    ]
    names = dict.fromkeys(name for options in flat for name in options)
    found = [(name, [str(options.get(name, "")) for options in flat]) for name in names if name not in _NOT_COMPARED]
    return [(name, values) for name, values in found if len(set(values)) > 1]


@dataclass(frozen=True)
class _Row:
    shown: PlottedRun
    cells: dict[str, str]

    def as_mapping(self) -> dict[str, Any]:
        run = self.shown.run
        config = {name: table for name, table in run.config.items() if isinstance(table, dict)}
        return {
            "label": self.shown.label,
            "color": self.shown.color,
            "cells": self.cells,
            "folder": str(run.folder.resolve()),
            "config": config,
        }


def _cells(run: Run, label: str, state: State) -> dict[str, str]:
    """Return a run's row of the table; unknown values are empty."""

    def last(name: str, form: str) -> str:
        value = run.series(name).last
        return "" if value != value else format(value, form)

    speed = run.series("examples_per_s").last
    further = {shown_name(name): last(name, ".4g") for name in run.further_names()}
    return further | {
        "run": label,
        "job": run.job,
        "mode": str(run.option("mode") or ""),
        "state": "" if state == "unknown" else state,
        "steps": f"{run.step:,}",
        "time": duration(run.seconds),
        "restarts": f"{len(run.restarts)}" if run.restarts else "",
        "steps repeated": f"{sum(restart.repeated_steps for restart in run.restarts):,}" if run.restarts else "",
        "restarting": duration(sum(restart.seconds for restart in run.restarts)) if run.restarts else "",
        "loss": last("loss", ".4f"),
        "validation loss": last("validation_loss", ".4f"),
        "accuracy": last("validation_accuracy", ".4f"),
        "examples/s": "" if speed != speed else amount(speed),
    }


def _write_pngs(folder: Path, plots: Sequence[Plot]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{plot.name}.png" for plot in plots]
    for path, plot in zip(paths, plots, strict=True):
        path.write_bytes(as_png(plot))
    if not paths:
        raise RecordError("no plots to write: the runs have no metrics yet")
    return "\n".join(map(os.fspath, paths))


def _check_installed(packages: Sequence[str]) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RecordError(f"{' and '.join(missing)} not installed; run pip install 'mpitrain[report]'")
