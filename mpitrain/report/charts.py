"""The data of the plots of one or more runs, independent of plotting libraries."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..core.layout import Array
from ..monitor.goodput import KINDS
from ..plan.metric import PREFIX
from .history import Run, Series, shown_name
from .time_shares import GROUPS, Shares

# Distinguishable with any kind of color vision (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")
_GROUP_COLORS = dict(
    zip(GROUPS, ("#009E73", "#D55E00", "#E69F00", "#56B4E9", "#8C564B", "#CC79A7", "#0072B2", "#9A9A9A"), strict=True)
)
# Activities that the time of the ranks has, too, have the same color.
_KIND_COLORS = dict(
    zip(
        KINDS,
        "#009E73 #E69F00 #B2182B #56B4E9 #0072B2 #4D4D9A #CC79A7 #8C564B #F0E442 #7F7F7F #C4C4C4".split(),
        strict=True,
    )
)
_MAX_POINTS = 800  # maximum number of points per curve: more than a plot has pixels
_MAX_POINTS_OF_MANY = 300  # maximum number of points if there are many curves, so that the page stays small
_FEW = 3  # maximum number of runs whose curves show a range, and whose ranks have bars of their own
_MAX_BARS = 24  # above this number of ranks, only the mean of all ranks is shown
_LEAST_SHARE = 0.1  # percentage below which a kind of time is not shown
_DECADES = 30  # ratio of the largest to the smallest value from which a scale is logarithmic


@dataclass(frozen=True)
class PlottedRun:
    """A run in the plots.

    Attributes:
        label: The run's unique label.
        color, dash: Color and dash of the run's curves; the dash distinguishes curves that coincide.
        shares: The summary of its trace, if it has one.
    """

    run: Run
    label: str
    color: str
    dash: str = DASHES[0]
    shares: Shares | None = None


@dataclass(frozen=True)
class Curve:
    """A line.

    Attributes:
        label: Label in the legend; empty if another curve of the same ``group`` has the label.
        group: The run to which the curve belongs.
        x, y: Shape (n,); NaN interrupts the line.
        low, high: Shape (n,): the range of the values that a point averages; None if a point is one value.
        marked: Whether its points are marked.
        faint: Whether it is less important than other curves of the chart.
    """

    label: str
    group: str
    color: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    dash: str = "solid"
    marked: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Bars:
    """Bars of one color: at the positions 0, 1, 2, ..., or by name.

    Attributes:
        names: Names of the bars; empty to use their positions.
        lengths: Shape (n,).
    """

    label: str
    color: str
    lengths: Array
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A plot.

    Attributes:
        name: Name for files and anchors.
        title: Title for readers.
        about: A sentence that describes the plot.
        x, y: Titles of the axes.
        scale: Scale of the y axis.
        y_range: Ends of the y axis; None for ends that follow from the values.
        stacked: Whether bars are horizontal, and bars of the same name are stacked.
        curves, bars: The curves and bars of the plot.
    """

    name: str
    title: str
    about: str
    x: str
    y: str
    scale: Literal["linear", "log"] = "linear"
    y_range: tuple[float | None, float | None] = (None, None)
    stacked: bool = False
    curves: tuple[Curve, ...] = ()
    bars: tuple[Bars, ...] = ()


