"""The chief's output: a progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from tqdm import tqdm

# Ranks do not write to a terminal but to their launcher: ``mpitrain run`` passes on the width of the user's terminal.
COLUMNS_VARIABLE = "MPITRAIN_TERMINAL_COLUMNS"

_FORMATS: dict[str, tuple[str, Callable[[float], str]]] = {
    "loss": ("loss", lambda x: f"{x:.4f}"),
    "learning_rate": ("learning rate", lambda x: f"{x:.4g}"),
    "examples_per_s": ("", lambda x: f"{x:,.0f} examples/s"),
    "staleness_mean": ("staleness", lambda x: f"{x:.2f}"),
    "staleness_max": ("max staleness", lambda x: f"{x:.0f}"),
    "dropped": ("dropped", lambda x: f"{x:.0f}"),
    "moved_bytes": ("transferred", lambda x: f"{size_of(x)}"),
    "step_s": ("", lambda x: f"{1e3 * x:.3g} ms/step"),
    "validation_loss": ("validation loss", lambda x: f"{x:.4f}"),
    "validation_accuracy": ("accuracy", lambda x: f"{x:.4f}"),
}

# Shown next to the bar; all of it must fit into 80 columns.
_IN_BAR: dict[str, Callable[[float], str]] = {
    "loss": lambda x: f"loss {x:.4f}",
    "examples_per_s": lambda x: f"{x:,.0f} ex/s",
    "staleness_mean": lambda x: f"stale {x:.1f}",
    "dropped": lambda x: f"{x:,.0f} dropped",
}


def size_of(nbytes: float) -> str:
    """Format a number of bytes with a unit that leaves one to four digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 10_000:
            return f"{nbytes:,.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.0f} TiB"


def terminal_columns() -> int:
    """Return the width of the user's terminal in characters; 0 if there is none."""
    given = os.environ.get(COLUMNS_VARIABLE, "")
    if given.isdigit():
        return int(given)
    return shutil.get_terminal_size().columns if sys.stdout.isatty() and sys.stderr.isatty() else 0


class Console:
    """Prints for one rank.

    Args:
        columns: Width of the terminal; 0 for plain lines.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._bar: tqdm[None] | None = None

    def start(self, step: int, train_steps: int) -> None:
        """Show the progress from ``step`` to ``train_steps``."""
        if self._columns:
            self._bar = tqdm(
                total=train_steps,
                initial=step,
                unit="step",
                file=sys.stderr,
                ncols=min(self._columns - 1, 100),
                mininterval=0.2,
                miniters=1,
                bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}  {remaining} left{postfix}",
            )

    def advance(self, step: int) -> None:
        """Advance the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def measured(self, step: int, values: dict[str, float]) -> None:
        """Show values measured at ``step``."""
        parts = [describe(name, value) for name, value in values.items()]
        validation = any(name.startswith("validation") for name in values)
        if self._bar is not None and not validation:
            shown = [form(values[name]) for name, form in _IN_BAR.items() if name in values]
            self._bar.set_postfix_str("  ".join(shown), refresh=False)
        else:
            self.say(f"step {step:,}  " + "  ".join(parts))

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        # On the bar's stream, because a launcher may not preserve the order of lines between two streams.
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr if self._columns else sys.stdout, flush=True)

    def stop(self) -> None:
        """Close the bar, and leave it visible."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def describe(name: str, value: float) -> str:
    """Format a measured value with its name and unit."""
    label, form = _FORMATS.get(name, (name.replace("_", " "), lambda x: f"{x:.4g}"))
    return f"{label} {form(value)}".strip()


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns; columns of numbers are flush right."""
    columns = list(zip(titles, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) and len(column) > 1 for column in columns]
    lines = []
    for row in (titles, *rows):
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").rstrip("%").isdigit()
