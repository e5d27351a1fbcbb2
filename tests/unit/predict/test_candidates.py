"""The configurations that ``mpitrain tune`` compares."""

from __future__ import annotations

import dataclasses

import pytest

from mpitrain.errors import ConfigError
from mpitrain.plan.modes import MODES
from mpitrain.predict.candidates import CHANGES, MOST, candidates, parse_changes, worth_of_batch

from ...support.probes import PROBE


def test_nothing_that_changes_results_is_a_candidate_unless_permitted() -> None:
    assert {name for one in candidates(PROBE, {}, ())[0] for name in one.options} == {"bucket_bytes"}


def test_permitted_changes_and_their_order() -> None:
    made, _ = candidates(PROBE, {"mode": "sync"}, CHANGES)
    assert {} in [one.options for one in made]
    assert len(made) <= MOST
    assert {"batch_size", "mode", "compress"} <= {name for one in made for name in one.options}
    scores = [one.score for one in made]
    assert scores == sorted(scores, reverse=True)


def test_options_of_compression_do_not_rule_out_other_modes() -> None:
    for codec in ("int8", "powersgd:2"):
        made, impossible = candidates(PROBE, {"mode": "sync", "compress": codec, "compress_after": 10}, ["mode"])
        assert {"async", "local"} <= {candidate.options.get("mode") for candidate in made}
        assert not impossible


def test_options_of_the_given_mode_do_not_rule_out_other_modes() -> None:
    given = {"mode": "local", "outer_optimizer": "nesterov", "outer_momentum": 0.5, "fragments": 2, "overlap_steps": 1}
    made, impossible = candidates(PROBE, given, ["mode"])
    assert {*MODES} - {"local"} <= {candidate.options.get("mode") for candidate in made}
    assert not impossible


def test_what_cannot_be_tried_is_listed_with_its_reason() -> None:
    ranks = sum(PROBE.ranks.ranks_per_node)
    made, impossible = candidates(PROBE, {"mode": "backup", "ps": 1, "backup_workers": ranks - 2}, ["servers"])
    assert made
    assert [one.options for one in impossible if one.options.get("ps") == 2]
    assert all("--backup-workers" in one.reason or "--ps" in one.reason for one in impossible)


def test_a_slow_link_calls_for_compression() -> None:
    link = dataclasses.replace(PROBE.between, bytes_per_s=1e7, node_bytes_per_s=1e7)  # type: ignore[type-var]
    exchanges = dataclasses.replace(PROBE.exchanges, sum_s_per_byte=1e-7)  # type: ignore[type-var]
    slow = dataclasses.replace(PROBE, between=link, exchanges=exchanges)
    best = candidates(slow, {}, ["compression"])[0][0]
    assert best.options["compress"] == "powersgd:4"


def test_larger_steps_are_worth_less_below_the_noise_scale() -> None:
    assert worth_of_batch(200, 100, 1e9) == pytest.approx(1)
    assert worth_of_batch(200, 100, 0) == pytest.approx(0.5)
    assert worth_of_batch(200, 100, 100) == pytest.approx(2 / 3)


def test_changes_are_checked() -> None:
    assert parse_changes("mode,batch") == {"mode", "batch"}
    assert parse_changes(None) == frozenset()
    with pytest.raises(ConfigError):
        parse_changes("mode,speed")
