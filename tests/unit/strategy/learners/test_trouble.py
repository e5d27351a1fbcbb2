"""Warnings while the folder of the learners cannot be used."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from mpitrain.strategy.learners import trouble


def test_trouble_is_reported_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, warned_at = [1000.0], []
    monkeypatch.setattr(trouble, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reports = trouble.Trouble()
    for second in range(400):
        now[0] = 1000.0 + second
        before = len(caplog.records)
        reports.report(OSError(5, "Input/output error", "ledger.7"))
        warned_at += [second] * (len(caplog.records) - before)
    assert warned_at == [0, 30, 60, 120, 240] and reports.since == 1000.0
    assert all("ledger.7" in record.getMessage() for record in caplog.records)
    reports.end()
    assert reports.since is None
    reports.report(OSError("again"))
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 6
