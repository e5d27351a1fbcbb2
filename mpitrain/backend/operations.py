"""Operations of a process group, and the queue that performs them in order.

A thread that needs an operation's result performs the operation itself, after all earlier operations. An operation is
left to the queue's thread only if no thread waits for it yet, and not all other ranks have joined it. Handing an
operation over takes longer than a small operation, and without spare cores the queue's thread delays the computation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import perf_counter

import torch
from torch import Tensor

from ..core import activity
from .internode import Condition, Steps
from .work import TensorWork

Wait = Callable[["Operation", Condition], None]
Poll = Callable[[Condition], bool]


class Operation(TensorWork):
    """One operation of a process group, as ``torch.distributed`` returns it. Local, unless noted.

    Attributes:
        text: Its name, such as ``all_reduce``, with the properties that must be equal on all ranks.
        steps: The operation itself; set before it is submitted.
        number: Its sequence number in its group; set when it starts.
        submitted: The time at which it was submitted, on the clock of ``perf_counter``.
        timeout_s: Seconds after which it times out.
        condition: The condition that it waits for; None if it has not started.
    """

    def __init__(self, queue: OperationQueue, text: str, outputs: list[Tensor]) -> None:
        super().__init__(outputs, queue.ending)
        self.text, self.number = text, -1
        self.steps: Steps = iter(())
        self.timeout_s = queue.timeout_s
        self.submitted = perf_counter()
        self.condition: Condition | None = None
        self._queue = queue

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the operation is complete; raise its error. The other ranks must take part.

        Args:
            timeout: The timeout of this operation from now on; the group's timeout if None or zero.
        """
        if not self.done:
            if timeout is not None and timeout > timedelta(0):
                self.timeout_s = perf_counter() - self.submitted + timeout.total_seconds()
            self._queue.complete(self)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        if not self.done:
            self._queue.poll(self)
        return self.done


class OperationQueue:
    """Performs a group's operations in the order of their calls.

    Args:
        name: The name of the thread, which starts when it is needed.
        timeout_s: Timeout of each operation in seconds.
        wait: Waits for a condition of an operation; raises an exception if the operation fails.
        poll: Returns whether a condition is met, now or within microseconds.

    Attributes:
        ending: Held while an operation ends.
        failed: The first error; later operations fail with it, too.
    """

    def __init__(self, name: str, timeout_s: float, wait: Wait, poll: Poll) -> None:
        self.timeout_s = timeout_s
        self.ending = threading.RLock()
        self.failed: Exception | None = None
        self._name, self._wait, self._poll = name, wait, poll
        self._pending: deque[Operation] = deque()
        self._executing = threading.RLock()  # the thread that performs operations holds this lock
        self._in_callbacks = 0  # the thread that calls futures' callbacks
        self._left = threading.Semaphore(0)  # operations that were left to the background thread
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, operation: Operation, blocking: bool) -> Operation:
        """Perform an operation, or leave it to the thread if it is not ``blocking`` and cannot be done at once."""
        self._pending.append(operation)
        # A future's callback runs on the thread that performs operations. It may submit an operation and wait for its
        # future, as PowerSGD's hook does; no other thread could perform that operation meanwhile.
        if blocking or self._in_callbacks == threading.get_ident():
            operation.wait()
        elif not self.poll(operation):
            self._leave_to_thread()
        return operation

    def poll(self, operation: Operation) -> bool:
        """Perform operations up to ``operation``, as far as all ranks have joined them; return whether it is done."""
        if not self._executing.acquire(blocking=False):
            return operation.done
        try:
            while self._pending and not operation.done:
                head = self._pending[0]
                if not self._begin(head) or (head.condition is not None and not self._poll(head.condition)):
                    break
                self._perform(head)
        finally:
            self._executing.release()
        return operation.done

    def complete(self, operation: Operation) -> None:
        """Perform operations until ``operation`` is done."""
        with self._executing:
            while not operation.done:
                self._perform(self._pending[0])

    def close(self) -> None:
        """Perform the operations that are left, and end the thread."""
        with self._executing:
            while self._pending and self.failed is None:
                self._perform(self._pending[0])
        self._closed = True
        self._left.release()

    def _leave_to_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._left.release()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            self._left.acquire()
            if self._closed:
                return
            with self._executing:
                if self._pending:
                    self._perform(self._pending[0])

    def _begin(self, operation: Operation) -> bool:
        """Perform an operation up to its first condition; return False if that has ended it."""
        if operation.condition is not None:
            return True
        try:
            if self.failed is not None:
                raise self.failed
            operation.condition = next(operation.steps)
        except StopIteration:
            self._end(operation, None)
            return False
        except BaseException as error:
            self._end(operation, error)
            return False
        return True

    def _perform(self, operation: Operation) -> None:
        """Perform an operation to its end."""
        if not self._begin(operation):
            return
        try:
            assert operation.condition is not None
            self._wait(operation, operation.condition)
            for condition in operation.steps:
                self._wait(operation, condition)
        except BaseException as error:
            self._end(operation, error)
        else:
            self._end(operation, None)

    def _end(self, operation: Operation, error: BaseException | None) -> None:
        self._pending.popleft()
        if error is not None and self.failed is None:
            self.failed = error if isinstance(error, Exception) else RuntimeError("interrupted")
        with self.ending:
            outer, self._in_callbacks = self._in_callbacks, threading.get_ident()
            operation.steps = iter(())  # frees the steps, which refer to the operation
            operation.end(self.failed if error is not None else None)
            self._in_callbacks = outer
        if error is None:
            activity.mark_progress()
        elif not isinstance(error, Exception):
            raise error  # such as KeyboardInterrupt
