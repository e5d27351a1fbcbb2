"""Waiting for an event, with a time limit."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

TIME_FACTOR = float(os.environ.get("MPITRAIN_TEST_TIME_FACTOR") or 1)  # multiplies the time limits of the tests


def limit(seconds: float) -> float:
    """Return a time limit for this machine."""
    return seconds * TIME_FACTOR


def wait_until(
    condition: Callable[[], T | None],
    what: str | Callable[[], object],
    seconds: float = 60.0,
    *,
    process: subprocess.Popen[Any] | None = None,
    poll_s: float = 0.01,
) -> T:
    """Return the first true value of ``condition()``.

    Args:
        what: What is waited for, or a function that returns the state instead; it is the message of the failure.
        seconds: The time limit, which is multiplied by the factor of this machine.
        process: Fail when this process has ended, unless the condition is true afterwards.
        poll_s: The time between two calls.
    """
    deadline = time.monotonic() + limit(seconds)
    while True:
        over = time.monotonic() > deadline or (process is not None and process.poll() is not None)
        if found := condition():
            return found
        if over:
            ended = "" if process is None or process.poll() is None else f", process ended with {process.returncode}"
            raise AssertionError(f"not after {limit(seconds):g} s{ended}: {what() if callable(what) else what}")
        time.sleep(poll_s)
