"""Curves of speed against the number of ranks, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .charts import COLORS
from .images import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_IDEAL = "#7F7F7F"
_WIDTH, _HEIGHT, _LEGEND_ROW = 5.0, 3.3, 0.22  # inches


@dataclass(frozen=True)
class SpeedCurve:
    """Speed by number of ranks.

    Attributes:
        points: Numbers of ranks and speeds.
        is_line: Whether the points are connected.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    is_line: bool = True


def write_scaling(path: Path, title: str, curves: Sequence[SpeedCurve], alone: float, y: str = "examples/s") -> None:
    """Draw curves with logarithmic axes, and the line of ideal scaling; as SVG if the file's name ends with ``.svg``.

    Args:
        alone: Speed of one rank.
        y: The title of the axis of speeds.

    Raises:
        OSError: The file cannot be written.
    """
    import matplotlib

    is_svg = path.suffix == ".svg"
    # Without a date and random ids the same curves make the same file.
    with matplotlib.rc_context({**SETTINGS, "svg.fonttype": "none", "svg.hashsalt": title}):
        figure = _draw(title, curves, alone, y)
        metadata: Any = {"Date": None} if is_svg else None
        figure.savefig(path, format=path.suffix[1:], dpi=200, facecolor="white", metadata=metadata)


def _draw(title: str, curves: Sequence[SpeedCurve], alone: float, y: str) -> Figure:
    from matplotlib.figure import Figure

    height = _HEIGHT + _LEGEND_ROW * (len(curves) // 2 + 1)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    ranks = sorted({rank for curve in curves for rank, _ in curve.points})
    axes.plot(ranks, [alone * rank for rank in ranks], ":", color=_IDEAL, label="ideal")
    for curve, color in zip(curves, COLORS * len(curves), strict=False):
        marks: Any = {"marker": "o", "markersize": 3} if curve.is_line else {"marker": "x", "markersize": 6}
        numbers, speeds = zip(*curve.points, strict=True)
        axes.plot(numbers, speeds, "-" if curve.is_line else "", color=color, label=curve.label, **marks)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    axes.yaxis.set_major_formatter(lambda value, position: f"{value:,g}")
    axes.set_xlabel("ranks")
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=2)
    return figure
