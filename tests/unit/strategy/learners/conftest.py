"""A fixture of the tests that run learners."""

from __future__ import annotations

import pytest

from mpitrain.strategy.learners import (
    claims as claims_module,
    learner as learner_module,
    lease as lease_module,
    signs as signs_module,
)

from ....support.waiting import limit
from .process import give_up_after


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners that look, state and end leases more often."""
    monkeypatch.setattr(learner_module, "POLL_S", 0.01)
    monkeypatch.setattr(learner_module, "_STATE_S", 0.02)
    monkeypatch.setattr(claims_module, "_MEASURE_S", 0.02)
    monkeypatch.setattr(lease_module, "LEASE_S", 1.0)
    monkeypatch.setattr(signs_module, "_LOOK_S", 0.1)
    give_up_after(monkeypatch, limit(20))
