"""The finding of a check, and how findings are printed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.words import counted

# ``none``: the tested feature is absent, or could not be tested; that alone is not an error.
Verdict = Literal["pass", "warning", "failure", "none"]

_STYLES = {"pass": "green", "warning": "yellow", "failure": "bold red", "none": "dim"}
_SHOWN = {"pass": "pass", "warning": "warning", "failure": "failure", "none": "-"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        topic: The group that the check belongs to, such as ``Ranks``.
        check: The name of the check.
        verdict: The result.
        details: The measurements or observations of the check; ``found`` in JSON.
        advice: How to fix the problem, if there is one.
    """

    topic: str
    check: str
    verdict: Verdict
    details: str
    advice: str = ""


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if any check failed, else 0."""
    return int(any(finding.verdict == "failure" for finding in findings))


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON array of objects."""
    names = {"details": "found"}  # earlier versions used this key for the details
    objects = [{names.get(name, name): value for name, value in asdict(finding).items()} for finding in findings]
    return json.dumps(objects, indent=2)


def from_json(text: str) -> list[Finding]:
    """Return the findings in the output of ``as_json``."""
    return [Finding(details=values.pop("found"), **values) for values in json.loads(text)]


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings by topic, and the number of findings of each verdict."""
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        console.print(Text(topic, style="bold"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, min_width=9)
        grid.add_column(no_wrap=True, min_width=_WIDEST)
        grid.add_column(overflow="fold")
        for finding in group:
            style = _STYLES[finding.verdict]
            grid.add_row(Text(f"  {_SHOWN[finding.verdict]}", style=style), finding.check, Text(finding.details))
            if finding.advice:
                grid.add_row("", "", Text(f"-> {finding.advice}", style=style))
        console.print(grid)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("failure", "warning", "pass")}
    console.print(
        f"{counted(counts['failure'], 'failure')}, {counted(counts['warning'], 'warning')}, {counts['pass']} passed",
        highlight=False,
    )


_WIDEST = 20  # width of the check names, to align the tables of all topics