def line_style(index: int) -> tuple[str, str]:
    """Return color and dash of a run's curves: unique for 32 runs; consecutive runs have different dashes."""
    return COLORS[index % len(COLORS)], DASHES[(index + index // len(COLORS)) % len(DASHES)]


def make_charts(shown: Sequence[PlottedRun]) -> list[Chart]:
    """Return every chart that the runs have data for, the most important ones first."""
    names = dict.fromkeys(name for run in shown for name in run.run.further_names())
    charts = [
        _loss(shown),
        _by_step(shown, "validation_accuracy", _ACCURACY),
        *(_by_step(shown, name, _further(name)) for name in names),
        *_loss_by_time(shown),
        _throughput(shown),
        *(_by_step(shown, name, chart) for name, chart in _OF_NUMBERS.items()),
        _dropped(shown),
        _staleness(shown),
        _staleness_histogram(shown),
        *(_workers(shown, name, chart) for name, chart in _OF_WORKERS.items()),
        _goodput(shown),
        _time_shares(shown),
    ]
    return [chart for chart in charts if chart.curves or chart.bars]


_ACCURACY = Chart(
    "accuracy",
    "Accuracy",
    "Share of validation examples that are classified correctly, by step.",
    "step",
    "accuracy",
    y_range=(None, 1.0),
)
_FROM_ZERO = (0.0, None)
_OF_NUMBERS = {
    "grad_norm": Chart(
        "gradient-norm", "Gradient norm", "Norm of the averaged gradient, before clipping, by step.", "step", "norm"
    ),
    "learning_rate": Chart(
        "learning-rate",
        "Learning rate",
        "The optimizer's learning rate, by step.",
        "step",
        "learning rate",
        y_range=_FROM_ZERO,
    ),
    "internode_bytes": Chart(
        "internode-bytes",
        "Bytes between nodes",
        "Bytes that all workers have sent to other nodes since the last report, by step.",
        "step",
        "bytes",
        y_range=_FROM_ZERO,
    ),
}
_OF_WORKERS = {
    "examples_per_s": Chart(
        "workers",
        "Throughput by worker",
        "Examples per second of each worker, over the whole run.",
        "worker",
        "examples/s",
    ),
    "staleness_mean": Chart(
        "workers-staleness",
        "Staleness by worker",
        "Mean staleness of each worker's gradients.",
        "worker",
        "updates missed",
    ),
}


def _further(name: str) -> Chart:
    """Return the chart of a metric of the job, or of another number that it records."""
    kind = "on the validation examples" if name.startswith(PREFIX) else "as the job or script records it"
    title = shown_name(name)
    return Chart(re.sub(r"\W", "-", name), title, f"{title}, {kind}, by step.", "step", title)


def _loss(shown: Sequence[PlottedRun]) -> Chart:
    about = "Mean loss over the training batches and on the validation examples, by step."
    chart = Chart("loss", "Loss", about, "step", "loss")
    curves: list[Curve] = []
    for run in shown:
        training, validation = run.run.series("loss"), run.run.series("validation_loss")
        several, both = len(shown) > 1, len(validation) > 0
        curves += _curve(
            run, training, len(shown), label="" if several and both else "training", faint=both, several=several
        )
        color = run.color if several else COLORS[1]
        curves += _curve(run, validation, len(shown), label="validation", color=color, marked=True, several=several)
    if len(shown) > 1 and any(curve.faint for curve in curves):
        chart = replace(chart, about=f"{chart.about} Training is faint.")
    return _scaled(replace(chart, curves=tuple(curves)))


def _loss_by_time(shown: Sequence[PlottedRun]) -> Iterator[Chart]:
    """Yield one chart, so that all curves are of one kind: validation loss if all runs have it, else training loss."""
    validated = all(len(run.run.series("validation_loss")) > 1 for run in shown)
    name, kind = ("validation_loss", "validation") if validated else ("loss", "training")
    longest = max((run.run.seconds for run in shown), default=0.0)
    unit, seconds = next((u, s) for u, s in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if longest >= 2 * s or s == 1)
    title = f"{kind.capitalize()} loss by time"
    chart = Chart("loss-by-time", title, f"{title}, of all attempts.", f"training time, {unit}", f"{kind} loss")
    curves = [
        curve
        for run in shown
        for curve in _curve(run, run.run.series(name), len(shown), x=run.run.series(name).times / seconds)
    ]
    yield _scaled(replace(chart, curves=tuple(curves)))


def _throughput(shown: Sequence[PlottedRun]) -> Chart:
    about = "Examples per second of all workers, without validation and saving."
    chart = Chart("throughput", "Throughput", about, "step", "examples/s", y_range=_FROM_ZERO)
    return _by_step(shown, "examples_per_s", chart)


def _by_step(shown: Sequence[PlottedRun], name: str, chart: Chart) -> Chart:
    """Return the chart with the values of one number of each run by step."""
    curves = tuple(curve for run in shown for curve in _curve(run, run.run.series(name), len(shown)))
    return _scaled(replace(chart, curves=curves)) if chart.name == "gradient-norm" else replace(chart, curves=curves)


def _dropped(shown: Sequence[PlottedRun]) -> Chart:
    """Return the chart of dropped gradients, without curves if no run has dropped any."""
    about = "Gradients that came too late to be used, by step."
    chart = Chart("dropped", "Dropped gradients", about, "step", "gradients", y_range=_FROM_ZERO)
    any_dropped = any(np.nansum(run.run.series("dropped").values) > 0 for run in shown)
    return _by_step(shown, "dropped", chart) if any_dropped else chart


def _staleness(shown: Sequence[PlottedRun]) -> Chart:
    curves: list[Curve] = []
    for run in shown:
        several = len(shown) > 1
        mean, most = run.run.series("staleness_mean"), run.run.series("staleness_max")
        curves += _curve(run, mean, len(shown), label="mean", several=several)
        label, color = ("", run.color) if several else ("maximum", COLORS[1])
        curves += _curve(run, most, len(shown), label=label, color=color, dash="dot", faint=several, several=several)
    return Chart(
        "staleness",
        "Staleness",
        "Updates of the parameters between reading them and applying the gradient, by step: mean, and maximum"
        + (" (dotted)." if len(shown) > 1 else "."),
        "step",
        "updates missed by a gradient",
        y_range=_FROM_ZERO,
        curves=tuple(curves),
    )


def _staleness_histogram(shown: Sequence[PlottedRun]) -> Chart:
    counted = [(run, counts) for run in shown if (counts := run.run.newest("staleness_histogram")) and sum(counts)]
    bars = []
    for run, counts in counted:
        lengths = np.trim_zeros(np.asarray(counts, np.float64), "b")
        bars.append(Bars(run.label, run.color, 100 * lengths / lengths.sum()))
    return Chart(
        "staleness-histogram",
        "Staleness, all gradients",
        "Distribution of staleness over all gradients, at the end of the run.",
        "updates missed by a gradient",
        "% of gradients",
        bars=tuple(bars),
    )


def _workers(shown: Sequence[PlottedRun], name: str, chart: Chart) -> Chart:
    """Return the chart of one of the workers' final statistics for each run."""
    bars = []
    for run in shown:
        lengths = np.array([_number(worker.get(name)) for worker in run.run.newest("workers") or []])
        if lengths.any():
            bars.append(Bars(run.label, run.color, lengths))
    return replace(chart, bars=tuple(bars))


def _goodput(shown: Sequence[PlottedRun]) -> Chart:
    """Return the chart of what the time of the runs went into, without bars if no run has recorded it."""
    accounts = [(run.label, account) for run in shown if (account := run.run.account) is not None]
    prefixes = [f"{label}: " if len(shown) > 1 else "" for label, _ in accounts]
    names = tuple(f"{p}{100 * account.goodput:.0f} %" for p, (_, account) in zip(prefixes, accounts, strict=True))
    bars = [
        Bars(kind, color, np.array([100 * account.shares.get(kind, 0.0) for _, account in accounts]), names)
        for kind, color in _KIND_COLORS.items()
    ]
    return Chart(
        "goodput",
        "Goodput",
        "Share of the time since the first start of a run that went into steps whose result is kept, and where the "
        "rest went.",
        "% of time",
        "",
        stacked=True,
        bars=tuple(part for part in bars if (part.lengths >= _LEAST_SHARE).any()),
    )


def _time_shares(shown: Sequence[PlottedRun]) -> Chart:
    rows = [row for run in shown if run.shares is not None for row in _rows(run, run.shares, len(shown))]
    names = tuple(name for name, _ in rows)
    bars = [Bars(group, _GROUP_COLORS[group], np.array([parts[group] for _, parts in rows]), names) for group in GROUPS]
    return Chart(
        "time-shares",
        "Time use",
        "Share of each rank's time by activity.",
        "% of time",
        "",
        stacked=True,
        bars=tuple(part for part in bars if part.lengths.any()),
    )


def _rows(run: PlottedRun, shares: Shares, n_runs: int) -> list[tuple[str, dict[str, float]]]:
    """Return the percentage of time by group for each rank; the mean of all ranks if there are many ranks or runs."""
    prefix = f"{run.label}: " if n_runs > 1 else ""
    if len(shares.ranks) > _MAX_BARS or n_runs > _FEW:
        return [(f"{prefix}mean of {len(shares.ranks)}", {group: 100 * shares.fraction(group) for group in GROUPS})]
    return [
        (f"{prefix}rank {rank.rank}", {group: 100 * rank.group_s(group) / (rank.total_s or 1.0) for group in GROUPS})
        for rank in shares.ranks
    ]


def _curve(
    run: PlottedRun,
    series: Series,
    n_runs: int,
    *,
    label: str | None = None,
    several: bool = True,
    color: str = "",
    dash: str = "",
    x: Array | None = None,
    marked: bool = False,
    faint: bool = False,
) -> list[Curve]:
    """Return a list of one curve, empty without values. Long curves are reduced to means, with a range for few runs.

    Args:
        label: The name of the measured value, if it is not obvious.
        several: Whether the run's label is shown in place of ``label``.
    """
    if not len(series):
        return []
    x = series.steps if x is None else x
    x, low, mean, high = thinned(x, series.values, _MAX_POINTS if n_runs <= _FEW else _MAX_POINTS_OF_MANY)
    has_range = len(x) < len(series) and n_runs <= _FEW
    return [
        Curve(
            run.label if label is None or (several and label) else label,
            run.label,
            color or run.color,
            x,
            mean,
            low if has_range else None,
            high if has_range else None,
            dash or run.dash,
            len(x) == 1 or (len(x) <= 60 and (marked or len(x) <= 12)),
            faint,
        )
    ]


def thinned(x: Array, values: Array, points: int) -> tuple[Array, Array, Array, Array]:
    """Reduce to at most this many points: last x, lowest, mean and highest value of neighboring points."""
    if len(x) <= points:
        return x, values, values, values
    cuts = np.linspace(0, len(x), points + 1).astype(np.int64)[:-1]
    ends = np.append(cuts[1:], len(x)) - 1
    finite = np.isfinite(values)
    count = np.add.reduceat(finite, cuts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), cuts)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return x[ends], np.fmin.reduceat(values, cuts), mean, np.fmax.reduceat(values, cuts)


def _scaled(chart: Chart) -> Chart:
    """Return the chart with a logarithmic scale if its values are positive and differ enough."""
    values = np.concatenate([curve.y for curve in chart.curves] or [np.zeros(0)])
    values = values[np.isfinite(values)]
    is_wide = bool(len(values)) and values.min() > 0 and values.max() > _DECADES * values.min()
    return replace(chart, scale="log") if is_wide else chart


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
