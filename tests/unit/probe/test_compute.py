"""A job on one rank: its gradient, its updates, and estimates, against the formulas of a softmax regression."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain import Job, data, nn, optim
from mpitrain.core.device import CPU
from mpitrain.core.layout import Array
from mpitrain.plan.config import RunConfig
from mpitrain.plan.plan import make_plan
from mpitrain.predict.measurements import CodecTimes, ServerTimes
from mpitrain.probe import compute
from mpitrain.probe.compute import RankModel

N, FEATURES, CLASSES, BATCH, RATE = 24, 40, 30, 6, 0.1


def make_job(**options: Any) -> Job:
    rng = np.random.default_rng(0)
    split = data.from_arrays(rng.standard_normal((N, FEATURES)), rng.integers(0, CLASSES, N))
    model = nn.Sequential(nn.Dense(FEATURES, CLASSES, bias=False))
    return Job(model, nn.SoftmaxCrossEntropy(), optim.sgd(RATE, **options), split, batch_size=BATCH, train_steps=9)


class Probed:
    """A rank's model, with the values that it starts with."""

    def __init__(self, position: int = 0, dtype: str = "float64", **options: Any) -> None:
        self.job = make_job(**options)
        self.config = RunConfig.of(batch_size=BATCH, train_steps=9, seed=1, dtype=dtype, threads=1)
        self.plan = make_plan(self.job, self.config, 1)
        self.model = RankModel(self.job, self.plan, [CPU], position)
        self.weight = self.view(self.model.params)

    def view(self, vector: Array) -> Array:
        """Return the weight, or its gradient."""
        (view,) = self.plan.layout.views(vector).values()
        return view

    def expected(self, weight: Array, position: int, count: int = BATCH) -> Array:
        """Return the gradient of the mean cross-entropy of the examples at a position."""
        split = self.job.train_split
        chosen = split.order(position, count, 1)
        batch = split.read_batch(0, N)
        x, labels = batch.examples[chosen], batch.labels[chosen]
        scores = x @ weight
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        shares[np.arange(count), labels] -= 1
        return x.T @ shares / count  # type: ignore[no-any-return]


