"""A batch job, independent of the batch system."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .resources import Resources

# The flag with the run directory, as shell text; it precedes ``Batch.arguments``.
RUN_DIR = '--run-dir "$run_dir"'
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./&|()\[\]{}*-]+")
_LONGEST = 200  # characters of indexes in the name of a file
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Point:
    """One combination of values of a sweep.

    Attributes:
        name: The name of its run directory: the values, in characters that are safe for shells and file systems.
        words: The flags that set the values.
        values: The values, by the names of options and of the job's parameters.
    """

    name: str
    words: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """A batch job to submit.

    Attributes:
        name: The job's name in the scheduler's tables.
        resources: The resources to request from the scheduler.
        folder: The job's working directory: the directory of submission.
        run_dir: The run directory; for an array, the parent of its tasks' run directories.
        python: The Python interpreter that has mpitrain installed.
        arguments: The job, script or program that the ranks execute, with its flags, without ``--run-dir``.
        bad_hosts: Hosts that the job must not use.
        launch_flags: Flags of ``mpitrain run`` that are not the run's.
        rank_command: The ``mpitrain`` command that each rank runs if ``mpitrain run`` does not start the ranks.
        keeps_checkpoints: Whether checkpoints in the run directory show that a run has made progress.
        starter: The program that starts the ranks: one of the batch system's ``starters``.
        points: The points of a sweep; each array task trains one.
        seeds: Whether each task of an array without a sweep uses its index as its seed.
        mpi: The MPI plugin that the starter uses; empty if it needs none.
        extra: The user's extra arguments for the scheduler.
        setup: Shell lines to run first, such as ``module load openmpi``.
    """

    name: str
    resources: Resources
    folder: Path
    run_dir: Path
    python: str
    arguments: Sequence[str]
    starter: str
    points: Sequence[Point] = ()
    seeds: bool = True
    mpi: str = ""
    extra: Sequence[str] = ()
    setup: Sequence[str] = ()
    bad_hosts: Sequence[str] = ()
    launch_flags: Sequence[str] = ()
    rank_command: str = "train"
    keeps_checkpoints: bool = True

    @property
    def log_dir(self) -> Path:
        return self.run_dir / "batch"

    @property
    def script(self) -> Path:
        """The script; arrays without a sweep may have the same directory."""
        indexes = "" if self.points else (self.resources.array or "").partition("%")[0]
        return self.log_dir / f"job{indexes and '-'}{indexes[:_LONGEST]}.sh"

    @property
    def in_tasks(self) -> bool:
        """Whether this is an array."""
        return bool(self.points) or self.resources.array is not None

    @property
    def array(self) -> str | None:
        """The array's indexes: as given, else all points of the sweep; None without an array.

        Raises:
            ConfigError: An index has no point in the sweep, or only ``%N`` was given without a sweep.
        """
        indexes = self.resources.array
        if not self.points:
            if indexes is not None and indexes.startswith("%"):
                raise ConfigError(f"--array {indexes} has no indexes; give indexes too, such as 0-9{indexes}")
            return indexes
        everything = f"0-{len(self.points) - 1}"
        if indexes is None or indexes.startswith("%"):
            return everything + (indexes or "")
        highest = max(int(number) for number in re.findall(r"\d+", re.sub(r"%.*|:\d+", "", indexes)))
        if highest >= len(self.points):
            raise ConfigError(f"--array {indexes}: the sweep has {len(self.points)} runs; give indexes in {everything}")
        return indexes

    def run_dirs(self, first_index: int) -> list[tuple[int | None, Path]]:
        """Return each run directory with the index of its array task, or None without an array.

        Args:
            first_index: The scheduler's index for index 0.
        """
        if not self.in_tasks:
            return [(None, self.run_dir)]
        run_dirs: list[tuple[int | None, Path]] = []
        for part in (self.array or "").partition("%")[0].split(","):
            start, _, rest = part.partition("-")
            last, _, stride = rest.partition(":")
            for at in range(int(start), int(last or start) + 1, int(stride or 1)):
                name = self.points[at].name if self.points else f"task-{at + first_index}"
                run_dirs.append((at + first_index, self.run_dir / name))
        return run_dirs


def plain(value: str, prefix: str) -> str:
    """Return a value unchanged if it needs no quotes in a scheduler directive.

    Raises:
        ConfigError: It contains characters that schedulers interpret.
    """
    if not _PLAIN.fullmatch(value):
        raise ConfigError(f"{value!r} is not valid in a {prefix} line; use only letters, digits and . _ - /")
    return value


def one_line(line: str) -> str:
    """Return an extra scheduler argument as the user gave it.

    Raises:
        ConfigError: It has more than one line.
    """
    if "\n" in line or "\r" in line:
        raise ConfigError(f"--sbatch {line!r} contains a line break; give one line")
    return line


def shell(words: Sequence[str | Path]) -> str:
    """Quote words for bash, on one line: a batch system may parse every line of a script that has its prefix."""
    return " ".join(_word(str(word)) for word in words)


def run_command(batch: Batch, hosts_flag: str, hosts: str) -> str:
    """Return the shell command that starts the ranks with ``mpitrain run``.

    Args:
        hosts_flag, hosts: The flag that names the hosts, and its value, quoted for the shell; used with several nodes.
    """
    words = [batch.python, "-m", "mpitrain", "run", "-n", str(batch.resources.ranks), *batch.launch_flags]
    several = f" {hosts_flag} {hosts}" if batch.resources.nodes > 1 else ""
    return f"{shell(words)}{several} {RUN_DIR} {shell(batch.arguments)}"


def _word(word: str) -> str:
    if not _CONTROL.search(word):
        return shlex.quote(word)
    text = word.replace("\\", r"\\").replace("'", r"\'")
    return "$'" + _CONTROL.sub(lambda control: f"\\x{ord(control[0]):02x}", text) + "'"
