"""Launches two runs at once: of a job function in this script, and of a job function in another module of its
folder."""

from __future__ import annotations

import sys
from pathlib import Path

from widths import widths

import mpitrain
from mpitrain import Job, optim


def job(hidden_units: int, rate: Rate = 0.1, *, decay: bool = True) -> Job:
    found = widths(hidden_units)
    found.optimizer = optim.sgd(rate, weight_decay=0.01 if decay else 0.0)
    return found


Rate = float

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runs = [
        mpitrain.launch(job, ranks=2, run_dir=folder / "own", hidden_units=6, decay=False),
        mpitrain.launch(widths, ranks=2, run_dir=folder / "imported", hidden_units=7),
    ]
    for run in runs:
        print(run.wait(show=False).state, run.model().step)
