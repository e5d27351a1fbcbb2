"""Predictions of learners: speed, exchanges, failures and preemptions."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.cli.main import main
from mpitrain.plan.config import RunConfig
from mpitrain.predict.learners import Exchanges
from mpitrain.predict.scenario import Scenario, scenario_of, shaped
from mpitrain.predict.simulation import Failures, Prediction, predict, time_with_failures

from ...support.probes import COMPUTE_S, LOOP_S, PROBE, UPDATE_S

NBYTES = PROBE.job.nbytes
STEP_S = COMPUTE_S + UPDATE_S + LOOP_S


def scenario(
    learners: int | None, ranks: tuple[int, ...] = (1,), rate: float = 1e9, slow: Any = None, **options: Any
) -> Scenario:
    run = {} if learners is None else {"join": Path("run")}
    made = scenario_of(PROBE, RunConfig.of(**options, **run), ranks)
    between = shaped(made.between, rate)
    changes = {"learners": learners, "slow": slow or {}, "spreads": False, "cores_per_node": max(ranks)}
    return dataclasses.replace(made, between=between, **changes)


def prediction(*args: Any, **options: Any) -> Prediction:
    return predict(PROBE, scenario(*args, **options))


def exchanges(*args: Any, **options: Any) -> Exchanges:
    found = prediction(*args, **options).exchanges
    assert found is not None
    return found


@pytest.mark.parametrize("ranks", [(1,), (2, 2)])
def test_the_speed_of_learners_is_the_sum_of_their_speeds(ranks: tuple[int, ...]) -> None:
    alone, eight = prediction(None, ranks), prediction(8, ranks)
    assert eight.exchanges is not None
    expected = 8 * (1 - eight.exchanges.pause)
    assert 0.9 * 8 < expected < 8
    assert eight.steps_per_s == pytest.approx(expected * alone.steps_per_s)
    assert eight.examples_per_s == pytest.approx(expected * alone.examples_per_s)
    assert eight.efficiency == pytest.approx(expected / 8 * alone.efficiency)


def test_a_slow_learner_does_not_slow_the_others() -> None:
    usual, slow = prediction(8, local_steps=6400), prediction(8, local_steps=6400, slow={3: 4.0})
    of_slow = predict(PROBE, scenario(None, slow={0: 4.0})).steps_per_s
    assert slow.steps_per_s == pytest.approx(7 / 8 * usual.steps_per_s + of_slow, rel=0.001)
    together = [prediction(None, (1,) * 8, rate=1e12, slow=factors).steps_per_s for factors in ({}, {3: 4.0})]
    assert together[1] < 0.4 * together[0]


def test_a_slow_worker_slows_its_own_learner() -> None:
    usual, slow, both = (prediction(3, (2,), slow=factors) for factors in ({}, {4: 4.0}, {4: 4.0, 5: 4.0}))
    assert slow.steps_per_s < 0.85 * usual.steps_per_s
    assert both.steps_per_s == pytest.approx(slow.steps_per_s, rel=0.001)


@pytest.mark.parametrize(("learners", "of_period"), [(1, 1.0), (2, 1.0), (300, 0.5)])
def test_a_version_waits_for_all_learners_or_half_of_the_time_between_contributions(
    learners: int, of_period: float
) -> None:
    found = prediction(learners, rate=1e12, local_steps=6400)
    assert found.exchanges is not None
    assert found.exchanges.version_s == pytest.approx(of_period * 6400 * STEP_S, rel=0.04)
    assert found.staleness == pytest.approx(0, abs=0.05)


def test_the_link_of_the_learner_that_merges_limits_versions_and_not_training() -> None:
    """One contribution of each learner waits at most, and the link carries all of them for each version."""
    rate = 1e7
    slow, fast = prediction(64, rate=rate), prediction(64, rate=1e12)
    assert slow.exchanges is not None
    assert slow.exchanges.version_s == pytest.approx(64 * NBYTES / rate, rel=0.05)
    assert slow.steps_per_s == pytest.approx(fast.steps_per_s, rel=0.02)
    assert slow.staleness >= 1
    assert slow.exchanges.kept_every_s == slow.exchanges.version_s


def test_an_exchange_moves_a_contribution_and_a_version_with_its_momentum() -> None:
    rate = 1e8
    nesterov, sgd = exchanges(4, rate=rate), exchanges(4, rate=rate, outer_optimizer="sgd")
    assert (nesterov.nbytes, sgd.nbytes) == (3 * NBYTES, 2 * NBYTES)
    assert nesterov.transfer_s == pytest.approx(3 * NBYTES / rate)
    rare, parts = exchanges(4, local_steps=640), exchanges(4, local_steps=640, fragments=8)
    assert parts.nbytes == rare.nbytes
    assert parts.version_s == pytest.approx(rare.version_s, rel=0.2)
    assert rare.pause < nesterov.pause / 5


def test_learners_of_many_ranks_send_what_each_of_them_sends() -> None:
    alone, learners = prediction(None, (1, 1)), prediction(4, (1, 1))
    assert learners.exchanges is not None
    more = learners.sent_bytes_per_s - alone.sent_bytes_per_s
    assert more == pytest.approx(learners.exchanges.sent_bytes_per_s)
    assert more == pytest.approx(NBYTES * (alone.steps_per_s / 64 + 2 / learners.exchanges.version_s))


@pytest.mark.parametrize("fragments", [1, 24])
def test_4096_learners_are_predicted_in_seconds(fragments: int) -> None:
    began = time.process_time()
    found = prediction(4096, fragments=fragments, slow={4095: 2.0})
    assert time.process_time() - began < 30
    assert all(np.isfinite(value) for value in dataclasses.asdict(found.exchanges).values())  # type: ignore[arg-type]
    assert found.steps_per_s == pytest.approx(4096 / STEP_S, rel=0.01)
    assert found == prediction(4096, fragments=fragments, slow={4095: 2.0})


def test_preemptions_cost_the_time_away() -> None:
    preempted = Failures(math.inf, 600.0, preempted_every_s=10_000, away_s=500)
    assert time_with_failures(1e5, 1, preempted) == pytest.approx(1e5 * (1 + 500 / 10_000), rel=0.01)
    assert time_with_failures(1e5, 4, preempted) == pytest.approx(1e5 * (1 + 4 * 500 / 10_000), rel=0.01)
    saves = dataclasses.replace(preempted, save_every_s=100, save_s=10)
    assert time_with_failures(1e5, 1, saves) == pytest.approx(1.1e5 * (1 + 500 / 10_000), rel=0.01)
    both = Failures(10_000, 100, 0.0, 20, preempted_every_s=10_000, away_s=500)
    assert time_with_failures(1e5, 1, both) == pytest.approx(1e5 * (1 + 500 / 1e4) / (1 - 70 / 1e4), rel=0.01)


def forecasts(folder: Path, *words: str) -> list[dict[str, Any]]:
    probe, output = folder / "probe.json", folder / "out.json"
    PROBE.write(probe)
    common = ["--link", "100gbit", "--examples", f"{10**9}", "--step-times", "equal", "-o", str(output)]
    assert main(["simulate", str(probe), *common, *words]) == 0
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


def test_goodput_without_failures_is_the_time_without_exchanges(tmp_path: Path) -> None:
    (one,) = forecasts(tmp_path, "--learners", "4", "--nodes", "1", "--node-mtbf", "1e15")
    assert one["goodput"] == pytest.approx(1 - one["exchanges"]["pause"], abs=1e-6)
    assert one["goodput"] < 0.999
    assert one["time_s"] == pytest.approx(1e9 / one["examples_per_s"], rel=1e-4)


@pytest.mark.parametrize("learners", [1, 8])
def test_a_failure_costs_its_learner_what_it_has_not_contributed(tmp_path: Path, learners: int) -> None:
    """As with checkpoints (see ``test_simulation``): half of the interval, and the restart, whatever the others do."""
    words = ["--node-mtbf", "10000", "--restart-time", "20", "--local-steps", "6400", "--nodes", "1,4"]
    for one in forecasts(tmp_path, "--learners", str(learners), *words):
        every_s, nodes = one["exchanges"]["kept_every_s"], one["nodes"] / learners
        expected = (1 - one["exchanges"]["pause"]) * (1 - nodes * (every_s / 2 + 20) / 10_000)
        assert one["goodput"] == pytest.approx(expected, rel=0.015)
        assert one["ranks"] == one["workers"] == one["nodes"]


def test_learners_lose_less_than_all_nodes_in_one_run(tmp_path: Path) -> None:
    failures = ["--node-mtbf", "10000", "--restart-time", "100", "--preempt", "20000:600"]
    (learners,) = forecasts(tmp_path, "--learners", "16", "--nodes", "1", *failures)
    (together,) = forecasts(tmp_path, "--mode", "sync", "--nodes", "16", "--save-secs", "10", *failures)
    assert learners["nodes"] == together["nodes"] == 16
    assert learners["goodput"] > 0.95
    away = 16 * (100 / 10_000 + 600 / 20_000)  # seconds for each second of training
    assert together["goodput"] == pytest.approx((1 - 16 * 10 / 2 / 10_000) / (1 + away), rel=0.02)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--learners", "4097"], "4096"),
        (["--learners", "2", "--mode", "local"], "requires --mode sync"),
        (["--learners", "2", "--overlap-steps", "2"], "--overlap-steps"),
        (["--learners", "2", "--local-steps", "4", "--fragments", "8"], "--fragments 8"),
        (["--learners", "2", "--trace", "trace.json"], "--trace has no effect with --learners"),
        (
            ["--learners", "2", "--examples", "9", "--node-mtbf", "9", "--save-secs", "9"],
            "--save-secs has no effect with --learners",
        ),
        (["--learners", "2", "--nodes", "1", "--slow", "2:3"], "there are 2 workers"),
        (["--learners", "2", "--nodes", "1", "--examples", "100000000", "--node-mtbf", "0.1"], "--local-steps"),
        (["--preempt", "3600:60"], "--examples"),
        (["--preempt", "3600", "--examples", "9"], "3600:300"),
        (["--preempt", "0:60", "--examples", "9"], "3600:300"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "probe.json"
    PROBE.write(probe)
    assert main(["simulate", str(probe), *words]) == 2
    captured = capfd.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert reason in captured.err
    assert not captured.out


def test_the_link_to_the_folder_must_be_known(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    probe = tmp_path / "probe.json"
    ranks = dataclasses.replace(PROBE.ranks, ranks_per_node=(1,))
    dataclasses.replace(PROBE, between=None, exchanges=None, ranks=ranks).write(probe)
    assert main(["simulate", str(probe), "--learners", "3"]) == 2
    assert "--learners 3" in capfd.readouterr().err
    assert main(["simulate", str(probe), "--learners", "3", "--nodes", "1", "--link", "10gbit"]) == 0
    assert "version every" in capfd.readouterr().out
