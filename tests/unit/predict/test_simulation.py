"""Predictions: properties that any good model of the modes has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.cli.main import main
from mpitrain.errors import ConfigError, RecordError
from mpitrain.plan.config import RunConfig
from mpitrain.predict.candidates import CHANGES, MOST, candidates
from mpitrain.predict.links import Sender, Senders
from mpitrain.predict.measurements import LinkTimes, ServerTimes, read_probe
from mpitrain.predict.scenario import Scenario, parse_rate, scenario_of, shaped
from mpitrain.predict.simulation import Failures, predict, simulate, step_factors, time_with_failures

from ...support.probes import COMPUTE_S, LOOP_S, PROBE, UPDATE_S
from ...support.ring import Ring, fuse, step_s

NBYTES = PROBE.job.nbytes
MODES: list[dict[str, Any]] = [
    {"mode": "sync"}, {"mode": "local"}, {"mode": "async", "ps": 1}, {"mode": "ssp", "ps": 1},
    {"mode": "backup", "ps": 1},
]  # fmt: skip


def scenario(ranks: tuple[int, ...], rate: float | None = None, slow: dict[int, float] | None = None, **options: Any):
    made = scenario_of(PROBE, RunConfig.of(**options), ranks)
    link = made.between if rate is None else shaped(made.between, rate)
    return dataclasses.replace(made, between=link, slow=slow or {}, spreads=False, cores_per_node=max(ranks))


def speed(made: Scenario) -> float:
    return predict(PROBE, made).steps_per_s


@pytest.mark.parametrize("options", [{"mode": "sync"}, {"mode": "local", "local_steps": 100}])
def test_one_rank_needs_the_measured_times(options: dict[str, Any]) -> None:
    assert speed(scenario((1,), **options)) == pytest.approx(1 / (COMPUTE_S + UPDATE_S + LOOP_S), rel=0.02)


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_a_slow_link_limits_sync_to_its_bytes(nodes: int) -> None:
    rate = 1e6
    nbytes = 2 * (nodes - 1) / nodes * NBYTES
    assert speed(scenario((1,) * nodes, rate, mode="sync")) == pytest.approx(rate / nbytes, rel=0.02)
    compressed = speed(scenario((1,) * nodes, rate, mode="sync", compress="int8"))
    assert compressed == pytest.approx(4 * rate / nbytes, rel=0.02)


def test_a_fast_link_is_no_limit_and_ranks_divide_the_update() -> None:
    fast = dataclasses.replace(PROBE.between, latency_s=0.0, message_s=0.0, cpu_s_per_byte=0.0)  # type: ignore[type-var]
    made = dataclasses.replace(scenario((1, 1), mode="sync"), between=shaped(fast, 1e15))  # type: ignore[arg-type]
    assert 1 / (COMPUTE_S + UPDATE_S + LOOP_S) < speed(made) < 1 / (COMPUTE_S + LOOP_S)


def test_a_slow_worker_delays_the_modes_that_wait_for_it() -> None:
    slow = {2: 3.0}
    sync = [speed(scenario((4,), slow=given, mode="sync")) for given in ({}, slow)]
    assert sync[0] / sync[1] == pytest.approx(2.3, abs=0.3)
    backup = [speed(scenario((4,), slow=given, mode="backup", backup_workers=1)) for given in ({}, slow)]
    assert backup[1] == pytest.approx(backup[0], rel=0.05)
    quick = dataclasses.replace(PROBE, server=ServerTimes(1e-5, 1e-5))  # workers do not wait for each other's updates
    asynchronous = [predict(quick, scenario((4,), slow=given, mode="async")).steps_per_s for given in ({}, slow)]
    assert asynchronous[1] / asynchronous[0] == pytest.approx((3 + 12 / 32) / 4, abs=0.02)
    ssp = [speed(scenario((4,), slow=given, mode="ssp", staleness=2)) for given in ({}, slow)]
    assert ssp[1] < 0.6 * ssp[0]


def test_staleness_is_bounded_in_ssp_and_grows_with_the_workers_in_async() -> None:
    run = simulate(PROBE, scenario((4,), slow={0: 5.0}, mode="ssp", staleness=3), 100)
    assert max(run.staleness) == 3
    varied = dataclasses.replace(PROBE, server=ServerTimes(1e-5, 1e-5), step_factors=(0.5, 0.9, 1.0, 1.7))
    made = (dataclasses.replace(scenario((ranks,), mode="async"), spreads=True) for ranks in (1, 2, 6))
    assert [predict(varied, one).staleness for one in made] == pytest.approx([0, 1, 5], abs=0.1)


def test_backup_drops_the_gradients_of_the_slowest() -> None:
    prediction = predict(PROBE, scenario((4,), slow={3: 10.0}, mode="backup", backup_workers=1))
    assert 0 < prediction.dropped < 0.25


def test_local_steps_and_an_outer_optimizer_save_bytes() -> None:
    rate = 20e6
    rare, often = (predict(PROBE, scenario((1, 1), rate, mode="local", local_steps=n)) for n in (64, 8))
    assert rare.steps_per_s > 2 * often.steps_per_s
    outer = predict(PROBE, scenario((1, 1), rate, mode="local", local_steps=8, outer_optimizer="nesterov"))
    assert outer.steps_per_s > often.steps_per_s  # with an outer optimizer, one vector is averaged instead of three


def test_fragments_are_exchanged_more_often_and_send_the_same_bytes() -> None:
    rate = 1e6
    outer = {"mode": "local", "local_steps": 64, "outer_optimizer": "nesterov"}
    whole, quarters = (predict(PROBE, scenario((1, 1), rate, **outer, **more)) for more in ({}, {"fragments": 4}))
    assert quarters.steps_per_s == pytest.approx(whole.steps_per_s, rel=0.1)
    assert quarters.sent_bytes_per_s == pytest.approx(whole.sent_bytes_per_s, rel=0.1)
    hidden = predict(PROBE, scenario((1, 1), rate, **outer, fragments=4, overlap_steps=15))
    assert hidden.steps_per_s > 1.15 * quarters.steps_per_s


def test_prefetched_parameters_are_older_and_save_the_time_to_read_them() -> None:
    one_way = NBYTES / COMPUTE_S  # bytes/s: a transfer takes as long as a gradient
    usual, prefetches = (
        predict(PROBE, scenario((2, 1), one_way, mode="async", ps=1, **more))
        for more in ({}, {"prefetch_params": True})
    )
    assert prefetches.staleness > usual.staleness
    alone = [predict(PROBE, scenario((1, 1), one_way, mode="async", ps=1, prefetch_params=on)) for on in (False, True)]
    assert alone[1].steps_per_s > 1.3 * alone[0].steps_per_s


def test_parameters_that_arrive_in_the_forward_pass_cost_processor_time_there() -> None:
    fast = shaped(PROBE.between, 1e15)  # type: ignore[arg-type]
    made = dataclasses.replace(scenario((1, 1), mode="sync"), between=fast)
    exchanges = PROBE.exchanges
    assert exchanges is not None
    free = dataclasses.replace(PROBE, exchanges=dataclasses.replace(exchanges, sum_s_per_byte=0.0))
    more_s = 1 / predict(PROBE, made).steps_per_s - 1 / predict(free, made).steps_per_s
    assert more_s == pytest.approx(NBYTES * exchanges.sum_s_per_byte, rel=0.05)  # half a vector in each direction


def test_several_servers_share_the_load() -> None:
    # Nodes with a server have one rank more, so that the number of workers is the same.
    one = speed(scenario((2, *[1] * 8), 50e6, mode="backup", ps=1, backup_workers=0))
    four = speed(scenario((2, 2, 2, 2, *[1] * 5), 50e6, mode="backup", ps=4, backup_workers=0))
    assert four > 2 * one


@pytest.mark.parametrize("options", MODES)
def test_efficiency_is_at_most_one_and_is_the_same_again(options: dict[str, Any]) -> None:
    made = dataclasses.replace(scenario((2, 2, 2), **options), spreads=True)
    prediction = predict(PROBE, made)
    assert 0 < prediction.efficiency <= 1.02
    assert prediction == predict(PROBE, made)
    assert all(np.isfinite(value) for value in vars(prediction).values() if value is not None)
    assert prediction.exchanges is None


@pytest.mark.parametrize(("nodes", "options"), [(1024, {"mode": "sync"}), (32, {"mode": "ssp", "ps": 16})])
def test_many_ranks(nodes: int, options: dict[str, Any]) -> None:
    assert predict(PROBE, scenario((4,) * nodes, **options), steps=20).steps_per_s > 0


def test_a_link_with_bursts() -> None:
    link = LinkTimes(0.0, 0.0, 100.0, 100.0, 50.0, 0.0)
    of_one, of_all = Sender(link), Senders(link, 2)
    for when, nbytes, end in ((0.0, 50, 0.0), (0.0, 100, 1.0), (1.25, 25, 1.25), (10.0, 150, 11.0)):
        assert of_one.send(when, nbytes) == pytest.approx(end)
        assert of_all.send(when, nbytes).tolist() == pytest.approx([end, end])
    assert of_one.sent == 325
    paced = Sender(link, burst_s_per_byte=0.002)
    assert paced.send(0.0, 150) == pytest.approx(0.1 + 1.0)


def test_a_ring_sums_while_backward_computes() -> None:
    ring = Ring(nodes=2, ranks_per_node=2, bytes_per_s=100.0, hop_s=0.01, network_hop_s=0.1)
    assert ring.allreduce_s(100) == pytest.approx(2 * 3 / 4 + 4 * 0.01 + 2 * 0.1)
    layers = [(10.0, 0.25), (10.0, 0.25), (80.0, 0.5)]
    fused = fuse(layers, forward_s=1.0, backward_s=2.0, most=50.0)
    assert [(buffer.nbytes, buffer.ready_s) for buffer in fused] == [(80.0, 2.0), (20.0, 3.0)]
    assert step_s(fused, 3.0, ring) == pytest.approx(2 + ring.allreduce_s(80) + ring.allreduce_s(20))
    fast = Ring(2, 2, 1e12, 0.0, 0.0)
    assert step_s(fused, 3.0, fast) == pytest.approx(3.0)
    assert step_s(fused, 3.0, fast, factor=1.1) == pytest.approx(3.3)


def test_failures_cost_what_was_not_saved() -> None:
    assert time_with_failures(1000, 1, Failures(1e12, 100, 1)) == pytest.approx(1010)
    # Young (1974): on average, a failure costs half of the interval between checkpoints, and the restart.
    failures = Failures(mean_time_s=10_000, save_every_s=100, save_s=0.5, restart_s=20)
    expected = 100_000 * (1 + 0.005) / (1 - (50 + 20) / 10_000)
    assert time_with_failures(100_000, 1, failures) == pytest.approx(expected, rel=0.01)
    with pytest.raises(ConfigError):
        time_with_failures(1000, 1000, Failures(100, 100))


def test_virtual_workers_are_not_predicted() -> None:
    with pytest.raises(ConfigError, match="--virtual-workers"):
        scenario_of(PROBE, RunConfig.of(virtual_workers=64))


def test_a_probe_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    PROBE.write(file)
    assert read_probe(file) == PROBE
    values = json.loads(file.read_text())
    for wrong in ({**values, "version": 0}, {"version": 1}, [], {**values, "compute": None}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(RecordError):
            read_probe(file)


def test_all_that_may_change_is_compared() -> None:
    made, _ = candidates(PROBE, {}, CHANGES)
    assert len(made) <= MOST
    assert {one.options.get("mode", "sync") for one in made} == {mode["mode"] for mode in MODES}
    assert len({one.scenario.batch for one in made}) > 2


def test_rates_and_distributions(tmp_path: Path) -> None:
    assert parse_rate("10gbit") == pytest.approx(1.25e9 * 0.94, rel=0.01)
    file = tmp_path / "times"
    file.write_text("1.0\n2.0\n4.0\n")
    assert step_factors(str(file), PROBE) == (0.5, 1.0, 2.0)
    assert np.std(np.log(step_factors("lognormal:0.3", PROBE))) == pytest.approx(0.3, rel=0.1)
    for wrong in ("10", "0gbit", "fast"):
        with pytest.raises(ConfigError):
            parse_rate(wrong)
    for wrong in ("lognormal:x", str(tmp_path / "none")):
        with pytest.raises(ConfigError):
            step_factors(wrong, PROBE)


def test_the_command_writes_predictions_a_plot_and_a_timeline(tmp_path: Path) -> None:
    probe, output, trace, plot = (tmp_path / name for name in ("probe.json", "out.json", "trace.json", "plot.svg"))
    PROBE.write(probe)
    words = ["simulate", str(probe), "--nodes", "1,2,4", "--link", "1gbit", "-o", str(output), "--plot", str(plot)]
    assert main([*words, "--examples", "1000000"]) == 0
    predictions = json.loads(output.read_text())
    of_modes = {(mode["mode"], nodes) for mode in MODES for nodes in (1, 2, 4)}
    assert {(one["mode"], one["nodes"]) for one in predictions} == of_modes
    assert all(one["time_s"] == pytest.approx(1e6 / one["examples_per_s"]) for one in predictions)
    assert "<svg" in plot.read_text()
    assert main(["simulate", str(probe), "--mode", "sync", "--nodes", "2", "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"forward", "backward", "average", "step"} <= {event["name"] for event in events if event["ph"] == "X"}


def test_the_command_predicts_the_goodput(tmp_path: Path) -> None:
    """A failure costs half of the interval between checkpoints, and the restart: see above."""
    probe, output = tmp_path / "probe.json", tmp_path / "out.json"
    PROBE.write(probe)
    words = ["simulate", str(probe), "--mode", "sync", "--nodes", "1,4", "--link", "100gbit", "--examples", f"{10**9}"]
    words += ["--node-mtbf", "10000", "--save-secs", "100", "--save-time", "0.5", "--restart-time", "20"]
    assert main([*words, "-o", str(output)]) == 0
    for one in json.loads(output.read_text()):
        assert one["goodput"] == pytest.approx((1 - one["nodes"] * (50 + 20) / 10_000) / 1.005, rel=0.01)
        assert one["time_s"] == pytest.approx(1e9 / one["examples_per_s"] / one["goodput"])


@pytest.mark.parametrize(
    "words",
    [
        ["--node-mtbf", "10"],
        ["--link", "fast"],
        ["--link-burst", "10"],
        ["--mode", "sync", "--staleness", "2"],
        ["--mode", "async", "--ps", "0", "--nodes", "2"],
        ["--slow", "one"],
        ["--slow", "-1:2"],
        ["--slow", "1:0"],
        ["--save-secs", "10"],
        ["--slow", "99:2", "--mode", "sync", "--nodes", "2"],
        ["--plot", "plot.txt"],
        ["--trace", "trace.json"],
        ["--step-times", "often"],
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    probe = tmp_path / "probe.json"
    PROBE.write(probe)
    assert main(["simulate", str(probe), *words]) == 2
    captured = capfd.readouterr()
    assert len(captured.err.strip().splitlines()) == 1
    assert not captured.out


def test_links_must_be_known_to_predict_several_nodes(tmp_path: Path) -> None:
    probe, output = tmp_path / "probe.json", tmp_path / "out.json"
    ranks = dataclasses.replace(PROBE.ranks, ranks_per_node=(2,))
    dataclasses.replace(PROBE, between=None, exchanges=None, ranks=ranks).write(probe)
    assert main(["simulate", str(probe), "-o", str(output)]) == 0
    assert {one["nodes"] for one in json.loads(output.read_text())} == {1}
    assert main(["simulate", str(probe), "--nodes", "2"]) == 2
    assert main(["simulate", str(probe), "--nodes", "2", "--link", "10gbit"]) == 0
