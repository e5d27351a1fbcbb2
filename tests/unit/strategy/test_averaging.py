"""Times and results of averaging in ``local``, with given values of the other workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.core.layout import Array
from mpitrain.strategy.averaging import ElasticAveraging, MeanOfWorkers

WORKERS = 3
HIERARCHY: Any = SimpleNamespace(comm=SimpleNamespace(size=WORKERS))


def plan_of(every: int, last: int) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(parallel=SimpleNamespace(steps_per_average=every)),
        train_steps=last,
        dtype=np.float64,
        gradients_per_step=WORKERS,
    )


class Others:
    """Computes the mean of a worker's vector and the vectors of the other workers.

    Args:
        vectors: The vectors of the other workers, as an array of shape (workers - 1, n).
    """

    def __init__(self, vectors: Array) -> None:
        self._vectors, self.calls = vectors, 0

    def __call__(self, vector: Array) -> None:
        self.calls += 1
        vector[:] = (vector + self._vectors.sum(axis=0)) / WORKERS


@pytest.mark.parametrize(("every", "last", "points"), [(1, 3, [1, 2, 3]), (3, 7, [3, 6, 7]), (4, 3, [3])])
def test_workers_average_periodically_and_at_the_end(every: int, last: int, points: list[int]) -> None:
    own = {"params": np.zeros((1, 2)), "momentum": np.ones((1, 2))}
    others: Any = Others(np.zeros((2, 2)))
    averaging = MeanOfWorkers(plan_of(every, last), own, others, HIERARCHY, None)
    for step in range(1, last + 1):
        before = others.calls
        averaging.after_step(step)
        assert (others.calls > before) == averaging.is_point(step) == (step in points)
    assert others.calls == 2 * len(points)  # every vector
    np.testing.assert_allclose(own["momentum"], (1 / WORKERS) ** len(points))


def test_elastic_averaging_is_equations_2_and_3() -> None:
    start, rho = np.array([1.0, -2.0]), 0.25
    own, others = {"params": start[np.newaxis].copy()}, np.array([[4.0, 0.0], [-2.0, 8.0]])
    averaging = ElasticAveraging(plan_of(1, 9), own, Others(others), rho)  # type: ignore[arg-type]
    averaging.start({})
    own["params"] += 0.5
    worker = own["params"].copy()
    averaging.after_step(1)
    np.testing.assert_allclose(own["params"], worker - rho * (worker - start))
    of_all = np.concatenate([worker, others])
    np.testing.assert_allclose(averaging.vector("params"), start + rho * (of_all - start).sum(axis=0))
    averaging.end()
    assert own["params"].tolist() == [averaging.center.tolist()]
