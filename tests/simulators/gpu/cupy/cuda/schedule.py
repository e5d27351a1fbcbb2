"""The schedule of simulated GPUs: operations run later, in any order that streams and events allow.

Operations of a stream run in order. Between streams, only events define an order. At each submission, a random number
of the operations that may run are executed: results that a program does not wait for can be missing or overwritten.

    SIMULATED_ORDER: seed of the order, which begins when a stream is made after the seed has changed
"""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_lock = threading.RLock()
_seed, _random, _pace = "", random.Random(), 0.0  # the mean number of operations executed per submitted operation
_queues: list[Queue] = []
_ALONE_S = 0.05  # after so long without a call of the host, a GPU for which others may wait works by itself
_called_s = 0.0


def _always() -> bool:
    return True


@dataclass
class Operation:
    run: Callable[[], object]
    ready: Callable[[], bool] = _always


class Queue:
    """The submitted operations of a stream that have not run yet."""

    def __init__(self) -> None:
        self.waiting: deque[Operation] = deque()
        self.captured: list[Operation] | None = None
        with _lock:
            _begin_order()
            _queues.append(self)

    def put(self, operation: Operation) -> None:
        global _called_s
        with _lock:
            _called_s = time.monotonic()
            if self.captured is not None:
                self.captured.append(operation)
                return
            self.waiting.append(operation)
            for _ in range(int(_random.expovariate(1) * _pace + 0.5)):
                _step()

    def drain(self) -> None:
        assert self.captured is None, "the host waits for a stream that is being captured"
        until(lambda: not self.waiting)


def _begin_order() -> None:
    global _seed, _pace
    seed = os.environ.get("SIMULATED_ORDER", "0")
    if seed != _seed:
        _seed = seed
        _random.seed(int(seed))
        _pace = _random.choice((0.02, 0.3, 1.5))


def until(done: Callable[[], bool]) -> None:
    """Execute operations until a condition is true."""
    began = time.monotonic()
    while True:
        with _lock:
            if done():
                return
            if _step():
                continue
        assert time.monotonic() - began < 60, "this wait does not end: no submitted operation makes its condition true"
        time.sleep(1e-4)


@functools.cache
def work_alone() -> None:
    """From now on, execute operations also while the host waits for another process, which may wait for this GPU."""

    def work() -> None:
        while True:
            time.sleep(_ALONE_S)
            with _lock:
                while time.monotonic() - _called_s > _ALONE_S and _step():
                    pass

    threading.Thread(target=work, daemon=True).start()


def _step() -> bool:
    able = [queue for queue in _queues if queue.waiting and queue.waiting[0].ready()]
    if not able:
        return False
    _random.choice(able).waiting.popleft().run()
    return True
