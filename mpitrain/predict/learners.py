"""Learners (``--join``): how independent runs exchange changes through a folder; models ``strategy.learners``.

Every learner contributes to each fragment after ``--local-steps`` steps, at its own speed and without waiting. One of
them merges the contributions to a fragment when all are there, or some time after the first one. Its link then carries
all of them. Ages and intervals are means over random times at which the learners have begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..core.layout import Array
from ..strategy.learners.learner import POLL_S
from ..strategy.learners.synchronizer import GRACE
from .rank_times import RankTimes
from .scenario import Scenario

_NOTICE_S = POLL_S / 2  # mean time until a thread looks at the folder again
_VERSIONS, _COUNTED = 40, 20  # simulated versions of a fragment, and those of them that are counted
_STARTS, _MOST_LEARNERS = 100, 4000  # number of random starts, and of their learners altogether
_SEND_COPIES, _RECEIVE_COPIES = 3, 5  # times a learner's training thread reads and writes a vector
_POINT_S = 0.7e-3  # of a consistent point: measured with 8,000 parameters on one rank


@dataclass(frozen=True)
class Exchanges:
    """The exchanges of learners.

    Attributes:
        version_s: Mean seconds between two versions of the common parameters (of a fragment).
        kept_every_s: Mean seconds between two contributions of a learner to a fragment, or between two versions if
            these are rarer: what it loses at most if it fails.
        pause: Fraction of a learner's time in which exchanges stop its steps.
        nbytes: Bytes that a learner writes and reads to contribute once, and to receive one version.
        transfer_s: Seconds in which its link carries them, while it trains.
        sent_bytes_per_s: Bytes per second that the learner that merges writes.
    """

    version_s: float
    kept_every_s: float
    pause: float
    nbytes: float
    transfer_s: float
    sent_bytes_per_s: float


def exchange(
    scenario: Scenario, times: RankTimes, steps_per_s: Array, random: np.random.Generator
) -> tuple[Exchanges, float]:
    """Simulate the exchanges, and return them with the mean age of contributions, in versions.

    Args:
        scenario, times: Of one learner.
        steps_per_s: The speed of each learner, shape (learners,).
    """
    parallel, rate = scenario.config.parallel, scenario.between.node_bytes_per_s
    periods, n_fragments = parallel.steps_per_exchange / steps_per_s, parallel.n_fragments
    version_nbytes = times.nbytes * (1 if parallel.outer_optimizer == "sgd" else 2)  # with the momentum
    merging = _Merging(
        n_fragments,
        (times.nbytes / rate + 2 * times.copy_s) / n_fragments,
        (version_nbytes / rate + times.update_s(1)) / n_fragments,
        _NOTICE_S + version_nbytes / rate / n_fragments,
        _NOTICE_S + times.nbytes / rate / n_fragments,
    )
    n_starts = max(4, min(_STARTS, _MOST_LEARNERS // len(periods)) // n_fragments)
    runs = [merging.run(periods, periods * random.random(len(periods))) for _ in range(n_starts)]
    version_s, age = np.mean(runs, axis=0).tolist()
    interval_s = 1 / float(np.mean(1 / periods))
    among_ranks_s = times.copy_s * (scenario.n_ranks > 1) + times.nbytes / rate * (scenario.n_nodes > 1)
    send_s = _POINT_S + _SEND_COPIES * times.copy_s
    paused = send_s / interval_s + (_POINT_S + _RECEIVE_COPIES * times.copy_s + among_ranks_s) / version_s
    pause = paused / (1 + paused)
    nbytes, kept_every_s = times.nbytes + version_nbytes, max(version_s, interval_s / (1 - pause))
    sent_bytes_per_s = times.nbytes / max(interval_s, version_s) + version_nbytes / version_s
    return Exchanges(version_s, kept_every_s, pause, nbytes, nbytes / rate, sent_bytes_per_s), age


class _Merging(NamedTuple):
    """The learner that merges, and the times of the folder."""

    n_fragments: int  # merged one after the other
    read_s: float  # for each contribution
    merge_s: float  # for each merge
    receive_s: float  # from a merge until the learners have the version
    write_s: float  # from a contribution until it is in the folder

    def run(self, periods: Array, phases: Array) -> tuple[float, float]:
        """Return the seconds between two versions of a fragment, and the mean age of contributions in versions.

        Args:
            periods: Seconds between two contributions of a learner to a fragment, shape (learners,).
            phases: When each learner contributes for the first time, shape (learners,).
        """
        fragments = range(self.n_fragments)
        shifts = [phases + periods * fragment / self.n_fragments + self.write_s for fragment in fragments]
        merged = np.zeros((self.n_fragments, len(periods)), int)  # contributions of each learner, or part of later ones
        received: list[list[float]] = [[] for _ in fragments]  # when learners have each version
        due = np.array([self._due(shifts[fragment], periods) for fragment in fragments])
        free = age = contributions = 0.0
        for number in range(_VERSIONS * self.n_fragments):
            fragment = int(due.argmin())
            begin = max(float(due[fragment]) + _NOTICE_S, free)
            arrived = np.maximum(((begin - shifts[fragment]) // periods).astype(int) + 1, merged[fragment])
            new = np.minimum(arrived - merged[fragment], 1)  # later steps are part of the next contribution
            made = (shifts[fragment] + (merged[fragment] + new - 1) * periods)[new > 0] - self.write_s
            merged[fragment] = arrived
            if number >= (_VERSIONS - _COUNTED) * self.n_fragments:
                bases = np.searchsorted(received[fragment], made, side="right")
                age += float((len(received[fragment]) - bases).sum())
                contributions += len(made)
            free = begin + self.read_s * float(new.sum()) + self.merge_s
            received[fragment].append(free + self.receive_s)
            due[fragment] = self._due(shifts[fragment] + merged[fragment] * periods, periods)
        counted = [ends[-_COUNTED:] for ends in received]
        return float(np.mean([(ends[-1] - ends[0]) / (len(ends) - 1) for ends in counted])), age / contributions

    @staticmethod
    def _due(arrivals: Array, periods: Array) -> float:
        """Return when to merge a fragment: when all have contributed, or after the grace time."""
        return min(float(arrivals.max()), float(arrivals.min() + GRACE * periods.min()))
