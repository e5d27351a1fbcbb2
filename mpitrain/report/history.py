"""What a run directory tells of a run: its options and what was measured, also while the run goes on.

A reader meets files that are being written to. So only whole lines count, and a line that is no JSON object is passed
over. Where a run was resumed, a line says from which step: what an earlier attempt measured beyond it does not hold.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.layout import Array
from ..core.toml import read_toml
from ..errors import RecordError

METRICS = "metrics.jsonl"
CONFIG = "config.toml"
RESUMED = "resumed"  # in a line: the run went on from its step


@dataclass(frozen=True)
class Series:
    """Values of one name over a run.

    Attributes:
        steps: Shape (n,) int64, rising.
        times: Shape (n,) float64: seconds of training, over all of the run's attempts.
        values: Shape (n,) float64; NaN where the value was not finite.
    """

    steps: Array
    times: Array
    values: Array

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The newest value; NaN where there is none."""
        return float(self.values[-1]) if len(self.values) else float("nan")


class Tail:
    """The lines that a file gains, as JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        """The objects of whole lines that came since the last call; none where there is no file yet."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # another run has begun in this directory
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"{self._path} cannot be read: {error.strerror}") from error
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [found for line in data[:whole].splitlines() if (found := _object(line)) is not None]


@dataclass
class Run:
    """A run as its directory has it.

    Attributes:
        folder: The run directory.
        config: The tables of ``config.toml``; empty where there is none yet.
        lines: Objects of ``metrics.jsonl`` that hold, in order.
    """

    folder: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.folder.resolve().name

    @property
    def job(self) -> str:
        """Name of the job file."""
        return str(self.config.get("versions", {}).get("job_file", "?"))

    def option(self, name: str) -> Any:
        """One of the run's options, or None."""
        return self.config.get("run", {}).get(name)

    @property
    def step(self) -> int:
        """The newest step that something was measured at."""
        return max((int(line["step"]) for line in self.lines), default=0)

    @property
    def seconds(self) -> float:
        """Of training, until the newest line."""
        return float(self.lines[-1].get("time_s", 0.0)) if self.lines else 0.0

    def series(self, name: str) -> Series:
        """What was measured under ``name``."""
        found = _rising([line for line in self.lines if isinstance(line.get(name, ""), (int, float, type(None)))])
        return Series(
            np.array([line["step"] for line in found], np.int64),
            np.array([line.get("time_s", 0.0) for line in found], np.float64),
            np.array([np.nan if line[name] is None else line[name] for line in found], np.float64),
        )

    def newest(self, name: str) -> Any:
        """The newest value under ``name``, of any type; None where there is none."""
        return next((line[name] for line in reversed(self.lines) if name in line), None)

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Append newer lines; those that do not hold any more are dropped."""
        for line in lines:
            if RESUMED in line:
                self.lines = [before for before in self.lines if before["step"] <= line["step"]]
            self.lines.append(line)


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / CONFIG).is_file() or (folder / METRICS).is_file()


def open_run(folder: Path) -> Run:
    """A run's options, without what it measured.

    Raises:
        RecordError: It is no run directory, or its ``config.toml`` cannot be read.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such directory; give a run directory, such as runs/JOB-TIME")
    if not is_run(folder):
        raise RecordError(f"{folder} is no run directory: it has neither {CONFIG} nor {METRICS}")
    return Run(folder, _read_config(folder / CONFIG))


def read_run(folder: Path) -> Run:
    """A run's options and all that it measured until now.

    Raises:
        RecordError: It is no run directory, or cannot be read.
    """
    run = open_run(folder)
    run.add(Tail(folder / METRICS).read())
    return run


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read: {' '.join(str(error).split())}") from error


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def _rising(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of lines whose steps are to rise, those that no later line comes before or replaces."""
    held: list[dict[str, Any]] = []
    least = float("inf")
    for line in reversed(lines):
        if line["step"] < least:
            least = line["step"]
            held.append(line)
    return held[::-1]
