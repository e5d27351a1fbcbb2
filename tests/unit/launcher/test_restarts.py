"""How restarts are counted, and when no restart is allowed."""

from __future__ import annotations

from mpitrain.launcher.outcome import Kind, Outcome
from mpitrain.launcher.restarts import Interruption, Restarts


def failure(step: int | None, ended_at: float, is_external: bool = True) -> Outcome:
    return Outcome(Kind.FAILED, step=step, ended_at=ended_at, is_external=is_external)


def test_an_interruption_lasts_until_training_continues() -> None:
    restarts = Restarts(9, True, None)
    assert restarts.interruption is None
    pauses = [restarts.add(failure(step, at), 2) for step, at in ((5000, 1.0), (None, 2.0), (None, 3.0))]
    assert pauses == [0, 1, 2]
    assert (restarts.count, restarts.interruption) == (3, Interruption(1.0, 5000, 3))
    assert restarts.add(failure(6000, 9.0), 2) == 0
    assert (restarts.count, restarts.interruption) == (4, Interruption(9.0, 6000, 1))
    restarts.forget_failures()
    assert restarts.interruption is None


def test_reasons_not_to_restart() -> None:
    restarts, failed = Restarts(2, True, 60.0), failure(None, 1.0, is_external=False)
    assert restarts.reason_not_to_restart(failed, 2, 10.0) == ""
    assert "--time-limit" in restarts.reason_not_to_restart(failed, 2, 59.5)
    restarts.add(failed, 2)
    assert restarts.reason_not_to_restart(failed, 2, 10.0) != ""  # the second failure before training started
    assert restarts.reason_not_to_restart(failure(None, 2.0), 2, 10.0) == ""  # the rank was killed
    after_kill = Restarts(2, True, None)
    after_kill.add(failure(None, 2.0), 2)
    assert after_kill.reason_not_to_restart(failed, 2, 10.0) == ""  # the first one of this kind
    restarts.add(failed, 2)
    assert "--max-restarts" in restarts.reason_not_to_restart(failure(None, 3.0), 2, 10.0)
    program = Restarts(2, False, None)
    program.add(failed, 2)
    assert program.reason_not_to_restart(failed, 2, 10.0) == ""
