"""``mpitrain report``: one self-contained HTML page with plots of one or more runs."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..core.files import writing
from ..errors import RecordError
from ..monitor.format import amount, duration, metric
from ..monitor.heartbeat import State, read, states
from ..monitor.run_record import PLACE
from ..plan.metric import PREFIX, Goal, parse_goal
from ..plan.options import examples
from ..process.run_directory import read_failure
from ..version import __version__
from .charts import Chart, PlottedRun, line_style, make_charts
from .figures import figure, library
from .history import Run, is_run, read_run, shown_name
from .images import as_png
from .runs import find, latest_run, learners_of
from .time_shares import GROUPS, Shares, read_shares

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_RESTARTS = ("restarts", "steps repeated", "restarting", "goodput")
_GOALS = tuple(parse_goal("", name) for name in ("accuracy", "loss"))
_VALUES = (
    "best accuracy, at step",
    "final accuracy",
    "best validation loss, at step",
    "final validation loss",
    "final loss",
)
_COLUMNS = ("run", "job", "mode", "state", "steps", "time", *_VALUES, "mean examples/s", *_RESTARTS)
_WORDS = ("run", "job", "mode", "state")  # columns without numbers
_VERSIONS = "versions"  # name of the table in config.toml that has the versions of packages


_OUTPUT_HELP = "Output page, or folder with --png.  [default: report.html or plots; inside RUN if RUN is a single run]"


@click.command("report", epilog=examples("mpitrain report", "mpitrain report runs -o all.html"))
@click.argument("runs", nargs=-1, type=click.Path(path_type=Path), metavar="[RUN...]")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="PATH", help=_OUTPUT_HELP)
@click.option("--png", is_flag=True, help="Write only the plots, as PNG files in a folder.")
def report_command(runs: tuple[Path, ...], output: Path | None, png: bool) -> None:
    """Write a page with plots of the given runs, or of all runs in a folder: loss, accuracy, speed, time use.

    Without RUN, the page shows the latest run in the folder runs.
    """
    _check_installed("matplotlib" if png else "plotly")
    if png and output is not None and output.suffix == ".html":
        raise RecordError(f"--output is {output}, but --png writes PNG files; give a folder, or omit --png")
    runs = runs or (latest_run(),)
    shown = collect(runs)
    base = runs[0] if len(runs) == 1 else Path()
    path = output or base / ("plots" if png else "report.html")
    with writing(path, "--output"):
        if png:
            written = _write_pngs(path, make_charts(shown))
        else:
            path.write_text(page(shown), encoding="utf-8", errors="backslashreplace")
            written = str(path)
    print(written)


def collect(folders: Sequence[Path]) -> list[PlottedRun]:
    """Read runs, and give each a unique label, color and dash.

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
        PlottedRun(run, label, *line_style(index), read_shares(run.folder))
        for index, (run, label) in enumerate(zip(runs, labels(resolved), strict=True))
    ]


def _runs_in(folder: Path) -> list[Path]:
    """Return a run directory and its learners, or the runs inside another folder, such as the runs of a sweep."""
    runs = [folder, *learners_of(folder)] if is_run(folder) or not folder.is_dir() else list(find(folder))
    return runs or [folder]


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique ending of each path."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        ends = [str(Path(*folder.parts[-depth:])) for folder in folders]
        if len(set(ends)) == len(ends):
            return ends
    raise AssertionError("the same folder twice")


