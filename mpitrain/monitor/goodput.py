"""Goodput: the share of the time since the first start of a run that went into steps whose result is kept.

The chief adds up seconds by kind over all attempts, and records them with every report, so that a later attempt
continues. What an attempt did after its last report is estimated from the number and the duration of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

STEPS, WAITING, REPEATED, START, STOPPED, SPARES = "steps", "waiting", "repeated", "start", "stopped", "spares"
#: What the time goes into: steps that are kept, waiting for the slowest worker, steps that a failure has lost, the
#: start of ranks until they train, compiling kernels, reading a checkpoint or a state in memory, validation, saving,
#: hooks, and time between two starts in which the run did not run, such as in the queue of a batch system. The last one
#: is the time of idle spare hosts divided by the number of all hosts. The others are times of the hosts in use.
KINDS = (STEPS, WAITING, REPEATED, START, "compilation", "restoring", "validation", "saving", "hooks", STOPPED, SPARES)
KEY = "spent"  # of a recorded account


class Account(NamedTuple):
    """What the time of a run until ``at`` went into.

    Attributes:
        since: When the run was first started, in seconds since the epoch.
        at: Until when, in seconds since the epoch.
        step: The number of completed steps; of a learner, of its own ones whose work is kept.
        seconds: Seconds by kind.
    """

    since: float
    at: float
    step: int
    seconds: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """The share of the hosts' time that went into kept steps, from 0 to 1."""
        return self.shares.get(STEPS, 0.0)

    @property
    def shares(self) -> dict[str, float]:
        """The share of the hosts' time by kind; the sum is 1."""
        total = max(self.at - self.since, 1e-9)
        used = 1.0 - self.seconds.get(SPARES, 0.0) / total
        return {kind: value / total * (1.0 if kind == SPARES else used) for kind, value in self.seconds.items()}

    def with_more(self, at: float, step: int, more: Mapping[str, float]) -> Account:
        """Return the account at a later time, with more seconds of some kinds."""
        seconds = {kind: self.seconds.get(kind, 0.0) + more.get(kind, 0.0) for kind in KINDS}
        return Account(self.since, at, step, {kind: value for kind, value in seconds.items() if value})

    def record(self) -> dict[str, Any]:
        """Return the account for ``metrics.jsonl``."""
        seconds = {kind: round(value, 3) for kind, value in self.seconds.items()}
        spent = {"since": self.since, "at": round(self.at, 3), "step": self.step, **seconds}
        return {"goodput": round(self.goodput, 4), KEY: spent}

    def describe(self) -> str:
        """Return the goodput and where the rest of the time went, as text."""
        parts = sorted(((share, kind) for kind, share in self.shares.items() if kind != STEPS), reverse=True)
        rest = ", ".join(f"{kind} {100 * share:.1f} %" for share, kind in parts if share > 0.001)
        return f"goodput {100 * self.goodput:.1f} % of {self.at - self.since:,.0f} s" + (f"; {rest}" if rest else "")


def accounts_in(lines: Sequence[Mapping[str, Any]]) -> list[Account]:
    """Return the accounts that lines of ``metrics.jsonl`` contain."""
    accounts = []
    for line in lines:
        if isinstance(line.get(KEY), dict) and {"since", "at"} <= line[KEY].keys() and "step" in line:
            seconds = dict(line[KEY])
            step = seconds.pop("step", line["step"])
            accounts.append(Account(seconds.pop("since"), seconds.pop("at"), step, seconds))
    return accounts


def total(accounts: Sequence[Account]) -> Account:
    """Return the account of several learners together: the sums of their times."""
    seconds = {kind: sum(account.seconds.get(kind, 0.0) for account in accounts) for kind in KINDS}
    all_s = sum(account.at - account.since for account in accounts)
    return Account(0.0, all_s, 0, {kind: value for kind, value in seconds.items() if value})


def opened(
    earlier: Sequence[Account],
    step: int,
    started_at: float,
    failed_at: float | None,
    now: float,
    failed_step: int | None = None,
) -> Account:
    """Return the account when an attempt begins to train at ``step``.

    Args:
        earlier: The accounts that earlier attempts have recorded, in order.
        started_at: When the ``mpitrain run`` of this attempt was started, or the attempt if there is none.
        failed_at: When the attempt before it failed; None if none failed, or if this is not known.
        failed_step: The number of steps that were completed then; None if this is not known.
    """
    if not earlier:
        return Account(started_at, now, step, {START: now - started_at})
    last = earlier[-1]
    ended_at = max(last.at, min(now, started_at if failed_at is None else failed_at))
    kept_s = _kept_s(earlier, step) - last.seconds.get(STEPS, 0.0)  # since the last report
    if step > last.step:
        if failed_at is not None and failed_step is not None and failed_step > last.step:
            evenly_s = (ended_at - last.at) * (step - last.step) / (failed_step - last.step)
            kept_s = min(evenly_s, 2 * kept_s or evenly_s)  # less if the ranks hung before the failure
        kept_s = min(kept_s, ended_at - last.at)
    more = {STEPS: kept_s, START: now - ended_at}
    if failed_at is None:  # the run may have ended soon after its last report
        more |= {REPEATED: max(0.0, -more[STEPS]), STOPPED: ended_at - last.at - max(0.0, more[STEPS])}
    else:
        more |= {REPEATED: ended_at - last.at - more[STEPS]}
    return last.with_more(now, step, more)


def _kept_s(earlier: Sequence[Account], step: int) -> float:
    """Return the seconds of the first ``step`` steps, between two accounts or after the last one by interpolation."""
    points = [(0, 0.0)]
    for account in earlier:
        steps_s = account.seconds.get(STEPS, 0.0)
        # Waiting is found some steps later, and then taken from the time of all steps.
        points = [(before, min(before_s, steps_s)) for before, before_s in points if before < account.step]
        points.append((account.step, steps_s))
    before = [point for point in points if point[0] <= step] or [(0, 0.0)]
    after = [point for point in points if point[0] > step]
    (step_a, s_a), (step_b, s_b) = (before[-1], after[0]) if after else (points[-2:] if len(points) > 1 else points * 2)
    rate = (s_b - s_a) / (step_b - step_a) if step_b > step_a else 0.0
    return s_a + (step - step_a) * rate
