"""Render batch scripts from batch jobs. Pure functions: they do not access the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import jinja2

from ...process.signals import STOPPED_EARLY
from ...version import __version__
from . import lsf, pbs, slurm
from .job import Batch, Script, shell
from .resources import seconds_of

Scheduler = Literal["slurm", "pbs", "lsf"]

FIRST_INDEX: dict[Scheduler, int] = {"slurm": 0, "pbs": 0, "lsf": 1}  # of an array whose indexes start at 0

_TEMPLATE = Path(__file__).with_name("job.sh.j2")


def render(scheduler: Scheduler, batch: Batch) -> Script:
    """Return the script that runs a batch job under a scheduler.

    Every value is quoted for its reader: the shell, or the scheduler, whose directives have their own quoting rules.

    Raises:
        ConfigError: The scheduler does not support the request.
    """
    words: list[str] = []
    resources = batch.resources
    about: dict[str, Any]
    on_status = 0  # the exit status with which the scheduler requeues a job
    if scheduler == "slurm":
        lines, words = slurm.directives(batch)
        again = slurm.AGAIN if resources.requeue else ""
        about = {"prefix": slurm.PREFIX, "index": slurm.INDEX, "command": slurm.command(batch), "again": again}
    elif scheduler == "pbs":
        lines = pbs.directives(batch)
        again = pbs.again(batch) if resources.requeue else ""
        about = {"prefix": pbs.PREFIX, "index": pbs.INDEX, "command": pbs.command(batch), "again": again}
    else:
        lines = lsf.directives(batch)
        about = {"prefix": lsf.PREFIX, "index": lsf.INDEX, "command": lsf.command(batch), "again": ""}
        on_status = STOPPED_EARLY if resources.requeue else 0
    about["index"] = about["index"] if batch.in_tasks else ""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        directives=lines,
        words=shell(words),
        version=__version__,
        folder=shell([batch.folder]),
        setup=batch.setup,
        limit_s=0 if scheduler == "slurm" or resources.time is None else seconds_of(resources.time),
        run_dir=shell([batch.run_dir]),
        points=[{"name": shell([f"/{point.name}"]), "words": shell(point.words)} for point in batch.points],
        first=FIRST_INDEX[scheduler],
        starter=batch.starter,
        answers=slurm.ANSWERS if scheduler == "slurm" else "",
        script=shell([batch.script]),
        seeds=batch.seeds,
        on_status=on_status,
        stays=not resources.requeue or scheduler == "pbs",
        **about,
    )
    return Script(text + "\n", words)
