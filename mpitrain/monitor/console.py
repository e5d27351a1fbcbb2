"""The chief's output: a progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from ..process.standard_streams import discard
from .format import metric, size_of, wrap

# Ranks do not write to a terminal but to their launcher: ``mpitrain run`` passes on the width of the user's terminal.
COLUMNS_VARIABLE = "MPITRAIN_TERMINAL_COLUMNS"
_UPDATE_S = 0.1  # shortest time between two updates of the bar: an update takes several microseconds

_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", metric),
    "learning_rate": ("learning rate", lambda x: f"{x:.4g}"),
    "grad_norm": ("gradient norm", lambda x: f"{x:.4g}"),
    "examples_per_s": ("", lambda x: f"{x:,.0f} examples/s"),
    "staleness_mean": ("staleness", lambda x: f"{x:.2f}"),
    "staleness_max": ("max staleness", lambda x: f"{x:.0f}"),
    "dropped": ("dropped", lambda x: f"{x:.0f}"),
    "moved_bytes": ("transferred", lambda x: f"{size_of(x)}"),
    "internode_bytes": ("between nodes", lambda x: f"{size_of(x)}"),
    "saved_bytes": ("saved by compression", lambda x: f"{size_of(x)}"),
    "step_s": ("", lambda x: f"{1e3 * x:.3g} ms/step"),
    "validation_loss": ("validation loss", metric),
    "validation_accuracy": ("accuracy", metric),
}

# Shown next to the bar; all of it must fit into 80 columns.
_IN_BAR: dict[str, Callable[[float], str]] = {
    "loss": lambda x: f"loss {metric(x)}",
    "examples_per_s": lambda x: f"{x:,.0f} ex/s",
    "staleness_mean": lambda x: f"stale {x:.1f}",
    "dropped": lambda x: f"{x:,.0f} dropped",
}


def terminal_columns() -> int:
    """Return the width of the user's terminal in characters; 0 if there is none."""
    columns = os.environ.get(COLUMNS_VARIABLE, "")
    if columns.isdigit():
        return int(columns)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() and sys.stderr.isatty() else 0


def print_wrapped(text: str, *, error: bool = True) -> None:
    """Print lines on standard error if ``error``, else on standard output; on a terminal, wrap them between words."""
    stream = sys.stderr if error else sys.stdout
    columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    print(wrap(text, columns), file=stream, flush=True)


class Console:
    """Prints for one rank: lines, and on a terminal a progress bar below them.

    Args:
        columns: Width of the terminal; 0 for plain lines.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._progress: Any = None  # a rich.progress.Progress
        self._task: Any = None
        self._updated_s = 0.0

    def start(self, step: int, train_steps: int) -> None:
        """Show the progress from ``step`` to ``train_steps``."""
        if not self._columns:
            return
        # Imported here: most ranks have no terminal.
        from rich.console import Console as Terminal
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        terminal = Terminal(file=sys.stderr, force_terminal=True, width=min(self._columns - 1, 100))
        self._progress = Progress(
            TaskProgressColumn(),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[values]}", markup=False),
            console=terminal,
            refresh_per_second=2,  # a refresh takes about a millisecond of the chief
        )
        self._task = self._progress.add_task("", total=train_steps, completed=step, values="")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Advance the bar to ``step``, at most ten times a second."""
        now = time.perf_counter()
        if self._progress is not None and now - self._updated_s > _UPDATE_S:
            self._updated_s = now
            self._progress.update(self._task, completed=step)

    def measured(self, step: int, values: dict[str, float]) -> None:
        """Show values measured at ``step``."""
        parts = [describe(name, value) for name, value in values.items()]
        validation = any(name.startswith("validation") for name in values)
        if self._progress is not None and not validation:
            shown = [form(values[name]) for name, form in _IN_BAR.items() if name in values]
            self._progress.update(self._task, completed=step, values="  ".join(shown))
        else:
            self.print(f"step {step:,}  " + "  ".join(parts))

    def print(self, line: str, error: bool = False) -> None:
        """Print a line above the bar; without a terminal to standard output, or to standard error if ``error``."""
        line = wrap(line, self._columns)
        # On the bar's stream, because a launcher may not preserve the order of lines between two streams.
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            stream = sys.stderr if self._columns or error else sys.stdout
            try:
                print(line, file=stream, flush=True)
            except OSError:  # the reader of a pipe has ended, or a disk is full
                discard(stream)

    def stop(self) -> None:
        """Close the bar, and leave it visible."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def describe(name: str, value: float) -> str:
    """Format a measured value with its name and unit."""
    label, form = _FORMATS.get(name, (name.replace("_", " "), lambda x: f"{x:.4g}"))
    return f"{label} {form(value)}".strip()
