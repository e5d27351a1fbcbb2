"""Tickets, gates and bounds, by one process that plays all workers."""

from __future__ import annotations

import numpy as np
import pytest

from mpitrain.strategy.ps.coordinator import DROPPED, END, PAUSE, WAIT, Ledger, Rules, state_of


class OwnMemory:
    """In place of memory that ranks share: one process plays them all."""

    def allocate(self, shape, dtype):
        return np.zeros(shape, dtype)


def ledger_of(rules, step=0, end=10, gate=10):
    ledger = Ledger(OwnMemory(), rules)
    ledger.open(step, end)
    ledger.open_gate(gate)
    return ledger


def test_tickets_are_given_once_and_end():
    ledger = ledger_of(Rules(2), step=3)
    tickets = [ledger.take(i % 2)[0] for i in range(9)]
    assert tickets == [3, 4, 5, 6, 7, 8, 9, END, END]


def test_a_gate_holds_everyone_until_it_is_moved():
    ledger = ledger_of(Rules(2), gate=2)
    assert [ledger.take(0)[0], ledger.take(1)[0], ledger.take(0, chief=True)[0]] == [0, 1, WAIT]
    ledger.finish(0, 0.5, 0, 8)
    assert ledger.take(0, chief=True)[0] == WAIT, "worker 1 has not finished"
    assert ledger.finish(1, 0.25, 1, 8) == 2
    assert ledger.take(1)[0] == WAIT
    assert ledger.take(0, chief=True)[0] == PAUSE
    ledger.open_gate(10)
    assert ledger.take(1)[0] == 2


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_holds_who_is_too_far_ahead(bound):
    ledger = ledger_of(Rules(2, bound=bound), end=100, gate=100)
    assert ledger.take(1)[0] == 0
    leads = []
    while True:
        ticket, _, ahead = ledger.take(0)
        if ticket == WAIT:
            break
        leads.append(ahead)
        ledger.finish(0, 0.0, ahead, 0)
    assert leads == list(range(bound + 1))
    ledger.finish(1, 0.0, 0, 0)
    assert ledger.take(0)[0] != WAIT, "the slow one has come one step further"


def test_who_has_ended_holds_nobody_up():
    ledger = ledger_of(Rules(2, bound=0), end=3, gate=3)
    for _ in range(3):
        assert ledger.take(0)[0] != WAIT
        ledger.finish(0, 0.0, 0, 0)
        ledger.take(1)
        ledger.finish(1, 0.0, 0, 0)
    assert ledger.take(0)[0] == ledger.take(1)[0] == END


def test_backup_takes_the_first_and_drops_the_rest():
    ledger = ledger_of(Rules(3, taken=2))
    turns = [ledger.take(worker) for worker in range(3)]
    assert [turn[:2] for turn in turns] == [(0, 0), (1, 0), (2, 0)]
    places = [ledger.admit(worker, turns[worker][0], 0, 1.0, 8) for worker in (2, 0, 1)]
    assert places == [0, 1, DROPPED]
    assert ledger.take(1)[:2] == (3, 1), "the dropped worker goes on with the next step"
    assert [account.dropped for account in ledger.state().accounts] == [0, 1, 0]


def test_stopping_finishes_what_is_under_way():
    ledger = ledger_of(Rules(2))
    ledger.take(0)
    ledger.stop()
    assert ledger.take(1)[0] == END
    backup = ledger_of(Rules(2, taken=2))
    backup.take(0)
    backup.stop()
    assert backup.take(1)[:2] == (1, 0), "the step under way needs its second gradient"


def test_state_survives_being_sent():
    ledger = ledger_of(Rules(2))
    for worker, staleness in ((0, 0), (1, 40), (1, 2)):
        ledger.take(worker)
        ledger.finish(worker, 0.5, staleness, 2)
    ledger.take(0)
    ledger.finish(0, float("nan"), 0, 1, skipped=True)
    state = ledger.state()
    numbers, rows = ledger.raw_state()
    assert state_of(numbers, rows) == state
    assert (state.done, state.begun, state.tickets, state.loss, state.skipped) == (4, 4, 4, 1.5, 1)
    first, second = state.accounts
    assert (first.steps, first.reads, second.steps, second.staleness_sum, second.staleness_max) == (1, 3, 2, 42, 40)
    assert (second.histogram[2], second.histogram[-1], sum(second.histogram)) == (1, 1, 2)


def test_a_pause_in_backup_comes_after_the_step_under_way():
    ledger = ledger_of(Rules(3, taken=2), end=100, gate=100)
    turns = [ledger.take(worker) for worker in range(3)]
    ledger.open_gate(0)  # as the chief does that wants a pause soon
    assert ledger.take(0, chief=True)[0] != PAUSE, "gradients of step 0 may still be taken"
    for worker in (1, 2):
        assert ledger.admit(worker, turns[worker][0], 0, 1.0, 8) >= 0
    ledger.step_done(1.0, skipped=False)
    assert ledger.take(1)[0] == WAIT
    assert ledger.take(0, chief=True)[0] == PAUSE
