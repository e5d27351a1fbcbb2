"""The configurations that ``mpitrain tune`` compares."""

from __future__ import annotations

import dataclasses

import pytest

from mpitrain.errors import ConfigError
from mpitrain.predict.candidates import CHANGES, MOST, candidates, parse_changes, worth_of_batch

from ...support.probes import PROBE


def test_nothing_that_changes_results_is_a_candidate_unless_permitted() -> None:
    assert {name for one in candidates(PROBE, {}, ()) for name in one.options} == {"bucket_bytes"}


def test_permitted_changes_and_their_order() -> None:
    made = candidates(PROBE, {"mode": "sync"}, CHANGES)
    assert {} in [one.options for one in made]
    assert len(made) <= MOST
    assert {"batch_size", "mode", "compress"} <= {name for one in made for name in one.options}
    scores = [one.score for one in made]
    assert scores == sorted(scores, reverse=True)


def test_options_of_compression_do_not_rule_out_other_modes() -> None:
    made = candidates(PROBE, {"mode": "sync", "compress": "int8", "compress_after": 10}, ["mode"])
    assert {"async", "local"} <= {candidate.options.get("mode") for candidate in made}


def test_a_slow_link_calls_for_compression() -> None:
    link = dataclasses.replace(PROBE.between, bytes_per_s=1e7, node_bytes_per_s=1e7)  # type: ignore[type-var]
    exchanges = dataclasses.replace(PROBE.exchanges, sum_s_per_byte=1e-7)  # type: ignore[type-var]
    slow = dataclasses.replace(PROBE, between=link, exchanges=exchanges)
    best = candidates(slow, {}, ["compression"])[0]
    assert best.options == {"compress": "powersgd:4"}


def test_larger_steps_are_worth_less_below_the_noise_scale() -> None:
    assert worth_of_batch(200, 100, 1e9) == pytest.approx(1)
    assert worth_of_batch(200, 100, 0) == pytest.approx(0.5)
    assert worth_of_batch(200, 100, 100) == pytest.approx(2 / 3)


def test_changes_are_checked() -> None:
    assert parse_changes("mode,batch") == {"mode", "batch"}
    assert parse_changes(None) == frozenset()
    with pytest.raises(ConfigError):
        parse_changes("mode,speed")
