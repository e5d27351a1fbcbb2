"""``mpitrain watch``: live curves of a run in the terminal, on any host that can read its directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..core.layout import Array
from ..monitor import heartbeat as status
from ..monitor.format import amount, duration
from ..monitor.rank_log import path_for
from ..monitor.run_record import PROGRAM
from ..plan.options import examples
from ..process.pid import is_alive
from .history import METRICS, Run, Series, Tail, open_run, shown_name
from .runs import latest_run, learner_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHORTEST_S = 0.1
_PLOTS = (
    ("loss", "loss"),
    ("validation_loss", "validation loss"),
    ("validation_accuracy", "accuracy"),
    ("examples_per_s", "examples/s"),
    ("staleness_mean", "staleness"),
    ("learning_rate", "learning rate"),
)
_LOG_BYTES = 16_384  # number of bytes that are read at the end of a log
_LABEL = 9  # width of the labels left of a curve, in columns
# Bits of a character's dots, by row and column (Unicode 16.0, block 2800).
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

_INTERVAL: dict[str, Any] = {"type": click.FloatRange(min=_SHORTEST_S), "default": 1.0, "show_default": True}


@click.command("watch", epilog=examples("mpitrain watch", "mpitrain watch runs/mnist_mlp-20261121-141119"))
@click.argument("run", required=False, type=click.Path(path_type=Path), metavar="[RUN]")
@click.option("--interval", metavar="SECONDS", help="Seconds between updates.", **_INTERVAL)
def watch_command(run: Path | None, interval: float) -> None:
    """Show a live view of a run in the terminal, until it ends. Ctrl-C quits; the run continues.

    Without RUN, it shows the latest run in the folder runs.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console()
    view = View(run or latest_run())
    view.look()
    with Live(view.render(console.width, console.height), console=console, auto_refresh=False) as live:
        try:
            while not view.ended:
                time.sleep(interval)
                view.look()
                live.update(view.render(console.width, console.height), refresh=True)
        except KeyboardInterrupt:
            pass


