"""Simulate the published goodput of learners with failing chips, and print it beside the published values.

    python bench/learners_goodput.py

Published: Douillard et al., Decoupled DiLoCo for resilient distributed pre-training, 2026 (arXiv 2604.21428), for a
mean time between interruptions of one year per chip. The other assumptions of its simulation (times of scaling down,
scaling up and recovery, variance of speeds) are not known here. Therefore two costs of an interruption are taken from
the first column: one from data parallelism, and one from elastic data parallelism. The other 28 values are predicted.
Assumptions:

- Interruptions are independent, at exponentially distributed times, and none occurs during another one.
- An interruption stops the chips that train together for its cost: all chips, or with M learners one M-th of them.
- A learner is elastic, as an elastic run of one M-th of the chips. Learners never wait for each other.
- Nothing else is lost: the other chips keep their work.

The second table explains deviations: it has the cost that each published value implies, and the goodput if chips that
return are taken back in groups. Its three constants were fitted afterwards, to all values, so it predicts nothing.

The third table has learners of this package, which are not elastic: a learner that is interrupted starts again after
30 s, and loses what it has not contributed, of up to 64 steps of 1 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from environment import use_this_checkout

use_this_checkout()
from mpitrain.predict.simulation import Failures, time_with_failures  # noqa: E402

YEAR_S = 365.25 * 86400
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
PUBLISHED = {
    "data parallel": (72, 57, 38, 27, 18),
    "elastic": (88, 80, 69, 58, 40),
    "M = 2": (94, 88, 80, 70, 54),
    "M = 4": (96, 93, 89, 82, 73),
    "M = 8": (98, 96, 94, 88, 80),
    "M = 16": (99, 98, 96, 93, 86),
}
SECONDS = 6 * 3600.0  # of training without interruptions
DOWN_S, UP_S, GROUP_S = 18.0, 16.0, 110.0  # to go on without chips, to take others back, and between two groups
STEP_S, EXCHANGE_STEPS, RESTART_S = 1.0, 64, 30.0


def learners_of(name: str) -> int:
    return int(name.removeprefix("M = ")) if name.startswith("M") else 1


def implied_cost_s(published: float, chips: float) -> float:
    """Return the cost of an interruption that a goodput implies: goodput = 1 / (1 + cost / interval)."""
    return (100 / published - 1) * YEAR_S / chips


def shared_cost_s(chips: float) -> float:
    """Return the cost of an interruption if chips are taken back in groups, of those of some time."""
    return DOWN_S + UP_S / (1 + chips / YEAR_S * GROUP_S)


def goodput(chips: float, kept_every_s: float, restart_s: float) -> float:
    """Return the goodput of chips that train together, in %."""
    failures = Failures(YEAR_S, kept_every_s, restart_s=restart_s)
    return 100 * SECONDS / time_with_failures(SECONDS, round(chips), failures)


def compare(cost_s: Callable[[str, float], float], rows: list[str]) -> list[float]:
    """Print published and simulated values; return the differences in points.

    Args:
        cost_s: Returns the cost of an interruption for a row and the number of chips that train together.
    """
    print(f"{'chips':14}" + "".join(f"{chips:>18,}" for chips in CHIPS))
    differences = []
    for name in rows:
        cells = []
        for chips, value in zip(CHIPS, PUBLISHED[name], strict=True):
            together = chips / learners_of(name)
            simulated = goodput(together, 1e-3, cost_s(name, together))
            differences.append(simulated - value)
            cells.append(f"{value:4} -> {simulated:3.0f} ({round(simulated - value):+3})")
        print(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    return differences


def summary(differences: list[float]) -> str:
    sizes = sorted(map(abs, differences))
    within = sum(size <= 3 for size in sizes)
    return f"difference: median {sizes[len(sizes) // 2]:.1f} points, {within} within 3, largest {sizes[-1]:.1f}"


def main() -> None:
    began, rows = time.perf_counter(), list(PUBLISHED)
    costs = {name: implied_cost_s(PUBLISHED[name][0], CHIPS[0]) for name in rows[:2]}
    print(f"cost of an interruption: data parallel {costs[rows[0]]:.0f} s, elastic {costs[rows[1]]:.0f} s")
    print("published -> simulated goodput in %, difference in points")
    found = compare(lambda name, _: costs.get(name, costs["elastic"]), rows)
    predicted = found[1:5] + found[6:]
    print(f"{len(predicted)} predicted values, {summary(predicted)}")

    print("\ncost of an interruption that the published values imply, in s")
    for name in rows:
        implied = [
            f"{implied_cost_s(value, chips / learners_of(name)):.0f}"
            for chips, value in zip(CHIPS, PUBLISHED[name], strict=True)
        ]
        print(f"{name:14}" + "".join(f"{cell:>18}" for cell in implied))
    print(f"\nfitted: {DOWN_S:.0f} s, and {UP_S:.0f} s for those of {GROUP_S:.0f} s together")
    found = compare(lambda _, together: shared_cost_s(together), rows[1:])
    print(f"{len(found)} fitted values, {summary(found)}")

    print(f"\nlearners of this package: restart {RESTART_S:.0f} s, contributions every {EXCHANGE_STEPS * STEP_S:.0f} s")
    for learners in (2, 4, 8, 16, 64, 512, 4096):
        values = [goodput(chips / learners, EXCHANGE_STEPS * STEP_S, RESTART_S) for chips in CHIPS]
        print(f"M = {learners:<10,}" + "".join(f"{value:>18.1f}" for value in values), flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
