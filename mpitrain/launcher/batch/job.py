"""A batch job, whichever scheduler runs it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...errors import ConfigError
from ...plan.config import flag
from .resources import Resources
from .sweep import Point

Starter = Literal["mpirun", "srun"]

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./&|()\[\]{}*-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Batch:
    """What is to be run, and what for.

    Attributes:
        name: The job's, as the scheduler's tables show it.
        resources: What the scheduler is asked for.
        folder: Where the job runs: that which it was submitted from.
        run_dir: The run directory; of an array the folder of its tasks' run directories.
        python: The interpreter that has mpitrain.
        arguments: The job file and its flags, but the run directory.
        points: Of a sweep, what each task trains.
        seeds: Whether each task of an array without a sweep takes its index as its seed.
        starter: What starts the ranks, and ``mpi`` how ``srun`` talks to their library.
        extra: More words for the scheduler's command, as the user gave them.
        setup: Lines of shell to begin with, such as ``module load openmpi``.
    """

    name: str
    resources: Resources
    folder: Path
    run_dir: Path
    python: str
    arguments: Sequence[str]
    points: Sequence[Point] = ()
    seeds: bool = True
    starter: Starter = "mpirun"
    mpi: str = "pmix"
    extra: Sequence[str] = ()
    setup: Sequence[str] = ()

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "batch"

    @property
    def script(self) -> Path:
        return self.log_dir / "job.sh"

    @property
    def in_tasks(self) -> bool:
        """Whether this is an array."""
        return bool(self.points) or self.resources.array is not None

    @property
    def array(self) -> str | None:
        """The array's indexes: as told, else all points of the sweep.

        Raises:
            ConfigError: An index is told for which there is no point.
        """
        told = self.resources.array
        if not self.points:
            if told is not None and told.startswith("%"):
                raise ConfigError(f"--array {told}: give indexes too, such as 0-9{told}")
            return told
        everything = f"0-{len(self.points) - 1}"
        if told is None or told.startswith("%"):
            return everything + (told or "")
        highest = max(int(number) for number in re.findall(r"\d+", re.sub(r"%.*|:\d+", "", told)))
        if highest >= len(self.points):
            raise ConfigError(f"--array {told}: the sweep has {len(self.points)} runs: give indexes of {everything}")
        return told


@dataclass(frozen=True)
class Script:
    """A batch script.

    Attributes:
        text: The whole script.
        words: Arguments for the command that submits it: what its lines cannot say.
    """

    text: str
    words: list[str] = field(default_factory=list)


def plain(value: str, prefix: str) -> str:
    """A value that needs no quotes in a scheduler's line.

    Raises:
        ConfigError: It has characters that schedulers read in ways of their own.
    """
    if not _PLAIN.fullmatch(value):
        raise ConfigError(f"{value!r} cannot be said in a line of {prefix}: use letters, digits and . _ - / there")
    return value


def refuse(asked: Resources, names: Sequence[str], scheduler: str) -> None:
    """Make sure that nothing is asked for which only Slurm has.

    Raises:
        ConfigError: One of these options is given.
    """
    for name in names:
        if getattr(asked, name):
            raise ConfigError(
                f"{flag(name)} goes with --scheduler slurm: for {scheduler} say it with --sbatch, or leave it out"
            )


def one_line(line: str) -> str:
    """A line for a scheduler, as the user wrote it.

    Raises:
        ConfigError: It is more than one.
    """
    if "\n" in line or "\r" in line:
        raise ConfigError(f"--sbatch {line!r} has a line break: give one line")
    return line


def shell(words: Sequence[str | Path]) -> str:
    """Words as bash reads them back, in one line: some schedulers take their own lines wherever these begin so."""
    return " ".join(_word(str(word)) for word in words)


def _word(word: str) -> str:
    if not _CONTROL.search(word):
        return shlex.quote(word)
    text = word.replace("\\", r"\\").replace("'", r"\'")
    return "$'" + _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text) + "'"
