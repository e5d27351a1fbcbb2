"""The queue performs operations in their order, on the thread that needs them or on its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mpitrain.backend.operations import Operation, OperationQueue  # noqa: E402

MET_BY_WAITING = 100


class Program:
    """Operations that wait for conditions, which are numbers; waiting for a negative number fails.

    Attributes:
        met: The conditions that are met.
        log: What has happened, with the name of the thread.
    """

    def __init__(self) -> None:
        self.met: set[int] = set()
        self.log: list[tuple[str, str]] = []
        self.queue = OperationQueue("own", 60.0, self._wait, lambda condition: condition in self.met)
        self.changed = threading.Condition()

    def _wait(self, operation: Operation, condition: Any) -> None:
        if condition < 0:
            raise ValueError(operation.text)
        if condition == MET_BY_WAITING:
            return
        with self.changed:
            assert self.changed.wait_for(lambda: condition in self.met, 20.0)

    def meet(self, condition: int) -> None:
        with self.changed:
            self.met.add(condition)
            self.changed.notify_all()

    def submit(self, text: str, *conditions: int, blocking: bool = False) -> Operation:
        operation = Operation(self.queue, text, [torch.tensor([float(len(text))])])

        def steps() -> Iterator[Any]:
            yield from conditions
            self.log.append((text, threading.current_thread().name))

        operation.steps = steps()
        return self.queue.submit(operation, blocking)

    @property
    def performed(self) -> list[str]:
        return [text for text, _ in self.log]


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    for condition in range(10):
        made.meet(condition)
    made.queue.close()
    if made.queue._thread is not None:
        made.queue._thread.join(20.0)
        assert not made.queue._thread.is_alive()


def test_an_operation_that_all_ranks_have_joined_is_done_at_once(program: Program) -> None:
    program.meet(1)
    operation = program.submit("a", 1)
    assert operation.is_completed() and operation.wait() and operation.is_success()
    assert program.log == [("a", threading.current_thread().name)] and program.queue._thread is None
    assert operation.get_future().value()[0].item() == 1


def test_the_thread_performs_what_nobody_waits_for(program: Program) -> None:
    program.meet(2)
    first, second = program.submit("a", 1), program.submit("b", 2)
    assert not first.done and not second.done, "b must not overtake a"
    ended = threading.Event()
    second.get_future().then(lambda future: ended.set())
    program.meet(1)
    assert ended.wait(20.0)
    assert program.performed == ["a", "b"] and {name for _, name in program.log} == {"own"}


def test_waiting_for_an_operation_performs_the_earlier_ones(program: Program) -> None:
    operations = [program.submit(text, 1) for text in "abc"]
    program.meet(1)
    operations[1].wait()
    assert program.performed[:2] == ["a", "b"]
    operations[2].wait()
    assert program.performed == ["a", "b", "c"]


def test_a_blocking_operation_is_complete(program: Program) -> None:
    for condition in (1, 2, 3):
        program.meet(condition)
    program.submit("a", 1, 2)
    assert program.submit("b", 3, blocking=True).done
    assert program.performed == ["a", "b"]


def test_an_error_fails_all_later_operations(program: Program) -> None:
    program.meet(1)
    assert program.submit("a", 1).wait()
    failed = program.submit("b", -1)
    with pytest.raises(ValueError, match="b"):
        failed.wait()
    later = program.submit("c", 1)
    with pytest.raises(ValueError, match="b"):
        later.wait()
    assert program.performed == ["a"] and isinstance(program.queue.failed, ValueError)
    assert not failed.is_success() and failed.exception() is later.exception() is program.queue.failed


def test_an_error_of_the_operation_itself(program: Program) -> None:
    operation = Operation(program.queue, "a", [])

    def steps() -> Iterator[Any]:
        raise ArithmeticError("no")
        yield 1

    operation.steps = steps()
    with pytest.raises(ArithmeticError):
        program.queue.submit(operation, True)


def test_an_interrupt_is_raised_and_ends_the_group(program: Program) -> None:
    operation = Operation(program.queue, "a", [])

    def steps() -> Iterator[Any]:
        raise KeyboardInterrupt
        yield 1

    operation.steps = steps()
    with pytest.raises(KeyboardInterrupt):
        program.queue.submit(operation, True)
    assert operation.done
    with pytest.raises(RuntimeError):
        program.submit("b", 1, blocking=True)


def test_a_callback_may_submit_operations(program: Program) -> None:
    """PowerSGD's hook reduces a second tensor in the callback of the first one's future."""
    done: list[bool] = []
    first = program.submit("a", 1)
    second = program.submit("b", 1)

    def then(future: Any) -> None:
        done.append(program.submit("inner", MET_BY_WAITING).done)

    first.get_future().then(then)
    program.meet(1)
    second.wait()
    assert done == [True] and program.performed == ["a", "b", "inner"]


def test_a_timeout_of_one_operation_begins_now(program: Program) -> None:
    operation = Operation(program.queue, "a", [])
    assert operation.timeout_s == 60.0
    operation.submitted -= 100.0
    operation.steps = iter([1])
    program.meet(1)
    program.queue._pending.append(operation)
    operation.wait(timedelta(seconds=5))
    assert operation.timeout_s >= 105.0


def test_closing_performs_what_is_left(program: Program) -> None:
    operations = [program.submit(text, 1) for text in "ab"]
    program.meet(1)
    program.queue.close()
    assert all(operation.done for operation in operations)