@pytest.fixture
def probed() -> Iterator[Probed]:
    made = Probed(position=2 * BATCH)
    yield made
    made.model.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let ``median_s`` call its action once, and return the number of calls."""
    calls: list[float] = []

    def median_s(action: Any, seconds: float) -> float:
        action()
        calls.append(seconds)
        return float(len(calls))

    monkeypatch.setattr(compute, "median_s", median_s)
    return calls


def test_gradients_are_those_of_successive_batches(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        assert probed.model.gradient() is probed.model.grads
        expected = probed.expected(probed.weight, (2 + step) * BATCH)
        np.testing.assert_allclose(probed.view(probed.model.grads), expected, rtol=1e-10, atol=1e-12)
    starts: list[int] = []
    monkeypatch.setattr(probed.model.model, "compute_grads", lambda on_ready: on_ready(70))
    probed.model.gradient(starts.append)
    assert starts == [70]


def test_a_batch_has_a_time_for_each_part(probed: Probed) -> None:
    times = probed.model.measure_batch(4, 0.0)
    assert len(times.ready_s) == len(probed.plan.layer_starts) and times.ready_s[0] <= times.backward_s
    assert probed.model._position == 2 * BATCH + 6 * 4  # one repetition that is not counted, and five


def test_the_parts_of_a_step(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(compute, "time", SimpleNamespace(perf_counter=lambda: now))

    def advance(seconds: float, result: Any = None) -> Any:
        nonlocal now
        now += seconds
        return result

    class Model:
        """Takes known times; the gradient of the last layer is ready first."""

        def load_params(self) -> None:
            advance(0.5)

        def compute_loss(self, batch: Any) -> float:
            return advance(2.0, 1.0)

        def compute_grads(self, on_ready: Any) -> None:
            for start, seconds in ((70, 4.0), (20, 8.0)):
                advance(seconds)
                on_ready(start)
            advance(16.0)

    fake: Any = SimpleNamespace(
        model=Model(), _load=lambda count: advance(32.0), plan=SimpleNamespace(layer_starts=[0, 20, 50, 70])
    )
    assert RankModel._step(fake, 3) == [32.0, 2.5, 28.0, 28.0, 12.0, 12.0, 4.0]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_an_update_is_by_the_sum_of_the_rows(probed: Probed, counted: list[float], rows: int) -> None:
    before = probed.weight.copy()
    gradient = probed.expected(before, 2 * BATCH)
    probed.model.gradient()
    probed.model.rows[1:] = 5.0
    assert probed.model.update_s(rows, 0.25) == 1.0 and counted == [0.25]
    np.testing.assert_allclose(before - probed.weight, RATE * gradient, rtol=1e-9, atol=1e-12)


def test_an_optimizer_that_needs_norms_updates_the_whole_vector(counted: list[float]) -> None:
    probed = Probed(clip_norm=1e-3)
    before = probed.weight.copy()
    probed.model.gradient()
    probed.model.update_s(2, 0.0)
    assert np.linalg.norm(before - probed.weight) == pytest.approx(RATE * 1e-3, rel=1e-6)
    probed.model.close()


def test_training_takes_steps_of_the_optimizer(probed: Probed, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 1.0, 9.0])
    weight = probed.weight.copy()
    steps = 0

    def step(count: int) -> None:
        nonlocal steps
        assert count == BATCH
        probed.model.gradient()
        steps += 1

    monkeypatch.setattr(probed.model, "_step", step)
    monkeypatch.setattr(compute, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    probed.model.train(5.0)
    assert steps == 2
    for step_ in range(2):
        weight -= RATE * probed.expected(weight, (2 + step_) * BATCH)
    np.testing.assert_allclose(probed.weight, weight, rtol=1e-9, atol=1e-12)


def test_a_server_applies_one_gradient(probed: Probed, counted: list[float]) -> None:
    comm = SimpleNamespace(size=1, rank=0)
    before = probed.weight.copy()
    gradient = probed.expected(before, 2 * BATCH)
    probed.model.gradient()
    cluster: Any = SimpleNamespace(self_comm=comm)
    assert probed.model.server_times(cluster, 0.5) == ServerTimes(1.0, 2.0)
    np.testing.assert_allclose(before - probed.weight, RATE * gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "dtype", "share"),
    [
        ("bfloat16", "float32", 0.5),
        ("int8", "float32", 0.25 + 1 / 256),
        ("float32", "float64", 0.5),
        ("float32", "float32", None),
    ],
)
def test_compressions_that_have_an_effect(name: str, dtype: str, share: float | None) -> None:
    probed = Probed(dtype=dtype)
    times = probed.model.codec_times(name, 0.0)
    assert (times is None) == (share is None)
    if times is not None:
        assert times.share == pytest.approx(share, abs=0.02)
        assert probed.model._steps == 0 and probed.model._position == 3 * BATCH
    probed.model.close()


def test_a_compression_of_low_rank(probed: Probed, counted: list[float]) -> None:
    times = probed.model.codec_times("powersgd:4", 0.5)
    size = probed.plan.layout.size
    rows = columns = int(size**0.5)
    assert times == CodecTimes(pytest.approx(4 * (rows + columns) / size, rel=0.05), 1.0, 2.0)
    assert compute._factor_times(np.ones(10), 1, 0.0).share == (3 + 3) / 9


def test_the_noise_scale_is_that_of_the_distribution() -> None:
    """Batches of 50 examples, whose gradients have a known mean and covariance."""
    rng, size, count = np.random.default_rng(0), 40_000, 50
    grads = np.zeros(size)

    def step(of_batch: int) -> None:
        assert of_batch == count
        grads[:] = 0.1 + rng.standard_normal(size) / count**0.5

    fake: Any = SimpleNamespace(
        plan=SimpleNamespace(layout=SimpleNamespace(size=size)), grads=grads, _steps=7, _step=step
    )
    noise = RankModel.noise(fake, count)
    assert noise.scale_examples == pytest.approx(1 / 0.1**2, rel=0.05) and noise.steps == 7
    fake._step = lambda of_batch: np.copyto(grads, 3.0)  # all batches have the same gradient
    assert RankModel.noise(fake, count).scale_examples == pytest.approx(0.0, abs=1e-9)
    fake._step = lambda of_batch: np.negative(grads, out=grads)  # a mean of zero
    assert RankModel.noise(fake, count).scale_examples == 0.0


def test_a_function_runs_on_another_core(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    with compute._two_cores() as on_other:
        assert (on_other is None) == (len(before) == 1)
        if on_other is not None:
            own, other = os.sched_getaffinity(0), on_other(lambda: os.sched_getaffinity(0))
            assert len(own) == 1 and own != other and {*own, *other} <= before  # type: ignore[misc]
    assert os.sched_getaffinity(0) == before
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    with compute._two_cores() as alone:
        assert alone is None


def test_copies(probed: Probed, monkeypatch: pytest.MonkeyPatch, counted: list[float]) -> None:
    assert probed.model.copy_s(0.5) == 1.0 and counted == [0.5]
    assert probed.model.handover_s(0.0) >= 0.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert probed.model.handover_s(100.0) == 0.0


@pytest.mark.parametrize(("after_other", "after_own", "expected"), [(5.0, 2.0, 3.0), (2.0, 5.0, 0.0)])
def test_the_additional_time_of_a_vector_that_another_core_has_written(
    probed: Probed, monkeypatch: pytest.MonkeyPatch, after_other: float, after_own: float, expected: float
) -> None:
    now, value = 0.0, 0.0

    class Cores:
        """Two cores."""

        def __enter__(self) -> Any:
            return lambda function: function()

        def __exit__(self, *error: object) -> None: ...

    def copyto(out: Array, vector: Array) -> None:
        nonlocal now, value
        value = float(vector[0])
        now += after_other if value == 1 else after_own

    numpy = SimpleNamespace(copyto=copyto, zeros_like=np.zeros_like, empty_like=np.empty_like, median=np.median)
    monkeypatch.setattr(compute, "np", numpy)
    monkeypatch.setattr(compute, "_two_cores", Cores)
    monkeypatch.setattr(compute, "time", SimpleNamespace(perf_counter=lambda: now))
    assert probed.model.handover_s(0.0) == expected