@dataclass
class View:
    """The current state of a run.

    Args:
        folder: The run directory.
        now: Returns the time in seconds.

    Raises:
        RecordError: The folder is not a run directory, or cannot be read.
    """

    folder: Path
    now: Callable[[], float] = time.monotonic
    state: status.State = field(default="unknown", init=False)

    def __post_init__(self) -> None:
        self.run: Run = open_run(self.folder)
        self._tail = Tail(self.folder / METRICS)
        self._status: status.Status | None = None
        self._beat, self._beat_at = -1, self.now()

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self.state in status.ENDED

    def look(self) -> None:
        """Read the status, and the metrics that were added since the last call."""
        lines = self._tail.read()
        if lines:
            self.run.add(lines)
        self._status = status.read(self.folder)
        if self._status is None:
            self.state = "unknown"
            return
        if self._status.heartbeat != self._beat:
            self._beat, self._beat_at = self._status.heartbeat, self.now()
        # The age is measured with the viewer's own clock, from the time when it saw the last heartbeat change.
        age = self.now() - self._beat_at
        own_host = status.ProcessHost.own()
        state = status.classify(self._status, own_host, age, is_alive)
        self.state = "died" if state is None or (state == "running" and status.has_failed(self.folder)) else state
        if not self.run.config and self.state != "submitted":
            self.run.config = open_run(self.folder).config  # the file is complete before the run's first heartbeat

    @property
    def step(self) -> int:
        """The latest known step."""
        return max(self.run.step, self._status.step if self._status is not None else 0)

    def render(self, width: int, height: int) -> RenderableType:
        """Return the view for a terminal of ``width`` columns and ``height`` lines."""
        from rich.console import Group
        from rich.text import Text

        head: list[RenderableType] = [
            Text.assemble((self.run.name, "bold"), "  ", self._about(), overflow="ellipsis", no_wrap=True)
        ]
        if self.run.option("mode") == PROGRAM:
            head.append(Text(f" step {self.step:,}" if self.step else ""))
            return Group(*head, *_last_lines(path_for(self.folder, 0), height - len(head) - 1))
        head += [self._progress(width), Text(self._newest(), overflow="ellipsis", no_wrap=True)]
        head += [Text(line, overflow="ellipsis", no_wrap=True) for line in learner_lines(self.folder)[: height // 2]]
        # One line is reserved for the cursor; a view that fills the terminal would scroll.
        return Group(*head, *self._plots(width, height - len(head) - 1))

    def _about(self) -> str:
        if self._status is not None and self._status.job is not None and self.state == "submitted":
            job = self._status.job
            return f"{job.name}, {self._status.ranks}: submitted as job {job.job_id}"
        ranks = f", {self._status.ranks} on {self._status.host.hostname}" if self._status is not None else ""
        return f"{self.run.job}, {self.run.option('mode') or '?'}{ranks}: {self.state}"

    def _progress(self, width: int) -> RenderableType:
        from rich.text import Text

        goal, done = self.run.train_steps, f" step {self.step:,}"
        if not goal:
            return Text(done)
        part = min(1.0, self.step / goal)
        words = f"{done} of {goal:,}, {100 * part:.0f} %, {duration(self.run.seconds)}{self._left(goal)}"
        room = max(0, width - len(words) - 1)
        full = round(part * room)
        return Text.assemble(("━" * full, "green"), ("─" * (room - full), "bright_black"), words, no_wrap=True)

    def _left(self, goal: int) -> str:
        speed = self.run.series("step_s").last
        if self.state != "running" or not speed > 0 or self.step >= goal:
            return ""
        return f", {duration((goal - self.step) * speed)} left"

    def _numbers(self) -> list[tuple[str, str]]:
        """Return names and titles of the values to show: the numbers of every run, and others of this run."""
        return [*_PLOTS, *((name, shown_name(name)) for name in self.run.further_names())]

    def _newest(self) -> str:
        parts = []
        for name, title in self._numbers():
            value = self.run.series(name).last
            if value == value:
                parts.append(f"{_value(value)} {title}" if name == "examples_per_s" else f"{title} {_value(value)}")
        return "  ".join(parts) or "no metrics yet"

    def _plots(self, width: int, height: int) -> list[RenderableType]:
        """Return as many curves as fit, in two columns if the terminal is wide enough."""
        from rich.table import Table

        charts = [(title, series) for name, title in self._numbers() if len(series := self.run.series(name)) > 1]
        across = 2 if width >= 76 and len(charts) > 1 else 1
        down = min(-(-len(charts) // across), max(1, height // 6))
        if not charts or height < 5:
            return []
        chart_height = min(max(3, height // down - 3), 14)
        grid = Table.grid(padding=(0, 2, 0, 0))
        size = (width - 3 * (across - 1)) // across
        for at in range(0, down * across, across):
            grid.add_row(*(_plot(title, series, size, chart_height) for title, series in charts[at : at + across]))
        return [grid]


def _last_lines(path: Path, number: int) -> list[RenderableType]:
    """Return the last lines of a log file; for a progress bar, which rewrites its line, only the last state."""
    from rich.text import Text

    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines if line.strip()]
    return [Text(line, overflow="ellipsis", no_wrap=True) for line in shown[-number:]] if number > 0 else []


def _plot(title: str, series: Series, width: int, height: int) -> RenderableType:
    """Return one curve with its range, in ``height + 2`` lines."""
    from rich.text import Text

    values = series.values[np.isfinite(series.values)]
    lowest, highest = (values.min(), values.max()) if len(values) else (float("nan"), float("nan"))
    rows = curve(series.steps, series.values, max(4, width - _LABEL - 1), height)
    labels = {0: _value(highest), height - 1: _value(lowest)} if highest > lowest else {height // 2: _value(lowest)}
    text = Text(no_wrap=True)
    text.append(f"{'':{_LABEL}} {title}\n", style="bold")
    for index, row in enumerate(rows):
        text.append(f"{labels.get(index, ''):>{_LABEL}} ")
        text.append(row + "\n", style="cyan")
    first, last = f"{series.steps[0]:,}", f"step {series.steps[-1]:,}"
    text.append(f"{'':{_LABEL}} {first}{last:>{max(1, len(rows[0]) - len(first))}}", style="bright_black")
    return text


def _value(value: float) -> str:
    return amount(value) if abs(value) >= 1000 else f"{value:.4g}"


def curve(x: Array, y: Array, width: int, height: int) -> list[str]:
    """Draw ``y`` over ``x`` into ``height`` lines of ``width`` characters; the value range fills the area.

    Args:
        x: Shape (n,), increasing.
        y: Shape (n,); non-finite values are ignored.
    """
    finite = np.isfinite(y)
    x, y = np.asarray(x, np.float64)[finite], np.asarray(y, np.float64)[finite]
    dots = np.zeros((4 * height, 2 * width), bool)
    if len(x):
        _draw(dots, x, y)
    cells = dots.reshape(height, 4, width, 2).transpose(0, 2, 1, 3) * np.array(_BITS)
    return ["".join(chr(0x2800 + bits) for bits in row) for row in cells.sum(axis=(2, 3)).tolist()]


def _draw(dots: Array, x: Array, y: Array) -> None:
    """Set the dots from the lowest to the highest value of each column, connected to the previous column."""
    rows, columns = dots.shape
    lowest, extent = y.min(), np.ptp(y)
    level = (y - lowest) / extent if extent else np.full(len(y), 0.5)
    row = np.rint((1 - level) * (rows - 1))
    column = np.rint((x - x[0]) / (np.ptp(x) or 1.0) * (columns - 1)).astype(np.int64)
    between = np.interp(np.arange(columns), column, row)
    for at in range(int(column[0]), int(column[-1]) + 1):
        in_column = row[column == at]
        reached = [between[at], *in_column, *([between[at - 1]] if at else [])]
        dots[round(min(reached)) : round(max(reached)) + 1, at] = True
