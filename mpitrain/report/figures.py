"""Charts as figures of plotly.js, which a page draws; they can be zoomed."""

from __future__ import annotations

import base64
import gzip
import html
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from .charts import Bars, Chart, Curve

_MAX_NAMED = 8  # maximum number of curves in a legend; the colors of more curves are only in the table
_HEIGHT = 330  # pixels


def library() -> str:
    """Return plotly.js, compressed by gzip, as base64. Requires the package plotly."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None and spec.origin is not None
    script = Path(spec.origin).with_name("package_data") / "plotly.min.js"
    return base64.b64encode(gzip.compress(script.read_bytes(), mtime=0)).decode()


def figure(chart: Chart) -> dict[str, Any]:
    """Return a chart as JSON values for plotly.js; the page adds its colors."""
    traces = [trace for curve in chart.curves for trace in _lines(curve)]
    traces += [_bars(bars, chart.stacked) for bars in chart.bars]
    names = {trace["name"] for trace in traces if trace.get("showlegend", True)}
    layout: dict[str, Any] = {
        "height": _HEIGHT,
        "margin": {"l": 60, "r": 12, "t": 30, "b": 52},
        "xaxis": {"title": {"text": _text(chart.x), "standoff": 8}, "automargin": True, "separatethousands": True},
        "yaxis": {
            "title": {"text": _text(chart.y)},
            "automargin": True,
            "type": chart.scale,
            "separatethousands": True,
        },
        "showlegend": len(names) > 1 and (chart.stacked or len(names) <= _MAX_NAMED),
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "traceorder": "normal",
        },
        "hovermode": "x unified" if len(traces) <= _MAX_NAMED else "closest",
    }
    if chart.scale == "log":
        # With so few ticks, plotly labels at most 1, 2 and 5 of each decade, and the labels do not collide.
        layout["yaxis"] |= {"tickformat": "~g", "nticks": 4}
    elif chart.curves:
        layout["yaxis"]["range"] = _range(chart)
    if chart.stacked:
        layout |= {
            "barmode": "stack",
            "height": 106 + 26 * len(chart.bars[0].names) + 10 * len(chart.bars),
            "hovermode": "closest",
        }
        layout["xaxis"]["range"] = [0, 100]
        layout["yaxis"] = {"automargin": True, "autorange": "reversed", "type": "category"}
    return {"name": chart.name, "data": traces, "layout": layout}


def _range(chart: Chart) -> list[float] | None:
    """Return the ends of a linear y axis with some space around the values; None if plotly shall choose them."""
    values = np.concatenate([curve.y for curve in chart.curves])
    values = values[np.isfinite(values)]
    if chart.y_range == (None, None) or not len(values):
        return None
    space = 0.06 * (np.ptp(values) or abs(values.max()) or 1.0)
    low, high = chart.y_range
    return [float(values.min() - space) if low is None else low, float(values.max() + space) if high is None else high]


def _lines(curve: Curve) -> list[dict[str, Any]]:
    """Return the traces of a curve: its line, and its range if there is one."""
    common = {"type": "scatter", "x": _numbers(curve.x), "legendgroup": _text(f"{curve.group} {curve.label}")}
    line = {
        **common,
        "y": _numbers(curve.y),
        "name": _text(curve.label or curve.group),
        "showlegend": bool(curve.label),
        "mode": "lines+markers" if curve.marked else "lines",
        "line": {"color": curve.color, "dash": curve.dash, "width": 1.8},
        "marker": {"color": curve.color, "size": 5},
        "opacity": 0.45 if curve.faint else 1.0,
    }
    if curve.low is None or curve.high is None:
        return [line]
    unnamed = {**common, "name": "", "mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    fill = {"fill": "tonexty", "fillcolor": f"{curve.color}26"}  # opacity 15 %
    return [{**unnamed, "y": _numbers(curve.low)}, {**unnamed, **fill, "y": _numbers(curve.high)}, line]


def _bars(bars: Bars, stacked: bool) -> dict[str, Any]:
    lengths = _numbers(bars.lengths)
    names: Any = [_text(name) for name in bars.names] or list(range(len(bars.lengths)))
    axes = {"x": lengths, "y": names, "orientation": "h"} if stacked else {"x": names, "y": lengths}
    return {"type": "bar", "name": _text(bars.label), "marker": {"color": bars.color}, **axes}


def _numbers(values: Array) -> dict[str, str]:
    """Return an array in the form that plotly.js reads without loss; NaN is a gap."""
    kind = np.int32 if values.dtype.kind == "i" and abs(values).max(initial=0) < 2**31 else np.float32
    data = base64.b64encode(values.astype(kind).tobytes()).decode()
    return {"dtype": "i4" if kind is np.int32 else "f4", "bdata": data}


def _text(text: str) -> str:
    """Return text of users with escaped markup, because plotly.js would interpret it."""
    return html.escape(text, quote=False)
