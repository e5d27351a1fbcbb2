"""What the chief records of a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpitrain.monitor.metrics import MetricsFile
from mpitrain.training.telemetry import RecordGoodput


@pytest.mark.parametrize("own", [{}, {"step": 40}], ids=["earlier version", "this version"])
def test_a_learner_begins_its_account_again_if_an_earlier_version_recorded_it(tmp_path: Path, own: Any) -> None:
    path, kept = tmp_path / "metrics.jsonl", own.get("step", 0)
    spent = {"since": 100.0, "at": 200.0, **own, "start": 20.0, "steps": 80.0}
    path.write_text(json.dumps({"step": 50, "goodput": 0.8, "spent": spent}) + "\n")
    metrics = MetricsFile(path)
    loop = SimpleNamespace(step=50, training_s=0.0, waiting_s=0.0, paused_s={}, report=lambda *_, **__: None)
    RecordGoodput(metrics, path, 0.0, lambda: kept).begin(cast(Any, loop))
    assert metrics.account is not None
    account = metrics.account()["spent"]
    metrics.close()
    assert (account["step"], account.get("steps", 0.0)) == (kept, 80.0 if own else 0.0)
    assert account.get("repeated", 0.0) == pytest.approx(0.0)
