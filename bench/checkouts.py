"""Runs a measurement in this checkout and in another checkout, alternately."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkout:
    """A folder with the package, and the interpreter of its ``.venv``; without ``.venv``, the running interpreter."""

    folder: Path

    @property
    def python(self) -> str:
        own = self.folder / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def run(self, *words: str | Path) -> str:
        """Run ``python WORDS`` with this checkout's package; return its standard output."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        command = [self.python, *map(str, words)]
        done = subprocess.run(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        return done.stdout

    def train(self, ranks: int, job: str, *flags: str) -> list[dict[str, float]]:
        """Train a job of ``jobs/``; return the lines of ``metrics.jsonl``."""
        with tempfile.TemporaryDirectory() as run_dir:
            words = ["-m", "mpitrain", "run", "-n", str(ranks), self.folder / "jobs" / job, *flags]
            self.run(*words, "--run-dir", run_dir)
            return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


THIS = Checkout(Path(__file__).parent.parent)


def compare(name: str, baseline: Checkout, measure: Callable[[Checkout], Sequence[float]], rounds: int) -> None:
    """Print the ratio of this checkout's speed to the baseline's: the median and the range over alternating rounds.

    Args:
        measure: Returns one or more speeds; higher is better.
    """
    ratios: list[list[float]] = []
    for number in range(rounds):
        order = (THIS, baseline) if number % 2 else (baseline, THIS)
        speeds = {checkout: measure(checkout) for checkout in order}
        ratios.append([ours / theirs for ours, theirs in zip(speeds[THIS], speeds[baseline], strict=True)])
    for index, column in enumerate(zip(*ratios, strict=True)):
        label = name if len(ratios[0]) == 1 else f"{name} {index + 1}"
        spread = f"{min(column):.3f} to {max(column):.3f}"
        print(f"{label:20} median ratio {statistics.median(column):.3f}  ({spread}, {rounds} rounds)", flush=True)
