"""The time at which a run ends: by the user's limit, or by the limit of its batch job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpitrain.batch_systems.registry import end_of_time
from mpitrain.batch_systems.slurm import end_in


@pytest.mark.parametrize(
    ("limit_s", "environ", "end"),
    [
        (None, {}, None),
        (60.0, {}, 1060.0),
        (None, {"SLURM_JOB_END_TIME": "1500"}, 1500.0),
        (60.0, {"SLURM_JOB_END_TIME": "1500"}, 1060.0),
        (900.0, {"SLURM_JOB_END_TIME": "1500"}, 1500.0),
        (None, {"SLURM_JOB_END_TIME": "NONE"}, None),
        (None, {"MPITRAIN_END_TIME": "1400", "SLURM_JOB_END_TIME": "1500"}, 1400.0),
    ],
)
def test_the_earliest_end_counts(limit_s: float | None, environ: dict[str, str], end: float | None) -> None:
    assert end_of_time(limit_s, environ, now=1000.0) == end


def test_slurm_is_asked_where_it_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$SLURM_TIME_FORMAT" = %s ] && [ "$3" = 7 ] && echo "7 1300"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert end_of_time(None, {"SLURM_JOB_ID": "7"}) == 1300.0
    assert end_of_time(None, {"SLURM_JOB_ID": "8"}) is None
    assert end_of_time(None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1500"}) == 1500.0
    assert end_of_time(None, {}) is None
    squeue.unlink()
    before = time.time()
    assert end_of_time(60.0, {"SLURM_JOB_ID": "7"}) == pytest.approx(before + 60, abs=30)


def test_a_task_of_an_array_has_its_own_end() -> None:
    output = "12 1300\n11 1200\n10 N/A\n"
    assert [end_in(output, job) for job in ("10", "11", "12", "13")] == [None, 1200.0, 1300.0, None]
    assert end_in("", "1") is None
