"""Plots of one or more runs, as matplotlib figures."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.layout import Array
from ..plan.metric import PREFIX
from .history import Run, Series, shown_name
from .time_shares import GROUPS, Shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with any kind of color vision (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
_GROUP_COLORS = dict(
    zip(GROUPS, ("#009E73", "#D55E00", "#E69F00", "#56B4E9", "#8C564B", "#CC79A7", "#0072B2", "#9A9A9A"), strict=True)
)
_INK, _GRID = "#2b2f36", "#b9bec7"
_MAX_POINTS = 800  # per curve: more than a plot has pixels
_MAX_BARS = 24  # above this number of ranks, only their mean is shown
_SIZE = (5.0, 3.1)  # inches
_STYLE: Any = {
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
    "axes.formatter.limits": (-4, 6),
    "axes.formatter.useoffset": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",  # keep text as text: searchable and accessible
}


@dataclass(frozen=True)
class PlottedRun:
    """A run in the plots.

    Attributes:
        label: Its unique label.
        shares: The summary of its trace, if it has one.
    """

    run: Run
    label: str
    color: str
    shares: Shares | None = None


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        name: Name for files and anchors.
        title: Title for readers.
        about: A sentence that describes the plot.
    """

    name: str
    title: str
    about: str
    figure: Figure


def make_plots(shown: Sequence[PlottedRun]) -> list[Plot]:
    """Return every plot that the runs have data for."""
    import matplotlib

    plots = []
    names = dict.fromkeys(name for run in shown for name in run.run.further_names())
    with matplotlib.rc_context(_STYLE):
        for name, title, about, draw in (*_PLOTS[:_AFTER_ACCURACY], *map(_plot_of, names), *_PLOTS[_AFTER_ACCURACY:]):
            figure = _new_figure()
            axes = figure.add_subplot()
            if draw(axes, shown):
                plots.append(Plot(name, title, about, figure))
    return plots


