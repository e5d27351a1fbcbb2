"""Curves of speed against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .charts import COLORS
from .images import SETTINGS


@dataclass(frozen=True)
class Curve:
    """Speed by number of ranks.

    Attributes:
        points: Numbers of ranks and speeds.
        is_line: Whether the points are connected.
    """

    label: str
    points: tuple[tuple[float, float], ...]
    is_line: bool = True


def draw_scaling(title: str, curves: Sequence[Curve], alone: float, ylabel: str = "examples/s") -> Plot:
    """Return a plot of curves with logarithmic axes, and the line of ideal scaling.

    Args:
        alone: Speed of one rank.
    """
    with style():
        figure = new_figure()
        axes = figure.add_subplot()
        ranks = sorted({rank for curve in curves for rank, _ in curve.points})
        axes.plot(ranks, [alone * rank for rank in ranks], ":", color="#7F7F7F", label="ideal")
        for curve, color in zip(curves, COLORS * len(curves), strict=False):
            x, y = zip(*curve.points, strict=True)
            marks: Any = {"marker": "o", "markersize": 3} if curve.is_line else {"marker": "x", "markersize": 6}
            axes.plot(x, y, "-" if curve.is_line else "", color=color, label=curve.label, **marks)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(ylabel)
        axes.set_title(title, fontsize=9)
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:,g}")
        figure.set_figheight(figure.get_figheight() + 0.25 * (len(curves) // 2 + 1))
        figure.legend(loc="outside lower center", ncols=2)
    return Plot("scaling", title, f"{title}: {ylabel} by number of ranks.", figure)


def write_plot(path: Path, plot: Plot) -> None:
    """Write a plot as PNG, or as SVG if the file's name ends with ``.svg``.

    Raises:
        OSError: It cannot be written.
    """
    if path.suffix == ".svg":
        path.write_text(as_svg(plot), encoding="utf-8")
    else:
        path.write_bytes(as_png(plot))