def page(shown: Sequence[PlottedRun]) -> str:
    """Return the complete page as HTML."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    state = states([run.run.folder for run in shown])
    rows = [_row(run, state[run.run.folder]) for run in shown]
    further = dict.fromkeys(name for run in shown for name in run.run.further_names())
    names = dict.fromkeys([*_COLUMNS, *(f"final {shown_name(name)}" for name in further)])
    charts = make_charts(shown)
    configs = [run.run.config for run in shown]
    return template.render(
        title=shown[0].label if len(shown) == 1 else f"{len(shown)} runs",
        written=time.strftime("%Y-%m-%d at %H:%M"),
        version=__version__,
        columns=[name for name in names if any(row["cells"].get(name) for row in rows)],
        words=_WORDS,
        runs=rows,
        differences={
            "Options that differ": differences([_without(config, _VERSIONS) for config in configs]),
            "Versions that differ": differences([{_VERSIONS: config.get(_VERSIONS, {})} for config in configs]),
        },
        times=[
            {"label": run.label, "color": run.color, "sentence": summarize_shares(run.shares)}
            for run in shown
            if run.shares is not None
        ],
        charts=charts,
        figures=_as_script([figure(chart) for chart in charts]),
        library=library() if charts else "",
    )


def _as_script(value: Any) -> str:
    """Return JSON that is safe inside an element ``script``, whatever text it contains."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _without(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {table: values for table, values in config.items() if table != name}


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
    """Return the names in the tables of ``config.toml`` whose values differ between runs, with each run's value."""
    flat = [
        {name: value for table in config.values() if isinstance(table, dict) for name, value in table.items()}
        for config in configs
    ]
    names = dict.fromkeys(name for options in flat for name in options)
    rows = [(name, [str(options.get(name, "")) for options in flat]) for name in names if name not in PLACE]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _row(shown: PlottedRun, state: State) -> dict[str, Any]:
    """Return a run's values for the template."""
    run = shown.run
    status, failure = read(run.folder), read_failure(run.folder)
    return {
        "label": shown.label,
        "color": shown.color,
        "cells": _cells(run, shown.label, state),
        "folder": str(run.folder.resolve()),
        "config": {name: table for name, table in run.config.items() if isinstance(table, dict)},
        "reason": failure.reason if failure is not None else status.reason if status is not None else "",
        "traceback": failure.traceback if failure is not None else "",
    }


def _cells(run: Run, label: str, state: State) -> dict[str, str]:
    """Return a run's row of the table; unknown values are empty."""

    def last(name: str) -> str:
        value = run.series(name).last
        return "" if value != value else metric(value)

    speed, account = run.mean_examples_per_s, run.account
    further = {f"final {shown_name(name)}": last(name) for name in run.further_names()}
    return further | {
        "run": label,
        "job": run.job,
        "mode": str(run.option("mode") or ""),
        "state": "" if state == "unknown" else state,
        "steps": _steps(run),
        "time": duration(run.seconds),
        "best accuracy, at step": _best(run, _GOALS[0]),
        "best validation loss, at step": _best(run, _GOALS[1]),
        "restarts": f"{run.n_restarts}" if run.restarts else "",
        "steps repeated": f"{sum(restart.repeated_steps for restart in run.restarts):,}" if run.restarts else "",
        "restarting": duration(sum(restart.seconds for restart in run.restarts)) if run.restarts else "",
        "goodput": "" if account is None else f"{100 * account.goodput:.0f} %",
        "final loss": last("loss"),
        "final validation loss": last("validation_loss"),
        "final accuracy": last("validation_accuracy"),
        "mean examples/s": "" if speed != speed else amount(speed),
    }


def _steps(run: Run) -> str:
    """Return the number of completed steps and, if the run has not completed all, the total."""
    goal = run.train_steps
    return f"{run.step:,} of {goal:,}" if goal is not None and run.step < goal else f"{run.step:,}"


def _best(run: Run, goal: Goal) -> str:
    """Return the best validation value of a metric, and its step."""
    if not len(run.series(PREFIX + goal.name)):
        return ""
    best = run.best(goal)
    return "" if best is None else f"{metric(best[0])} at {best[1]:,}"


def _write_pngs(folder: Path, charts: Sequence[Chart]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{chart.name}.png" for chart in charts]
    for path, chart in zip(paths, charts, strict=True):
        path.write_bytes(as_png(chart))
    if not paths:
        raise RecordError("no plots to write: the runs have no metrics yet")
    return "\n".join(map(os.fspath, paths))


def _check_installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise RecordError(f"{package} is not installed; run pip install 'mpitrain[report]'")
