"""Tickets, gates and bounds, by one process that plays all workers."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.strategy.ps.coordinator import DROPPED, END, PAUSE, WAIT, CoordinatorRules, StepCoordinator, unpack_state


class OwnMemory:
    """In place of memory that ranks share: one process plays them all."""

    def allocate(self, shape, dtype):
        return np.zeros(shape, dtype)


def ledger_of(rules, step=0, end=10, gate=10):
    coordinator = StepCoordinator(OwnMemory(), rules)
    coordinator.open(step, end)
    coordinator.set_pause_step(gate)
    return coordinator


def test_items_are_given_once_and_end():
    coordinator = ledger_of(CoordinatorRules(2), step=3)
    items = [coordinator.next(i % 2)[0] for i in range(9)]
    assert items == [3, 4, 5, 6, 7, 8, 9, END, END]


def test_a_gate_holds_everyone_until_it_is_moved():
    coordinator = ledger_of(CoordinatorRules(2), gate=2)
    assert [coordinator.next(0)[0], coordinator.next(1)[0], coordinator.next(0, chief=True)[0]] == [0, 1, WAIT]
    coordinator.finish(0, 0.5, 0, 8)
    assert coordinator.next(0, chief=True)[0] == WAIT, "worker 1 has not finished"
    assert coordinator.finish(1, 0.25, 1, 8) == 2
    assert coordinator.next(1)[0] == WAIT
    assert coordinator.next(0, chief=True)[0] == PAUSE
    coordinator.set_pause_step(10)
    assert coordinator.next(1)[0] == 2


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_holds_who_is_too_far_ahead(bound):
    coordinator = ledger_of(CoordinatorRules(2, bound=bound), end=100, gate=100)
    assert coordinator.next(1)[0] == 0
    leads = []
    while True:
        ticket, _, ahead = coordinator.next(0)
        if ticket == WAIT:
            break
        leads.append(ahead)
        coordinator.finish(0, 0.0, ahead, 0)
    assert leads == list(range(bound + 1))
    coordinator.finish(1, 0.0, 0, 0)
    assert coordinator.next(0)[0] != WAIT, "the slow one has come one step further"


def test_who_has_ended_holds_nobody_up():
    coordinator = ledger_of(CoordinatorRules(2, bound=0), end=3, gate=3)
    for _ in range(3):
        assert coordinator.next(0)[0] != WAIT
        coordinator.finish(0, 0.0, 0, 0)
        coordinator.next(1)
        coordinator.finish(1, 0.0, 0, 0)
    assert coordinator.next(0)[0] == coordinator.next(1)[0] == END


def test_backup_takes_the_first_and_drops_the_rest():
    coordinator = ledger_of(CoordinatorRules(3, gradients_per_step=2))
    turns = [coordinator.next(worker) for worker in range(3)]
    assert [turn[:2] for turn in turns] == [(0, 0), (1, 0), (2, 0)]
    places = [coordinator.admit(worker, turns[worker][0], 0, 1.0, 8) for worker in (2, 0, 1)]
    assert places == [0, 1, DROPPED]
    assert coordinator.next(1)[:2] == (3, 1), "the dropped worker continues with the next step"
    assert [account.dropped for account in coordinator.state().worker_stats] == [0, 1, 0]


def test_stopping_finishes_what_is_under_way():
    coordinator = ledger_of(CoordinatorRules(2))
    coordinator.next(0)
    coordinator.stop()
    assert coordinator.next(1)[0] == END
    backup = ledger_of(CoordinatorRules(2, gradients_per_step=2))
    backup.next(0)
    backup.stop()
    assert backup.next(1)[:2] == (1, 0), "the step under way needs its second gradient"


def test_state_survives_being_sent():
    coordinator = ledger_of(CoordinatorRules(2))
    for worker, staleness in ((0, 0), (1, 40), (1, 2)):
        coordinator.next(worker)
        coordinator.finish(worker, 0.5, staleness, 2)
    coordinator.next(0)
    coordinator.finish(0, float("nan"), 0, 1, skipped=True)
    state = coordinator.state()
    numbers, rows = coordinator.raw_state()
    assert unpack_state(numbers, rows) == state
    assert (state.done, state.begun, state.items, state.loss, state.skipped) == (4, 4, 4, 1.5, 1)
    first, second = state.worker_stats
    assert (first.steps, first.reads, second.steps, second.staleness_sum, second.staleness_max) == (1, 3, 2, 42, 40)
    assert (second.histogram[2], second.histogram[-1], sum(second.histogram)) == (1, 1, 2)


def test_a_pause_in_backup_comes_after_the_step_under_way():
    coordinator = ledger_of(CoordinatorRules(3, gradients_per_step=2), end=100, gate=100)
    turns = [coordinator.next(worker) for worker in range(3)]
    coordinator.set_pause_step(0)  # as the chief does that wants a pause soon
    assert coordinator.next(0, chief=True)[0] != PAUSE, "gradients of step 0 may still be taken"
    for worker in (1, 2):
        assert coordinator.admit(worker, turns[worker][0], 0, 1.0, 8) >= 0
    coordinator.step_done(1.0, skipped=False)
    assert coordinator.next(1)[0] == WAIT
    assert coordinator.next(0, chief=True)[0] == PAUSE
