"""The work that the launcher starts for ``mpitrain probe``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..plan.option import flag
from ..plan.option_groups import ServerConfig
from ..plan.parallel import ParallelConfig
from ..plan.request import JobRequest

_OF_MODES = {field.name for group in (ParallelConfig, ServerConfig) for field in dataclasses.fields(group)}


def options_of_modes(names: Iterable[str]) -> list[str]:
    """Return the names that are options of modes or of parameter servers."""
    return [name for name in names if name in _OF_MODES]


@dataclass(frozen=True)
class ProbeWorkload:
    """A job that is measured: a ``plan.request.Workload``.

    Attributes:
        job: The job with its options.
        output: The file for the result.

    Raises:
        ConfigError: The job is a script, or an option has no effect on the measurements.
    """

    job: JobRequest
    output: Path

    name = "probe"
    command = "measure"
    keeps_checkpoints = False
    resumes = False

    def __post_init__(self) -> None:
        if self.job.script_arguments is not None:
            raise ConfigError(f"{self.job.path} is a script: mpitrain probe needs a job file")
        if self.job.join is not None:
            raise ConfigError(f"--join {self.job.join} has no effect, because a job is measured alone; remove it")
        for name in options_of_modes(self.job.options):
            raise ConfigError(
                f"{flag(name)} has no effect, because mpitrain probe measures for all modes; "
                f"remove it, and pass it to mpitrain simulate"
            )

    @property
    def words(self) -> list[str]:
        """The arguments of ``mpitrain measure``."""
        return ["--output", str(self.output), *self.job.words]

    @property
    def run_dir(self) -> Path | None:
        return self.job.run_dir

    join = None

    @property
    def time_limit(self) -> float | None:
        return self.job.time_limit

    def check_ranks(self, ranks: int) -> None:
        """Accept any number of ranks."""

    def restarted(self, checkpoint: Path | None, time_limit: float | None) -> ProbeWorkload:
        return self

    def with_options(self, **options: Any) -> ProbeWorkload:
        return replace(self, job=self.job.with_options(**options))
