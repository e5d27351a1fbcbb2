"""The step coordinator of ``backup``, in one process that acts as all workers."""

from __future__ import annotations

import threading

import numpy as np

from mpitrain.comm.backoff import Backoff
from mpitrain.strategy.ps.collected_steps import NO_PLACE, CollectedSteps, StepGradients
from mpitrain.strategy.ps.coordinator import PAUSE, WAIT

from ....support.own_memory import OwnMemory


def collected(workers: int, end: int = 10, pause_step: int = 10, on_one_node: bool = False) -> CollectedSteps:
    """Return a coordinator of steps with two gradients each."""
    memory = CollectedSteps(OwnMemory(), workers, 2, on_one_node)  # type: ignore[arg-type]
    memory.open(0, end, pause_step)
    return memory


def test_a_step_uses_its_first_gradients_and_drops_the_rest() -> None:
    memory = collected(3)
    assignments = [memory.next(worker) for worker in range(3)]
    assert [assignment[:2] for assignment in assignments] == [(0, 0), (1, 0), (2, 0)]
    places = [memory.admit(worker, assignments[worker].item, 0, 1.0, 8) for worker in (2, 0, 1)]
    assert places == [0, 1, NO_PLACE]
    assert memory.next(1)[:2] == (3, 1), "the dropped worker continues with the next step"
    assert [stats.dropped for stats in memory.state().worker_stats] == [0, 1, 0]


def test_a_stop_completes_the_begun_step() -> None:
    memory = collected(2)
    memory.next(0)
    memory.stop()
    assert memory.next(1)[:2] == (1, 0), "the begun step needs its second gradient"


def test_a_pause_follows_the_begun_step() -> None:
    memory = collected(3, end=100, pause_step=100)
    assignments = [memory.next(worker) for worker in range(3)]
    memory.request_pause()
    assert memory.next(0).item != PAUSE, "step 0 may still use gradients"
    for worker in (1, 2):
        assert memory.admit(worker, assignments[worker].item, 0, 1.0, 8) >= 0
    assert memory.next(1).item == WAIT, "the servers have not applied the step"
    memory.step_done(1.0, skipped=False)
    assert [memory.next(worker).item for worker in range(3)] == [PAUSE] * 3


def test_on_one_node_a_step_ends_when_its_workers_have_updated() -> None:
    memory, waiting = collected(3, on_one_node=True), Backoff(oversubscribed=True)
    items = [memory.next(worker).item for worker in range(3)]
    places = [memory.admit(worker, items[worker], 0, float(worker), 1) for worker in (2, 0, 1)]
    assert places == [0, 1, NO_PLACE]
    assert memory.next(1).item == WAIT, "the workers with a place change the parameters"
    workers, loss = memory.wait_for_gradients(waiting)
    assert (workers.tolist(), loss) == ([0, 2], 2.0), "in the order of work items"
    first = threading.Thread(target=memory.close_step, args=(0, loss, False, waiting), daemon=True)
    first.start()
    first.join(0.1)
    assert first.is_alive() and memory.state().done == 0
    memory.close_step(0, loss, False, waiting)
    first.join(10)
    assert not first.is_alive() and (memory.state().done, memory.state().loss) == (1, 2.0)
    assert memory.next(1)[:2] == (3, 1)


def test_gradients_are_found_by_their_step() -> None:
    shared = OwnMemory(size=3)
    of_ranks = StepGradients(shared, 5, np.dtype(np.float32), 1)  # type: ignore[arg-type]
    of_ranks.open()
    of_ranks.own[:] = 7
    of_ranks.mark(4, 0, 0.5)
    ((item, loss, gradient),) = of_ranks.marked(0)
    assert (item, loss, gradient.tolist()) == (4, 0.5, [7.0] * 5)
    assert of_ranks.marked(1) == []
    of_ranks.mark(6, 1, 0.25)
    assert of_ranks.marked(0) == [] and [entry[:2] for entry in of_ranks.marked(1)] == [(6, 0.25)]