def as_svg(plot: Plot) -> str:
    """Return an ``svg`` element for a page: it uses the page's text color, and its ids are unique to the plot."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": plot.name}):
        plot.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    width, height = (72 * size for size in plot.figure.get_size_inches())
    head = (
        f'<svg role="img" aria-label="{plot.about}" viewBox="0 0 {width:g} {height:g}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return head + svg[svg.index(">") + 1 :]


def as_png(plot: Plot) -> bytes:
    """Return a PNG image with two pixels per CSS pixel."""
    import matplotlib

    data = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        plot.figure.savefig(data, format="png", dpi=200, facecolor="white")
    return data.getvalue()


def _new_figure() -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE, layout="constrained")


def _loss(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
    several = len(shown) > 1
    drawn = []
    for run in shown:
        training, validation = run.run.series("loss"), run.run.series("validation_loss")
        faint = 0.45 if len(validation) else 1.0
        label = None if len(validation) else run.label if several else "training"
        drawn += _curve(axes, training, run.color, label or ("training" if not several else None), alpha=faint)
        label = run.label if several else "validation"
        drawn += _curve(axes, validation, run.color if several else COLORS[1], label, marker=True)
    if several and any(len(run.run.series("validation_loss")) for run in shown):
        axes.plot([], [], color=_INK, alpha=0.45, label="training (faint)")
    return _finish(axes, drawn, "step", "loss", legend=True, log="auto")


def _loss_by_time(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
    longest = max((run.run.seconds for run in shown), default=0.0)
    unit, seconds = next((u, s) for u, s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if longest >= 2 * s or s == 1)
    drawn = []
    for run in shown:
        validation = run.run.series("validation_loss")
        curve = validation if len(validation) > 1 else run.run.series("loss")
        drawn += _curve(axes, curve, run.color, run.label, x=curve.times / seconds, marker=curve is validation)
    return _finish(axes, drawn, f"training time, {unit}", "loss", legend=len(shown) > 1, log="auto")


def _of(name: str, ylabel: str, **finish: Any) -> Callable[[Axes, Sequence[PlottedRun]], bool]:
    """Return a function that draws one metric of each run by step."""

    def draw(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
        drawn = []
        for run in shown:
            curve = run.run.series(name)
            drawn += _curve(axes, curve, run.color, run.label, marker=len(curve) <= 40)
        return _finish(axes, drawn, "step", ylabel, legend=len(shown) > 1, **finish)

    return draw


def _plot_of(name: str) -> tuple[str, str, str, _Draw]:
    """Return the plot of a metric of the job, or of another number of its own."""
    kind = "on the validation examples" if name.startswith(PREFIX) else "as the job or script records it"
    shown = shown_name(name)
    return re.sub(r"\W", "-", name), shown, f"{shown}, {kind}, by step.", _of(name, shown)


def _dropped(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
    """Nothing is drawn where nothing was dropped."""
    any_dropped = any(np.nansum(run.run.series("dropped").values) > 0 for run in shown)
    return any_dropped and _of("dropped", "gradients", zero=True)(axes, shown)


def _staleness(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
    drawn = []
    for run in shown:
        several = len(shown) > 1
        drawn += _curve(axes, run.run.series("staleness_mean"), run.color, run.label if several else "mean")
        most = run.run.series("staleness_max")
        drawn += _curve(axes, most, run.color, None if several else "max", style=":", alpha=0.7)
    if drawn and len(shown) > 1:
        axes.plot([], [], ":", color=_INK, label="max (dotted)")
    return _finish(axes, drawn, "step", "updates missed by a gradient", legend=True, zero=True)


def _staleness_histogram(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
    found = [(run, counts) for run in shown if (counts := run.run.newest("staleness_histogram")) and sum(counts)]
    width = 0.8 / max(1, len(found))
    for index, (run, counts) in enumerate(found):
        counts = np.trim_zeros(np.asarray(counts, np.float64), "b")
        share = 100 * counts / counts.sum()
        left = np.arange(len(counts)) - 0.4 + (index + 0.5) * width
        axes.bar(left, share, width, color=run.color, label=run.label)
    axes.locator_params(axis="x", integer=True)
    return _finish(axes, found, "updates missed by a gradient", "% of gradients", legend=len(found) > 1)


def _workers(value: str, ylabel: str) -> Callable[[Axes, Sequence[PlottedRun]], bool]:
    """Return a function that draws one of the workers' final statistics for each run."""

    def draw(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
        found = [(run, worker_stats) for run in shown if (worker_stats := run.run.newest("workers"))]
        found = [(run, worker_stats) for run, worker_stats in found if any(_number(a.get(value)) for a in worker_stats)]
        width = 0.8 / max(1, len(found))
        for index, (run, worker_stats) in enumerate(found):
            left = np.arange(len(worker_stats)) - 0.4 + (index + 0.5) * width
            axes.bar(left, [_number(a.get(value)) for a in worker_stats], width, color=run.color, label=run.label)
        axes.locator_params(axis="x", integer=True)
        return _finish(axes, found, "worker", ylabel, legend=len(found) > 1)

    return draw


def _time_shares(axes: Axes, shown: Sequence[PlottedRun]) -> bool:
    rows = [row for run in shown if run.shares is not None for row in _bars(run, len(shown) > 1)]
    if not rows:
        return False
    axes.figure.set_figheight(1.35 + 0.24 * len(rows))  # type: ignore[union-attr]
    for group in GROUPS:
        parts = np.array([parts[group] for _, parts in rows])
        before = np.array([sum(parts[g] for g in list(GROUPS)[: list(GROUPS).index(group)]) for _, parts in rows])
        if parts.any():
            axes.barh(np.arange(len(rows)), parts, left=before, height=0.72, color=_GROUP_COLORS[group], label=group)
    axes.set_yticks(np.arange(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of time")
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, columnspacing=1.2, handlelength=1.2)
    return True


def _bars(run: PlottedRun, several: bool) -> list[tuple[str, dict[str, float]]]:
    """Return the percentage of time by group for each rank; the mean of all ranks if there are many."""
    assert run.shares is not None
    prefix = f"{run.label}: " if several else ""
    if len(run.shares.ranks) > _MAX_BARS:
        return [(f"{prefix}mean of {len(run.shares.ranks)}", {g: 100 * run.shares.fraction(g) for g in GROUPS})]
    return [
        (f"{prefix}rank {rank.rank}", {g: 100 * rank.group_s(g) / (rank.total_s or 1.0) for g in GROUPS})
        for rank in run.shares.ranks
    ]


def _curve(
    axes: Axes,
    series: Series,
    color: str,
    label: str | None,
    x: Array | None = None,
    marker: bool = False,
    style: str = "-",
    alpha: float = 1.0,
) -> list[object]:
    """Draw one curve; return what was drawn. Long curves are reduced to means with a shaded range."""
    if not len(series):
        return []
    x = series.steps if x is None else x
    shown, low, mean, high = _thinned(x, series.values)
    marks: dict[str, Any] = {"marker": "o", "markersize": 3.5} if marker and len(shown) <= 60 else {}
    if len(shown) == 1:
        marks = {"marker": "o", "markersize": 4}
    line = axes.plot(shown, mean, style, color=color, label=label, alpha=alpha, **marks)
    if len(shown) < len(x):
        axes.fill_between(shown, low, high, color=color, alpha=0.15 * alpha, linewidth=0)
    return list(line)


def _thinned(x: Array, values: Array) -> tuple[Array, Array, Array, Array]:
    """Reduce to at most ``_MAX_POINTS`` points: last x, lowest, mean and highest value of neighboring points."""
    if len(x) <= _MAX_POINTS:
        return x, values, values, values
    cuts = np.linspace(0, len(x), _MAX_POINTS + 1).astype(np.int64)[:-1]
    ends = np.append(cuts[1:], len(x)) - 1
    finite = np.isfinite(values)
    count = np.add.reduceat(finite, cuts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), cuts)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return x[ends], np.fmin.reduceat(values, cuts), mean, np.fmax.reduceat(values, cuts)


def _finish(
    axes: Axes,
    drawn: Sequence[object],
    xlabel: str,
    ylabel: str,
    legend: bool = False,
    log: str = "",
    zero: bool = False,
) -> bool:
    """Label the axes; return whether there is anything to show."""
    if not drawn:
        return False
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if log == "auto" and _spans_decades(axes):
        _plain_log_scale(axes)
    elif zero:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_thousands)
    axes.xaxis.set_major_formatter(_thousands)
    axes.margins(x=0.02)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend()
    return True


