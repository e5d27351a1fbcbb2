"""Charts as images, drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .charts import COLORS, Chart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _GRID = "#2b2f36", "#b9bec7"
_SIZE = (5.0, 3.4)  # inches
_IDEAL = "#7F7F7F"
_WIDTH, _HEIGHT, _LEGEND_ROW = 5.0, 3.3, 0.22  # inches
_MAX_NAMED = 8  # maximum number of curves in a legend; a longer legend would be larger than the plot
_STYLES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "sans-serif"],
    "font.size": 9,
    "text.parse_math": False,  # a run's name may contain a dollar sign
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
}


def as_png(chart: Chart) -> bytes:
    """Return a PNG image with two pixels per CSS pixel."""
    import matplotlib
    from matplotlib.figure import Figure

    data = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(chart.title, fontsize=10)
        if chart.stacked:
            figure.set_figheight(1.6 + 0.24 * len(chart.bars[0].names))
            _draw_stacked(axes, chart)
        elif chart.bars:
            _draw_bars(axes, chart)
        else:
            _draw_curves(axes, chart)
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1 and (chart.stacked or len(labels) <= _MAX_NAMED):
            figure.legend(handles, labels, loc="outside lower center", ncols=3)  # a position that does not cover curves
        figure.savefig(data, format="png", dpi=200, facecolor="white")
    return data.getvalue()


def _draw_curves(axes: Axes, chart: Chart) -> None:
    for curve in chart.curves:
        alpha = 0.45 if curve.faint else 1.0
        marks: dict[str, Any] = {"marker": "o", "markersize": 3.5} if curve.marked else {}
        style, label = _STYLES[curve.dash], curve.label or None
        axes.plot(curve.x, curve.y, style, color=curve.color, label=label, alpha=alpha, **marks)
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.x, curve.low, curve.high, color=curve.color, alpha=0.15 * alpha, linewidth=0)
    axes.margins(x=0.02)
    axes.xaxis.set_major_formatter(_plain_number)
    if chart.scale == "log":
        _set_log_scale(axes, chart)
    else:
        axes.yaxis.set_major_formatter(_plain_number)
        axes.set_ylim(*chart.y_range)


def _draw_bars(axes: Axes, chart: Chart) -> None:
    width = 0.8 / len(chart.bars)
    for index, bars in enumerate(chart.bars):
        left = np.arange(len(bars.lengths)) - 0.4 + (index + 0.5) * width
        axes.bar(left, bars.lengths, width, color=bars.color, label=bars.label)
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter(_plain_number)


def _draw_stacked(axes: Axes, chart: Chart) -> None:
    names = chart.bars[0].names
    rows, left = np.arange(len(names)), np.zeros(len(names))
    for bars in chart.bars:
        axes.barh(rows, bars.lengths, left=left, height=0.72, color=bars.color, label=bars.label)
        left = left + bars.lengths
    axes.set_yticks(rows, list(names))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 100)


def _set_log_scale(axes: Axes, chart: Chart) -> None:
    """Set a logarithmic scale with so few labels that they do not collide."""
    from matplotlib.ticker import LogLocator, NullFormatter

    values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in chart.curves])
    axes.set_yscale("log")
    few_decades = values.max() < 300 * values.min()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few_decades else (1.0,), numticks=8))
    axes.yaxis.set_major_formatter(_plain_number)
    axes.yaxis.set_minor_formatter(NullFormatter())


def _plain_number(value: float, _: float) -> str:
    """Format numbers for axes: 1,500 and 0.25, and 2.5M instead of many zeros."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


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
