"""The configurations that ``mpitrain tune`` runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mpitrain.api.tuning import _temporary_folder, _to_measure
from mpitrain.errors import LaunchError
from mpitrain.predict.candidates import candidates

from ...support.probes import PROBE


def test_options_without_an_effect_are_not_measured() -> None:
    """Within a node, the size of buckets does not change the prediction."""
    ranks = dataclasses.replace(PROBE.ranks, ranks_per_node=(2,))  # type: ignore[type-var]
    possible = candidates(dataclasses.replace(PROBE, ranks=ranks), {}, ["batch"])[0]
    assert sum("bucket_bytes" in one.options for one in possible) > 4
    own, *others = _to_measure(possible)
    assert own.options == {}
    assert [set(one.options) for one in others] == [{"batch_size"}] * len(others)


def test_the_best_predictions_are_measured() -> None:
    possible = candidates(PROBE, {}, ["mode", "compression"])[0]
    own, *others = _to_measure(possible)
    assert own.options == {} and 0 < len(others) <= 4
    assert [one.score for one in others] == sorted((one.score for one in others), reverse=True)
    assert others[0].score == possible[0].score > own.score


def test_equal_predictions_are_measured_once() -> None:
    measured = _to_measure(candidates(PROBE, {}, ["batch"])[0])
    scores = [round(one.score, 6) for one in measured]
    assert len(scores) == len(set(scores)) > 1


def test_temporary_files_are_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts share it, unlike the system's temporary folder."""
    monkeypatch.chdir(tmp_path)
    with _temporary_folder() as folder:
        assert folder.is_absolute() and folder.parent == tmp_path and folder.is_dir()
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "none")
    with pytest.raises(LaunchError, match="cannot be written"), _temporary_folder():
        pass
