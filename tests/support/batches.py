"""Batch jobs with defaults for the tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mpitrain.batch_systems.job import Batch
from mpitrain.batch_systems.registry import SYSTEMS
from mpitrain.batch_systems.resources import Resources
from mpitrain.launcher.batch import script
from mpitrain.launcher.batch.script import Script


def batch(folder: Path = Path("/work dir"), **changes: object) -> Batch:
    resources = {f.name: changes.pop(f.name) for f in dataclasses.fields(Resources) if f.name in changes}
    made = Batch("a job", Resources(**resources), folder, folder / "run", "/opt/python", ["job.py"], "mpirun")  # type: ignore[arg-type]
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def render(scheduler: str, made: Batch) -> Script:
    return script.render(SYSTEMS[scheduler], made)
