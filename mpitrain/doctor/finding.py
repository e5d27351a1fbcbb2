"""What a check finds, and how findings are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

# ``none``: the thing is not here, or there was nothing to try it on; that is no fault by itself.
Verdict = Literal["pass", "warning", "failure", "none"]

_STYLES = {"pass": "green", "warning": "yellow", "failure": "bold red", "none": "dim"}
_SHOWN = {"pass": "pass", "warning": "warning", "failure": "failure", "none": "-"}


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        topic: What it belongs to, such as ``MPI``.
        check: What was looked at.
        verdict: How it is.
        found: What was seen.
        mend: What to do about it, where there is anything.
    """

    topic: str
    check: str
    verdict: Verdict
    found: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """1 where anything fails, else 0."""
    return int(any(finding.verdict == "failure" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """Findings as a JSON array of objects."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print findings by topic, and how many there are of each verdict."""
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        console.print(Text(topic, style="bold"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, min_width=9)
        grid.add_column(no_wrap=True, min_width=_WIDEST)
        grid.add_column(overflow="fold")
        for finding in group:
            style = _STYLES[finding.verdict]
            grid.add_row(Text(f"  {_SHOWN[finding.verdict]}", style=style), finding.check, Text(finding.found))
            if finding.advice:
                grid.add_row("", "", Text(f"-> {finding.advice}", style=style))
        console.print(grid)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("failure", "warning", "pass")}
    console.print(
        f"{counts['failure']} failure{'s' * (counts['failure'] != 1)}, "
        f"{counts['warning']} warning{'s' * (counts['warning'] != 1)}, {counts['pass']} passed",
        highlight=False,
    )


_WIDEST = 18  # of the checks' names, so that the topics' tables stand below each other
