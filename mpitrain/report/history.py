"""The history of a run from its directory: options and metrics, readable also during the run.

Files may be read while they are being written. Therefore only complete lines count, and lines that are not JSON objects
are skipped. After a resume, a line records the step; metrics of earlier attempts beyond that step are dropped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.layout import Array
from ..core.toml import read_toml
from ..core.words import one_line
from ..errors import RecordError
from ..monitor import heartbeat
from ..monitor.goodput import Account, accounts_in, total
from ..monitor.heartbeat import STATUS
from ..monitor.metrics import RECORDED, parse_line, read_lines
from ..plan.metric import MEASURED, PREFIX, Goal
from ..process.run_directory import LEARNERS

METRICS = "metrics.jsonl"
CONFIG = "config.toml"
_OF_EVERY_RUN = RECORDED.union(PREFIX + name for name in MEASURED)
END_BYTES = 1 << 18  # of a learner's metrics, in which the newest numbers are looked for every time they are shown
RESUMED = "resumed"  # key of a line that records a resume from its step


@dataclass(frozen=True)
class Series:
    """Values of one metric over a run.

    Attributes:
        steps: Shape (n,) int64, increasing.
        times: Shape (n,) float64: seconds of training, over all attempts of the run.
        values: Shape (n,) float64; NaN if the value was not finite.
    """

    steps: Array
    times: Array
    values: Array

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float:
        """The latest value; NaN if there is none."""
        return float(self.values[-1]) if len(self.values) else float("nan")


class Tail:
    """Reads the lines appended to a file, as JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of complete lines added since the last call; none if the file does not exist yet."""
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
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        return [values for line in data[:complete].splitlines() if (values := parse_line(line)) is not None]


class Restart(NamedTuple):
    """A restart after a failure, or several restarts of which only the last led to training.

    Attributes:
        attempts: The number of restarts.
        step: The step from which training continued.
        repeated_steps: Steps that had been completed before the failure, and were repeated.
        seconds: Time from the failure until training continued.
    """

    attempts: int
    step: int
    repeated_steps: int
    seconds: float


@dataclass
class Run:
    """A run as recorded in its directory.

    Attributes:
        folder: The run directory.
        config: The tables of ``config.toml``; empty if it does not exist yet.
        lines: The valid objects of ``metrics.jsonl``, in order.
        restarts: The restarts by ``mpitrain run``, in order.
    """

    folder: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.folder.resolve().name

    @property
    def job(self) -> str:
        """Name of the job file."""
        return str(self.config.get("versions", {}).get("job_file", "?"))

    @property
    def n_restarts(self) -> int:
        """The number of restarts by ``mpitrain run``, including those that failed before training."""
        return sum(restart.attempts for restart in self.restarts)

    def option(self, name: str) -> Any:
        """Return one of the run's options, or None."""
        return self.config.get("run", {}).get(name)

    @property
    def train_steps(self) -> int | None:
        """Number of training steps; None if it is not known."""
        status = heartbeat.read(self.folder) if self.option("train_epochs") or self.option("join") else None
        steps = self.option("train_steps") if status is None else status.train_steps or None  # 0 if only submitted
        return steps if isinstance(steps, int) else None

    @property
    def step(self) -> int:
        """The highest step with a measured value."""
        return max((int(line["step"]) for line in self.lines), default=0)

    @property
    def seconds(self) -> float:
        """Seconds of training up to the latest line."""
        return float(self.lines[-1].get("time_s", 0.0)) if self.lines else 0.0

    def series(self, name: str) -> Series:
        """Return the values of one metric."""
        lines = _rising([line for line in self.lines if isinstance(line.get(name, ""), (int, float, type(None)))])
        return Series(
            np.array([line["step"] for line in lines], np.int64),
            np.array([line.get("time_s", 0.0) for line in lines], np.float64),
            np.array([np.nan if line[name] is None else line[name] for line in lines], np.float64),
        )

    @property
    def account(self) -> Account | None:
        """What the time since the first start went into, as recorded last; None if it is not recorded.

        Of a run that learners have joined, the sum over the learners.
        """
        learners = [read_lines(path, END_BYTES) for path in (self.folder / LEARNERS).glob(f"*/{METRICS}")]
        newest = [accounts[-1] for lines in learners or [self.lines] if (accounts := accounts_in(lines))]
        return total(newest) if len(newest) > 1 else next(iter(newest), None)

    @property
    def mean_examples_per_s(self) -> float:
        """The speed over all reports, weighted by their time; NaN if there is none."""
        speeds = [line for line in self.lines if line.get("examples_per_s") and line.get("step_s")]
        steps = np.diff([line["step"] for line in speeds], prepend=0).clip(min=1)
        seconds = steps * np.array([line["step_s"] for line in speeds])
        examples = seconds * np.array([line["examples_per_s"] for line in speeds])
        return float(examples.sum() / seconds.sum()) if len(speeds) else float("nan")

    def further_names(self) -> list[str]:
        """Return the names of the numbers that the job's metrics, a hook or the script measure."""
        measured = {
            name: None for line in self.lines for name, value in line.items() if isinstance(value, (int, float))
        }
        return [name for name in measured if name not in _OF_EVERY_RUN]

    def best(self, goal: Goal) -> tuple[float, int] | None:
        """Return the best value of a validation metric, or of another number, and its step; None if there is none."""
        for name in (PREFIX + goal.name, goal.name):
            series = self.series(name)
            steps, values = (array[np.isfinite(series.values)] for array in (series.steps, series.values))
            if len(values):
                index = int(values.argmax() if goal.is_higher_better else values.argmin())
                return float(values[index]), int(steps[index])
        return None

    def newest(self, name: str) -> Any:
        """Return the latest value of a metric, of any type; None if there is none."""
        return next((line[name] for line in reversed(self.lines) if name in line), None)

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Append newer lines; drop lines that a resume has made invalid."""
        for line in lines:
            if RESUMED in line:
                if "restart_s" in line:
                    count, repeated_steps = line.get("restarts", 1), line.get("repeated_steps", 0)
                    self.restarts.append(Restart(count, line["step"], repeated_steps, line["restart_s"]))
                self.lines = [before for before in self.lines if before["step"] <= line["step"]]
            self.lines.append(line)


def shown_name(name: str) -> str:
    """Return the name of a number in ``metrics.jsonl`` for readers."""
    return name.removeprefix(PREFIX).replace("_", " ")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory."""
    return any((folder / name).is_file() for name in (CONFIG, METRICS, STATUS))


def open_run(folder: Path) -> Run:
    """Return a run with its options but without metrics.

    Raises:
        RecordError: The folder is not a run directory, or its ``config.toml`` cannot be read.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such directory; give a run directory, such as runs/JOB-TIME")
    if not is_run(folder):
        raise RecordError(
            f"{folder} is not a run directory: it has no {CONFIG}, {METRICS} or {STATUS}; mpitrain runs lists runs"
        )
    return Run(folder, _read_config(folder / CONFIG))


def read_run(folder: Path) -> Run:
    """Return a run with its options and all metrics so far.

    Raises:
        RecordError: The folder is not a run directory, or cannot be read.
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
        raise RecordError(f"{path} cannot be read: {one_line(error)}") from error


def _rising(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop lines superseded by a later line with the same or a lower step."""
    held: list[dict[str, Any]] = []
    least = float("inf")
    for line in reversed(lines):
        if line["step"] < least:
            least = line["step"]
            held.append(line)
    return held[::-1]
