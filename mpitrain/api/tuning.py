"""Probe a job, predict configurations, and measure the best ones: the work of ``mpitrain probe`` and ``tune``."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError, RunFailed
from ..launcher.supervisor import run
from ..plan.launch_options import LaunchOptions
from ..plan.options import without_overridden
from ..plan.request import JobRequest, LaunchRequest
from ..predict.candidates import Candidate, Impossible, candidates
from ..predict.measurements import Probe, read_probe
from ..probe.request import ProbeWorkload, options_of_modes
from .launch import launch

_LIMIT_S = 150.0  # time after which no further run starts
_MOST_MEASURED = 5  # maximum number of measured configurations
_ROUNDS = 2  # number of runs of each configuration, in turns
_REPORTS = 8  # reports of the speed in a run
_EQUAL = 0.001  # predictions with a smaller relative difference count as equal


@dataclass(frozen=True)
class Measured:
    """A configuration with its predicted and measured examples/s.

    Attributes:
        examples_per_s: The speed of its fastest run, because other load on the hosts only makes runs slower.
    """

    candidate: Candidate
    examples_per_s: float

    @property
    def score(self) -> float:
        """Measured progress per second; see ``Candidate.score``."""
        return self.examples_per_s * self.candidate.worth


@dataclass(frozen=True)
class Tuning:
    """The result of ``tune``.

    Attributes:
        probe: The measurements before the first run.
        candidates: All configurations, the best prediction first.
        impossible: The configurations that cannot be predicted.
        measured: The configurations whose runs have succeeded; the first one is the user's.
    """

    probe: Probe
    candidates: list[Candidate]
    impossible: list[Impossible]
    measured: list[Measured]

    @property
    def best(self) -> Measured:
        """The configuration with the highest measured score."""
        return max(self.measured, key=lambda one: one.score)


def measure(options: LaunchOptions, job: JobRequest, output: Path) -> int:
    """Start the ranks that measure a job and write a file; return the exit status.

    Raises:
        LaunchError, ConfigError: The ranks cannot be started as requested.
    """
    workload = ProbeWorkload(job, output.absolute())
    with _temporary_folder() as folder:
        if job.run_dir is None:
            workload = workload.with_options(run_dir=folder)
        return run(LaunchRequest(options, workload))


def tune(
    options: LaunchOptions, job: JobRequest, changes: Collection[str], seconds: float, say: Callable[[str], object]
) -> Tuning:
    """Choose a configuration of a job on these ranks.

    Args:
        job: The user's configuration.
        changes: The kinds of options that may change; see ``candidates.CHANGES``.
        seconds: Duration of one run in seconds, without its start.
        say: Called with a description of the next action.

    Raises:
        LaunchError, ConfigError: The ranks cannot be started, or end with an error.
    """
    began = time.monotonic()
    with _temporary_folder() as folder:
        say("probing")
        file = folder / "probe.json"
        of_modes = options_of_modes(job.options)
        if measure(options, job.with_options(**dict.fromkeys(of_modes)), file):
            raise LaunchError("the probe has failed; see the messages above")
        probe = read_probe(file)
        options_of_job = {
            name: value for name, value in job.options.items() if name in of_modes or name == "batch_size"
        }
        possible, impossible = candidates(probe, options_of_job, changes)
        chosen, round_began = _to_measure(possible), time.monotonic()
        rates: dict[int, float] = {}  # of the fastest run, by the index of the candidate
        for number, (index, candidate) in enumerate(_ROUNDS * [*enumerate(chosen)]):
            now = time.monotonic()
            if number == len(chosen) and now - began + (now - round_began) > _LIMIT_S:
                break  # a round begins only if there is time to measure all configurations
            if (number and now - began > _LIMIT_S) or rates.get(index) == 0:
                continue
            say(f"measuring {' '.join(flags_of(candidate)) or 'the given configuration'}")
            rate = _measured_rate(options, job, candidate, seconds, folder / f"run-{number}")
            rates[index] = max(rates.get(index, 0.0), rate)
            if not rates[0]:
                raise LaunchError(
                    "the configuration given by the flags could not be measured; start it with mpitrain run to see why"
                )
    measured = [Measured(chosen[index], rate) for index, rate in rates.items() if rate]
    return Tuning(probe, possible, impossible, measured)


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Make a folder in the current folder, which hosts usually share, unlike ``/tmp``; it is removed afterwards.

    Raises:
        LaunchError: The folder cannot be made.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=".mpitrain-", dir=Path.cwd(), ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"the current folder cannot be written: {error.strerror}; change to a folder that all hosts share"
        ) from error
    with made as folder:
        yield Path(folder)


def flags_of(candidate: Candidate | Impossible) -> list[str]:
    """Return the flags in which a configuration differs from the user's."""
    from ..plan.options import flag_words

    return flag_words({name: value for name, value in candidate.options.items() if value is not None})


def _to_measure(possible: list[Candidate]) -> list[Candidate]:
    """Return the user's configuration, and the best configurations that are predicted to be faster.

    If configurations differ only in bucket size and have equal predictions, only the configuration with the fewest
    options is used.
    """
    own = next(candidate for candidate in possible if not candidate.options)
    distinct: list[Candidate] = []
    for candidate in sorted(possible, key=lambda one: len(one.options)):
        if not any(_are_equal(candidate, other) for other in distinct):
            distinct.append(candidate)
    faster = [candidate for candidate in distinct if candidate.score > own.score]
    return [own, *sorted(faster, key=lambda one: -one.score)[: _MOST_MEASURED - 1]]


def _are_equal(one: Candidate, other: Candidate) -> bool:
    """Return whether two configurations have the same prediction and differ in nothing but the size of buckets."""
    first, second = ({**candidate.options, "bucket_bytes": None} for candidate in (one, other))
    return first == second and abs(one.score - other.score) <= _EQUAL * other.score


def _measured_rate(
    options: LaunchOptions, job: JobRequest, candidate: Candidate, seconds: float, run_dir: Path
) -> float:
    """Return the examples/s of a short run; 0 if it fails."""
    every = (
        candidate.scenario.config.parallel.steps_per_average if candidate.scenario.config.mode.averages_params else 1
    )
    rounds = max(_REPORTS, round(candidate.prediction.steps_per_s * seconds / every))
    steps = rounds // _REPORTS * _REPORTS * every
    values: Mapping[str, Any] = {
        **{name: value for name, value in vars(options).items() if value not in (None, ()) and name != "dry_run"},
        **{name: value for name, value in job.options.items() if name != "run_dir"},
        **job.arguments,
        **candidate.options,
        "train_steps": steps,
        "log_steps": steps // _REPORTS,
        "validate_steps": 0,
        "validate_secs": 0.0,
        "resume": "never",
        "tensorboard": False,
    }
    launched = launch(job.path, **without_overridden(values, {"train_steps": steps}), run_dir=run_dir)
    try:
        launched.wait(timeout=max(60.0, 10 * seconds), show=False)
    except (RunFailed, TimeoutError):
        launched.stop()
        return 0.0
    rates = [line["examples_per_s"] for line in launched.metrics if "examples_per_s" in line][1:]
    return statistics.median(rates) if rates else 0.0
