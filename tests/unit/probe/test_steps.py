"""Times of steps, from the spans that a training loop records."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpitrain.monitor import trace
from mpitrain.monitor.trace import span
from mpitrain.plan.config import RunConfig
from mpitrain.plan.job import load_job_file
from mpitrain.probe import steps
from mpitrain.probe.steps import step_times
from mpitrain.training.setup import TrainRequest

from ...support.results import SMALL

MS = 1_000_000


def test_the_first_steps_and_the_last_are_left_out() -> None:
    record = steps._RecordSteps()
    durations = [100.0, 50.0, *range(1, 20), 1000.0]
    totals = np.cumsum(durations)
    record.seconds = [{"forward": total, "backward": 2 * total, "load": 7.0} for total in totals]
    assert record.steps("forward", "backward").tolist() == [3 * value for value in durations[3:-1]]
    assert record.steps("forward").tolist() == durations[3:-1]
    assert not record.steps("update").any()


def test_nothing_is_recorded_without_a_recorder() -> None:
    record = steps._RecordSteps()
    record.after_step(None)  # type: ignore[arg-type]
    assert not record.seconds
    record.recorder = SimpleNamespace(track=SimpleNamespace(seconds={"update": 1.0}))  # type: ignore[assignment]
    record.after_step(None)  # type: ignore[arg-type]
    assert record.seconds == [{"update": 1.0}]


@pytest.mark.parametrize(("step_s", "count"), [(0.1, 40), (1e-9, 1000), (100.0, 20)])
def test_workers_train_alone_without_anything_that_takes_time(
    monkeypatch: pytest.MonkeyPatch, step_s: float, count: int
) -> None:
    now, requests = 0, list[TrainRequest]()

    def run() -> None:
        nonlocal now
        job = requests[-1].make()
        assert job.validation is None and not job.metrics
        hook: Any = job.hooks[-1]
        for _ in range(count):
            with span("step"):
                for kind, ms in (("load", 50), ("forward", 2), ("backward", 4), ("update", 3)):
                    with span(kind):
                        now += ms * MS
                now += 1 * MS
            hook.after_step(None)

    @contextlib.contextmanager
    def training_session(cluster: Any, request: TrainRequest, status: Any) -> Iterator[Any]:
        requests.append(request)
        yield SimpleNamespace(loop=SimpleNamespace(run=run))

    clock = SimpleNamespace(
        record=lambda keep_steps: trace.record(keep_steps, lambda: now), stop_recording=trace.stop_recording
    )
    monkeypatch.setattr(steps, "trace", clock)
    monkeypatch.setattr(steps, "training_session", training_session)
    config = RunConfig.of(batch_size=5, threads=1, seed=3, validate_steps=10, train_epochs=2)
    request = TrainRequest(SMALL, {}, config, load_job_file(SMALL))
    found = step_times(None, request, None, step_s, 4.0)  # type: ignore[arg-type]
    np.testing.assert_allclose(found.compute_s, 0.006)
    assert len(found.compute_s) == count - count // 10 - 2
    assert (found.update_s, found.loop_s) == pytest.approx((0.003, 0.001))
    options = requests[-1].config.options()
    assert (options["mode"], options["local_steps"], options["train_steps"]) == ("local", count, count)
    assert (options["batch_size"], options["threads"], options["seed"]) == (5, 1, 3)
    assert (options["validate_steps"], options["log_steps"], options["resume"]) == (0, 0, "never")
    with span("step"):
        pass  # nothing is recorded any longer


def test_messages_about_the_run_are_not_printed(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("mpitrain.probe.test")
    caplog.set_level(logging.DEBUG)
    for quiet in (True, False):
        with steps._quiet() if quiet else contextlib.nullcontext():
            logger.info("note")
            logger.warning("warning")
    assert [record.message for record in caplog.records] == ["warning", "note", "warning"]
    logging.disable(logging.DEBUG)
    with steps._quiet():
        pass
    assert logging.root.manager.disable == logging.DEBUG
    logging.disable(logging.NOTSET)