def _plain_log_scale(axes: Axes) -> None:
    """Set a logarithmic scale with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _spans_decades(axes: Axes) -> bool:
    """Return whether the values are positive and differ enough for a logarithmic scale."""
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()])
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() > 0 and values.max() > 30 * values.min()


def _thousands(value: float, _: float) -> str:
    """Format numbers for axes: 1,500 and 0.25, and 2.5M instead of many zeros."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.4g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


_Draw = Callable[["Axes", Sequence[PlottedRun]], bool]
_AFTER_ACCURACY = 2
_PLOTS: tuple[tuple[str, str, str, _Draw], ...] = (
    ("loss", "Loss", "Mean loss over the training batches and on the validation examples, by step.", _loss),
    (
        "accuracy",
        "Accuracy",
        "Share of validation examples that are classified correctly, by step.",
        _of("validation_accuracy", "accuracy"),
    ),  # followed by the job's own metrics
    ("loss-by-time", "Loss by time", "Validation loss, or training loss if there is none, by time.", _loss_by_time),
    (
        "learning-rate",
        "Learning rate",
        "The optimizer's learning rate, by step.",
        _of("learning_rate", "learning rate", zero=True),
    ),
    (
        "throughput",
        "Throughput",
        "Examples per second of all workers, without validation and saving.",
        _of("examples_per_s", "examples/s", zero=True),
    ),
    (
        "internode-bytes",
        "Bytes between nodes",
        "Bytes that all workers have sent to other nodes since the last report, by step.",
        _of("internode_bytes", "bytes", zero=True),
    ),
    (
        "staleness",
        "Staleness",
        "Updates of the parameters between reading them and applying the gradient, by step.",
        _staleness,
    ),
    (
        "staleness-histogram",
        "Staleness, all gradients",
        "Distribution of staleness over all gradients, at the end of the run.",
        _staleness_histogram,
    ),
    ("dropped", "Dropped gradients", "Gradients that came too late to be used, by step.", _dropped),
    (
        "workers",
        "Throughput by worker",
        "Examples per second of each worker, over the whole run.",
        _workers("examples_per_s", "examples/s"),
    ),
    (
        "workers-staleness",
        "Staleness by worker",
        "Mean staleness of each worker's gradients.",
        _workers("staleness_mean", "updates missed"),
    ),
    ("time-shares", "Time use", "Share of each rank's time by activity.", _time_shares),
)
