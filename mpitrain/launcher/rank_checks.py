"""Regular checks whether the ranks exit as expected."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.words import numbered
from ..process import rank_status
from ..process.pid import parent_of, pid_start, process_state
from .hosts import is_local
from .interrupts import Interrupts
from .launcher_process import LauncherProcess, Phase
from .terminal import say

_INTERVAL_S = 5.0  # interval of the checks
_STOPPING_INTERVAL_S = 1.0  # the same while the ranks stop
_STOP_S = 4.0  # time without a busy rank until ranks that were asked to save and exit are ended
_OUTSTAYS_S = 30.0  # time for the launcher to exit after all ranks have ended
_EARLY_S = 60.0  # time for the other ranks to exit after the first one
_LISTED = 8  # maximum number of ranks named in a message


class RankChecks:
    """Reports ranks that exited early, and ends what continues although it cannot finish.

    Args:
        ranks: Number of ranks; None if the launcher determines it.
    """

    def __init__(self, launcher: LauncherProcess, ranks: int | None, run_dir: Path, interrupts: Interrupts) -> None:
        self._launcher, self._ranks, self._run_dir, self._interrupts = launcher, ranks, run_dir, interrupts
        self._checked_at = time.monotonic()
        self._busy_at = 0.0  # when a rank that was asked to save and exit was last seen to be busy
        self._all_ended_at: float | None = None  # when all ranks were first seen to have ended
        self._stopped_reapers: set[int] = set()  # process ids
        self._has_reported_exits = False

    def poll(self) -> None:
        """Check the ranks if the last check was long ago, and the launcher is not being ended."""
        phase, now = self._launcher.phase, time.monotonic()
        interval_s = _STOPPING_INTERVAL_S if phase is Phase.STOPPING else _INTERVAL_S
        if phase is not Phase.ENDING and now > self._checked_at + interval_s:
            self._checked_at = now
            self._check(rank_status.read(self._run_dir), now)

    def _check(self, statuses: Sequence[rank_status.RankStatus], now: float) -> None:
        self._end_unwatched(statuses)
        self._report_early_exits(statuses)
        running = sum(not (status.done or status.ended_at) for status in statuses)
        ended = bool(statuses) and len(statuses) == self._ranks and not running
        self._all_ended_at = (self._all_ended_at or now) if ended else None
        if self._all_ended_at is not None and now > self._all_ended_at + _OUTSTAYS_S:
            self._launcher.end()
        elif self._launcher.phase is Phase.STOPPING and not ended:
            self._check_stop(running, now)

    def _end_unwatched(self, statuses: Sequence[rank_status.RankStatus]) -> None:
        """End local ranks that nothing watches: their reaper is stopped, and was stopped at the last check, too."""
        watching = {parent_of(s.pid): s.rank for s in statuses if is_local(s.host) and pid_start(s.pid) == s.start}
        stopped = {reaper: rank for reaper, rank in watching.items() if process_state(reaper) == "T"}
        for reaper in stopped.keys() & self._stopped_reapers:
            say(f"process {reaper}, which watches rank {stopped[reaper]}, is stopped; ending the rank")
            with contextlib.suppress(ProcessLookupError):
                os.kill(reaper, signal.SIGKILL)  # the kernel then kills the rank
        self._stopped_reapers = set(stopped)

    def _report_early_exits(self, statuses: Sequence[rank_status.RankStatus]) -> None:
        """Report once if some ranks exited long ago, because the ranks that still run may wait for them forever."""
        ended = [status for status in statuses if status.ended_at]
        running = [status.rank for status in statuses if not status.ended_at]
        if self._has_reported_exits or not ended or not running:
            return
        first = min(ended, key=lambda status: status.ended_at)
        if time.time() > first.ended_at + _EARLY_S:
            self._has_reported_exits = True
            what = f"rank {first.rank} exited with status {first.status} {_EARLY_S:.0f} s ago"
            still_run = f"still {'run' if len(running) > 1 else 'runs'}"
            say(f"{what}, but {numbered('rank', running)} {still_run}; press Ctrl-C to end the run")

    def _check_stop(self, running: int, now: float) -> None:
        """Repeat the request to save and exit; after Ctrl-C, end the ranks if no rank can fulfil the request."""
        doing = rank_status.read_activities(self._run_dir)
        interrupted = self._interrupts.received[:1] == [signal.SIGINT]  # a scheduler sets its own limit
        if not interrupted or len(doing) < running or any(activity.busy for activity in doing.values()):
            self._busy_at = now
        if now > max(self._busy_at, self._launcher.phase_began) + _STOP_S:
            self._launcher.end(f"ending the ranks, which cannot finish{listed(doing)}")
        else:
            self._launcher.ask_to_stop()


def listed(activities: Mapping[int, rank_status.LongActivity]) -> str:
    """Return the activities of ranks, as the end of a sentence."""
    return "".join(f"; rank {rank}: {activity.doing}" for rank, activity in list(activities.items())[:_LISTED])
