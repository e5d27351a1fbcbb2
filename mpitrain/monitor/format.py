"""Format numbers, times and table rows for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def printable(text: str) -> str:
    """Escape all characters that are not printable, such as line breaks and terminal control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Format rows as lines with aligned columns, two spaces apart; non-printable characters are escaped.

    Args:
        right: Indices of columns that are flush right.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
