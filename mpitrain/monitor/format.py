"""Format numbers, times and table rows for the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len


def size_of(nbytes: float) -> str:
    """Format a number of bytes with a unit that leaves one to four digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 10_000:
            return f"{nbytes:,.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.0f} TiB"


def amount(value: float) -> str:
    """Format a count with few digits: 950, 12,400, 3.4M."""
    if not math.isfinite(value):
        return "?"
    if value >= 1e7:
        return f"{value / 1e6:,.0f}M"
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Format a time with its two largest units: 0.8 s, 45 s, 3 min 20 s, 2 h 5 min, 6 d 3 h."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    raise AssertionError


def metric(value: float) -> str:
    """Format a loss or a metric: with four decimals; below 0.001, with three significant digits."""
    return f"{value:.3g}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def wrap(text: str, columns: int) -> str:
    """Wrap lines between words, and keep their indentation; words longer than a line, such as paths, stay whole.

    Args:
        columns: The length of a line; 0 to leave the text as it is.
    """
    if not columns:
        return text
    keep: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}
    lines = text.split("\n")
    indents = [line[: len(line) - len(line.lstrip())] for line in lines]
    return "\n".join(
        textwrap.fill(line, columns, subsequent_indent=indent, **keep)
        for line, indent in zip(lines, indents, strict=True)
    )


def printable(text: str) -> str:
    """Escape all characters that are not printable, such as line breaks and terminal control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as lines of text: columns of numbers flush right, unprintable characters escaped."""
    columns = [[title, *map(printable, cells)] for title, *cells in zip(titles, *rows, strict=True)]
    for column in columns:
        width, is_numeric = max(map(cell_len, column)), all(map(_is_number, column[1:])) and len(column) > 1
        for index, cell in enumerate(column):
            space = " " * (width - cell_len(cell))
            column[index] = space + cell if is_numeric else cell + space
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _is_number(text: str) -> bool:
    return text.replace(",", "").replace(".", "").rstrip("%").rstrip().isdigit()
