"""The time of a run with checkpoints and failures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError

_RUNS = 200
_MOST_FAILURES = 100_000


@dataclass(frozen=True)
class Failures:
    """The rate of failures, and the cost of a failure.

    Attributes:
        mean_time_s: Mean time between two failures of one node; these times are exponentially distributed.
        save_every_s: Time between two checkpoints.
        save_s: Time for which training stops to save a checkpoint.
        restart_s: Time from a failure until training continues from the newest checkpoint.
    """

    mean_time_s: float
    save_every_s: float
    save_s: float = 0.0
    restart_s: float = 30.0


def time_with_failures(work_s: float, nodes: int, failures: Failures, seed: int = 0) -> float:
    """Return the mean time of runs that need ``work_s`` without checkpoints and failures.

    Raises:
        ConfigError: Nodes fail so often that training does not advance.
    """
    random, rate = np.random.default_rng(seed), nodes / failures.mean_time_s
    return float(np.mean([_one_run(work_s, rate, failures, random) for _ in range(_RUNS)]))


def _one_run(work_s: float, rate: float, failures: Failures, random: np.random.Generator) -> float:
    """Return the time of one run whose failures have this rate."""
    saved = elapsed = 0.0
    for _ in range(_MOST_FAILURES):
        until_failure = random.exponential(1 / rate)
        left = work_s - saved
        n_saves = int(left / failures.save_every_s)
        needed = left + n_saves * failures.save_s
        if until_failure >= needed:
            return elapsed + needed
        period = failures.save_every_s + failures.save_s
        saved += int(until_failure / period) * failures.save_every_s
        elapsed += until_failure + failures.restart_s
    raise ConfigError(
        f"nodes fail every {1 / rate:.0f} s on average, which is before the next "
        f"checkpoint: save more often than every "
        f"{failures.save_every_s:g} s"
    )
