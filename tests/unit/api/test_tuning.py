"""The configurations that ``mpitrain tune`` runs."""

from __future__ import annotations

import dataclasses

from mpitrain.api.tuning import _to_measure
from mpitrain.predict.candidates import candidates

from ...support.probes import PROBE


def test_options_without_an_effect_are_not_measured() -> None:
    """Within a node, the size of buckets does not change the prediction."""
    ranks = dataclasses.replace(PROBE.ranks, ranks_per_node=(2,))  # type: ignore[type-var]
    possible = candidates(dataclasses.replace(PROBE, ranks=ranks), {}, ["batch"])
    assert sum("bucket_bytes" in one.options for one in possible) > 4
    own, *others = _to_measure(possible)
    assert own.options == {}
    assert [set(one.options) for one in others] == [{"batch_size"}] * len(others)


def test_the_best_predictions_are_measured() -> None:
    possible = candidates(PROBE, {}, ["mode", "compression"])
    own, *others = _to_measure(possible)
    assert own.options == {} and 0 < len(others) <= 4
    assert [one.score for one in others] == sorted((one.score for one in others), reverse=True)
    assert others[0].score == possible[0].score > own.score


def test_equal_predictions_are_measured_once() -> None:
    measured = _to_measure(candidates(PROBE, {}, ["batch"]))
    scores = [round(one.score, 6) for one in measured]
    assert len(scores) == len(set(scores)) > 1
