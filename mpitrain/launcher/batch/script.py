"""Render batch scripts from batch jobs; nothing is written or submitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ...batch_systems.base import BatchSystem
from ...batch_systems.job import Batch, shell
from ...batch_systems.resources import seconds_of
from ...version import __version__

_TEMPLATE = Path(__file__).with_name("job.sh.j2")


@dataclass(frozen=True)
class Script:
    """A batch script.

    Attributes:
        text: The complete script.
        words: Arguments for the submit command, which no line of the script can express.
    """

    text: str
    words: Sequence[str] = ()


def render(system: BatchSystem, batch: Batch) -> Script:
    """Return the script that runs a batch job.

    Every value is quoted for its reader: the shell, or the batch system, whose directives have their own quoting rules.

    Raises:
        ConfigError: The batch system does not support the request.
    """
    system.check(batch)
    resources = batch.resources
    lines, words = system.directives(batch)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        system=system,
        directives=lines,
        words=shell(words),
        version=__version__,
        folder=shell([batch.folder]),
        setup=batch.setup,
        limit_s=0 if system.sets_end_time or resources.time is None else seconds_of(resources.time),
        run_dir=shell([batch.run_dir]),
        index=system.index_variable if batch.in_tasks else "",
        points=[{"name": shell([f"/{point.name}"]), "words": shell(point.words)} for point in batch.points],
        seeds=batch.seeds,
        keeps_checkpoints=batch.keeps_checkpoints,
        progress="a newer checkpoint" if batch.keeps_checkpoints else "a minute of running",
        command=system.command(batch),
        starter=batch.starter,
        checks_end=batch.starter in system.unreliable_starters,
        stop_signal=system.stop_signal(batch),
        requeue_command=system.requeue_command(batch) if resources.requeue else "",
        requeue_status=system.requeue_status if resources.requeue else 0,
        script=shell([batch.script]),
    )
    return Script(text + "\n", words)
