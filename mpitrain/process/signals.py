"""Requests to stop a run before its last step: signals and time limits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from .rank_status import RUN_DIR_VARIABLE

STOPPED_EARLY = os.EX_TEMPFAIL  # exit status 75: there is a checkpoint to resume from
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SLURM_ANSWERS_S = 20.0
_ONCE_S = 0.5  # a launcher may forward a signal that the terminal has sent to all processes


class Signals:
    """Records signals that ask to stop; the handler does nothing else, because it may run inside MPI.

    A second Ctrl-C ends the process immediately. Other signals may arrive twice, because schedulers signal both the
    processes of a job and its process group.

    Attributes:
        received: Name of the signal received, or None; ``requested`` if ``mpitrain run`` passed on a signal as SIGUSR1.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0

    def install(self) -> None:
        """Record signals from now on; call from the main thread."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record signals inside the block; enter from the main thread."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        self.install()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            passed_on = number == signal.SIGUSR1 and RUN_DIR_VARIABLE in os.environ
            self.received, self._received_at = "requested" if passed_on else signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._received_at > _ONCE_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


class TimeLimit:
    """Decides when a run's remaining time is only enough to save.

    Args:
        end: When the run will be ended, in seconds since the epoch; None for never.
        began: When it began.
    """

    def __init__(self, end: float | None, began: float) -> None:
        self._end = end
        # Reserve for the first save, whose duration is unknown, and for a file system that has become slower.
        self._spare_s = 0.0 if end is None else min(60.0, 0.05 * max(0.0, end - began))

    def reached(self, now: float, step_s: float, save_s: float) -> bool:
        """Return whether to stop now: after another step there would be no time to save.

        Args:
            now: Current time, in seconds since the epoch.
            step_s: Seconds per step.
            save_s: Seconds of the longest save so far.
        """
        return self._end is not None and now + 2 * step_s + 2 * save_s + self._spare_s >= self._end


def end_of_time(
    limit_s: float | None,
    environ: Mapping[str, str] = os.environ,
    now: float | None = None,
    ask: Callable[[str], float | None] | None = None,
) -> float | None:
    """Return when the run will be ended, in seconds since the epoch, or None.

    Args:
        limit_s: The user's limit in seconds from now, or None.
        environ: The environment, where Slurm and the batch scripts of other schedulers set the end of their job.
        now: Current time; None for the clock.
        ask: Returns the end of a Slurm job, for Slurm versions that do not set it in the environment.
    """
    ends = [] if limit_s is None else [(time.time() if now is None else now) + limit_s]
    given = [environ.get(name, "") for name in ("SLURM_JOB_END_TIME", "MPITRAIN_END_TIME")]
    ends += [float(value) for value in given if value.isdigit()]
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdigit() and not given[0].isdigit() and ask is not None:
        end = ask(job)
        ends += [] if end is None else [end]
    return min(ends, default=None)


def ask_slurm(job: str) -> float | None:
    """Return when a Slurm job reaches its limit, in seconds since the epoch; None without limit or answer."""
    words = ["squeue", "--noheader", "--jobs", job, "--format", "%A %e"]
    try:
        output = subprocess.run(
            words,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_SLURM_ANSWERS_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return end_in(output, job)


def end_in(output: str, job: str) -> float | None:
    """Return the end of a job from the output of ``squeue``: one line with id and end for each array task."""
    ends = dict(line.split()[:2] for line in output.splitlines() if len(line.split()) >= 2)
    end = ends.get(job, "")
    return float(end) if end.isdigit() else None  # without a limit the value is not a number
