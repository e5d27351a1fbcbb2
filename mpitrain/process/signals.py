"""When a run is asked to end before its last step: by a signal, or by a limit on its time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

STOPPED_EARLY = os.EX_TEMPFAIL  # exit status, 75: there is a checkpoint to go on from
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SLURM_ANSWERS_S = 20.0
_ONCE_S = 0.5  # a launcher may pass on what the terminal has sent to everybody


class Signals:
    """Notes signals that ask to stop; the handler does nothing else, for it may run inside MPI.

    Ctrl-C a second time ends the process at once; other signals may come twice from those who end a job's processes
    one by one and all together.

    Attributes:
        received: Name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_at = 0.0

    def install(self) -> None:
        """Note signals from now on; to be called by the main thread."""
        for number in _SIGNALS:
            signal.signal(number, self._note)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note signals inside the block; to be entered by the main thread."""
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
            self.received, self._received_at = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._received_at > _ONCE_S:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


class TimeLimit:
    """Tells when what is left of a run's time is only enough to save.

    Args:
        end: When the run is ended by others, in seconds since the epoch; None for never.
        began: When it began.
    """

    def __init__(self, end: float | None, began: float) -> None:
        self._end = end
        # For what no save has told yet, and for a file system that is slower than last time.
        self._spare_s = 0.0 if end is None else min(60.0, 0.05 * max(0.0, end - began))

    def reached(self, now: float, step_s: float, save_s: float) -> bool:
        """Whether to stop: after the step that is about to be taken there would be no time for a save.

        Args:
            step_s: Seconds of a step, ``save_s`` of the longest save so far.
        """
        return self._end is not None and now + 2 * step_s + 2 * save_s + self._spare_s >= self._end


def end_of_time(
    limit_s: float | None,
    environ: Mapping[str, str] = os.environ,
    now: float | None = None,
    ask: Callable[[str], float | None] | None = None,
) -> float | None:
    """When the run is ended by others, in seconds since the epoch, or None.

    Args:
        limit_s: Seconds from now that the user gave, or None.
        environ: Where Slurm, and batch scripts for other schedulers, tell the end of their job.
        ask: Tells the end of a Slurm job, for versions of Slurm that do not say it there.
    """
    ends = [] if limit_s is None else [(time.time() if now is None else now) + limit_s]
    told = [environ.get(name, "") for name in ("SLURM_JOB_END_TIME", "MPITRAIN_END_TIME")]
    ends += [float(value) for value in told if value.isdigit()]
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdigit() and not told[0].isdigit() and ask is not None:
        end = ask(job)
        ends += [] if end is None else [end]
    return min(ends, default=None)


def ask_slurm(job: str) -> float | None:
    """When a Slurm job reaches its limit, in seconds since the epoch; None where it has none, or nobody answers."""
    words = ["squeue", "--noheader", "--jobs", job, "--format", "%A %e"]
    try:
        said = subprocess.run(
            words,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_SLURM_ANSWERS_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return end_in(said, job)


def end_in(said: str, job: str) -> float | None:
    """The end of a job among what ``squeue`` says, a line with number and end for each task of an array."""
    ends = dict(line.split()[:2] for line in said.splitlines() if len(line.split()) >= 2)
    end = ends.get(job, "")
    return float(end) if end.isdigit() else None  # one without a limit ends in a year, or in never
