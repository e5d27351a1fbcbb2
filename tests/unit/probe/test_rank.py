"""The measurements of all ranks, which are threads, as one probe."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.core.layout import Layout
from mpitrain.plan.compression import CODECS
from mpitrain.predict.measurements import CodecTimes, JobFacts
from mpitrain.probe import rank as module
from mpitrain.probe.compute import ROWS, BatchTimes
from mpitrain.probe.steps import StepTimes

from ...simulators.simulated_mpi import Comm, World
from ...support.probes import PROBE


def cluster_of(comm: Comm) -> Any:
    return SimpleNamespace(comm=comm, rank=comm.rank, size=comm.size)


@pytest.mark.parametrize(
    ("batch", "expected"), [(1, [1, 2]), (2, [1, 2, 4]), (3, [1, 3, 6]), (8, [2, 4, 8, 16]), (100, [25, 50, 100, 200])]
)
def test_the_numbers_of_examples(batch: int, expected: list[int]) -> None:
    assert module._batches(batch) == expected


class Model:
    """Takes times that are proportional to the number of examples; the second of three ranks is slower."""

    def __init__(self, rank: int, batch: int = 8) -> None:
        self.factor, self.plan = [1.0, 5.0, 2.0][rank], SimpleNamespace(batch=batch)
        self.seconds: list[float] = []

    def measure_batch(self, count: int, seconds: float) -> BatchTimes:
        self.seconds.append(seconds)
        return BatchTimes(*(self.factor * count * part for part in (1.0, 2.0, 3.0)), (self.factor,))

    def update_s(self, rows: int, seconds: float) -> float:
        return self.factor * rows

    def copy_s(self, seconds: float) -> float:
        return self.factor * 7

    def handover_s(self, seconds: float) -> float:
        return self.factor * 9

    def codec_times(self, name: str, seconds: float) -> CodecTimes | None:
        return None if name == "bfloat16" else CodecTimes(0.25, self.factor, 10 * self.factor)


def test_times_are_medians_over_the_ranks() -> None:
    models = [Model(rank) for rank in range(3)]

    def program(comm: Comm) -> Any:
        return module._compute_times(cluster_of(comm), models[comm.rank])  # type: ignore[arg-type]

    found = World([0, 0, 0]).run(program)
    assert [at_batch.forward_s for _, at_batch in found] == [16.0, 80.0, 32.0]
    for times, _ in found:
        assert times == found[0][0]
        assert times.batches == (2, 4, 8, 16) and times.load_s == (4, 8, 16, 32)
        assert times.forward_s == (8, 16, 32, 64) and times.backward_s == (12, 24, 48, 96)
        assert times.update_s == tuple(2.0 * rows for rows in ROWS)
        assert (times.copy_s, times.handover_s, times.together, times.loop_s) == (14.0, 18.0, 1.0, 0.0)
    assert all(sum(model.seconds) < module._COMPUTING_S / 3 for model in models)
    assert module._at(found[0][0], 8) == (16, 32, 48)


def test_compressions_without_an_effect_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_low_rank_share", lambda plan: 0.125)

    def program(comm: Comm) -> Any:
        return module._codec_times(cluster_of(comm), Model(comm.rank), 2.0)  # type: ignore[arg-type]

    measured = {codec.measured for codec in CODECS.values()} - {"", "bfloat16"}
    for codecs in World([0, 0, 0]).run(program):
        assert codecs.keys() == measured
        for name, times in codecs.items():
            share = 0.125 if name.startswith("powersgd") else 0.25
            assert times == CodecTimes(share, 1.0, 10.0)  # the median is 2 s, while 2 ranks share a core


@pytest.mark.parametrize("stretch", [1.0, 2.0])
def test_steps_show_what_repeated_calls_do_not(stretch: float) -> None:
    compute = replace(PROBE.compute, batches=(50, 100), forward_s=(1.0, 2.0), backward_s=(2.0, 4.0))
    of_ranks = [
        StepTimes(np.array([9.0, 12.0, 600.0]), 0.010, 0.3),
        StepTimes(np.array([18.0]), 0.014, 0.5),
        StepTimes(np.array([6.0]), 0.012, 0.4),
    ]

    def program(comm: Comm) -> Any:
        return module._as_in_steps(cluster_of(comm), compute, 100, of_ranks[comm.rank], stretch)

    more_s = max(0.0, 0.012 / stretch - compute.update_s[0])
    for found in World([0, 0, 0]).run(program):
        assert found.together == 2.0 and found.loop_s == pytest.approx(0.4 / stretch)
        assert found.update_s == pytest.approx([seconds + more_s for seconds in compute.update_s])
        assert found.forward_s == compute.forward_s


def test_steps_are_never_faster_than_repeated_calls() -> None:
    compute = replace(PROBE.compute, batches=(100,), forward_s=(2.0,), backward_s=(4.0,))
    fast = StepTimes(np.array([3.0]), 0.0, 0.0)
    (found,) = World([0]).run(lambda comm: module._as_in_steps(cluster_of(comm), compute, 100, fast, 1.0))
    assert found.together == 1.0 and found.update_s == compute.update_s


def test_the_share_of_a_compression_of_low_rank() -> None:
    layout = Layout.pack([("weight", (400, 300), "param"), ("narrow", (400, 2), "param"), ("bias", (304,), "param")])
    plan: Any = SimpleNamespace(layout=layout)
    size = 400 * 300 + 400 * 2 + 304
    assert layout.size == size
    assert module._low_rank_share(plan) == pytest.approx((4 * (400 + 300) + 400 * 2 + 304) / size)


def test_the_facts_of_a_job() -> None:
    optimizer = SimpleNamespace(needs_sums=True)
    plan: Any = SimpleNamespace(
        layout=SimpleNamespace(size=96),
        optimizer=optimizer,
        batch=8,
        dtype=np.dtype(np.float32),
        vectors=["params", "mean", "square"],
        layer_starts=[0, 32],
    )
    model: Any = SimpleNamespace(model=SimpleNamespace(can_await_params=False))
    job: Any = SimpleNamespace(train_split=range(60))
    facts = module._job_facts("a job", job, plan, model, BatchTimes(1.0, 2.0, 4.0, (4.0, 1.0)))
    assert facts == JobFacts("a job", 8, 60, 96, 4, 3, (0, 32), (1.0, 0.25), False, True)
