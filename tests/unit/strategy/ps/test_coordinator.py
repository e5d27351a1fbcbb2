"""The step coordinator: work items, pauses and bounds, in one process that acts as all workers."""

from __future__ import annotations

import pytest

from mpitrain.strategy.ps.coordinator import END, PAUSE, WAIT, unpack_state
from mpitrain.strategy.ps.counted_steps import CountedSteps

from ....support.own_memory import OwnMemory


def counted(workers: int, step: int = 0, end: int = 10, pause_step: int = 10, bound: int | None = None) -> CountedSteps:
    memory = CountedSteps(OwnMemory(), workers, bound)  # type: ignore[arg-type]
    memory.open(step, end, pause_step)
    return memory


def test_items_are_assigned_once_until_the_end() -> None:
    memory = counted(2, step=3)
    assert [memory.next(i % 2).item for i in range(9)] == [3, 4, 5, 6, 7, 8, 9, END, END]


def test_all_workers_pause_once_at_the_pause_step() -> None:
    memory = counted(2, pause_step=2)
    assert [memory.next(0).item, memory.next(1).item, memory.next(0).item] == [0, 1, WAIT]
    memory.finish(0, 0.5, 0, 8)
    assert memory.next(0).item == WAIT, "worker 1 has not finished"
    assert memory.finish(1, 0.25, 1, 8) == 2
    assert [memory.next(worker).item for worker in (1, 0, 1, 0)] == [PAUSE, PAUSE, WAIT, WAIT]
    memory.set_pause_step(10)
    assert memory.next(1).item == 2


def test_a_requested_pause_comes_as_soon_as_possible() -> None:
    memory = counted(2, pause_step=8)
    memory.next(0)
    memory.request_pause()
    assert memory.next(1).item == WAIT
    memory.finish(0, 0.5, 0, 8)
    assert [memory.next(worker).item for worker in (0, 1)] == [PAUSE, PAUSE]
    memory.set_pause_step(2)
    for worker in (0, 1):
        if (item := memory.next(worker).item) >= 0:
            memory.finish(worker, 0.5, 0, 8)
        assert item == 1 or worker == 1
    assert memory.next(0).item == PAUSE


def test_a_request_that_comes_after_the_pause_was_reached_changes_nothing() -> None:
    memory = counted(2, step=4, pause_step=4)
    assert memory.next(1).item == PAUSE
    memory.request_pause()  # by worker 0, before it receives PAUSE
    assert memory.next(0).item == PAUSE
    memory.set_pause_step(8)
    assert memory.next(0).item == 4


def test_a_stop_during_a_pause_ends_training_one_step_later() -> None:
    memory = counted(2, step=4, pause_step=4)
    assert memory.next(0).item == PAUSE
    memory.stop()
    assert memory.next(1).item == PAUSE, "both workers must see the same"
    memory.set_pause_step(8)
    assert memory.next(0).item == 4
    assert memory.finish(0, 0.5, 0, 8) == 5
    assert [memory.next(worker).item for worker in (0, 1)] == [END, END]


def test_a_stop_at_a_pause_step_before_the_pause_replaces_it() -> None:
    memory = counted(1, pause_step=1)
    assert memory.next(0).item == 0
    memory.stop()
    memory.finish(0, 0.5, 0, 8)
    assert memory.next(0).item == END


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_stops_a_worker_that_is_too_far_ahead(bound: int) -> None:
    memory = counted(2, bound=bound, end=100, pause_step=100)
    assert memory.next(1).item == 0
    leads = []
    while (assignment := memory.next(0)).item != WAIT:
        leads.append(assignment.lead)
        memory.finish(0, 0.0, assignment.lead, 0)
    assert leads == list(range(bound + 1))
    memory.finish(1, 0.0, 0, 0)
    assert memory.next(0).item != WAIT, "the slow worker has finished another step"


def test_no_worker_waits_for_one_that_has_ended() -> None:
    memory = counted(2, bound=0, end=3, pause_step=3)
    for _ in range(3):
        assert memory.next(0).item != WAIT
        memory.finish(0, 0.0, 0, 0)
        memory.next(1)
        memory.finish(1, 0.0, 0, 0)
    assert memory.next(0).item == memory.next(1).item == END


def test_a_stop_completes_begun_steps() -> None:
    memory = counted(2)
    memory.next(0)
    memory.stop()
    assert memory.next(1).item == END


def test_the_state_can_be_sent() -> None:
    memory = counted(2)
    for worker, staleness in ((0, 0), (1, 40), (1, 2)):
        memory.next(worker)
        memory.finish(worker, 0.5, staleness, 2)
    memory.next(0)
    memory.finish(0, float("nan"), 0, 1, skipped=True)
    state = memory.state()
    assert unpack_state(*memory.raw_state()) == state
    assert (state.done, state.begun, state.items, state.loss, state.skipped) == (4, 4, 4, 1.5, 1)
    first, second = state.worker_stats
    assert (first.steps, first.reads, second.steps, second.staleness_sum, second.staleness_max) == (1, 3, 2, 42, 40)
    assert (second.histogram[2], second.histogram[-1], sum(second.histogram)) == (1, 1, 2)
