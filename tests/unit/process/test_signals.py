"""A signal is recorded, and a second Ctrl-C ends the process. A time limit leaves time to save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from mpitrain.process.signals import Signals, TimeLimit


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    signals = Signals()
    with signals.recorded():
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_control_c_twice_ends_the_process(number: signal.Signals, ends: bool) -> None:
    program = f"""
import os, time
from mpitrain.process.signals import Signals
signals = Signals()
with signals.recorded():
    os.kill(os.getpid(), {number})
    os.kill(os.getpid(), {number})  # at once: the same one, from terminal and launcher
    print(signals.received, flush=True)
    time.sleep(0.6)
    os.kill(os.getpid(), {number})
    print("still there")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (-number if ends else 0), done.stderr
    assert done.stdout.split("\n")[:-1] == [number.name, *([] if ends else ["still there"])]


def test_without_an_end_it_is_never_reached() -> None:
    assert not TimeLimit(None, 0.0).reached(1e12, 1e6, 1e6)


@pytest.mark.parametrize(("step_s", "save_s"), [(0.001, 0.1), (1.0, 30.0), (100.0, 5.0), (0.0, 0.0)])
def test_there_is_time_left_to_save(step_s: float, save_s: float) -> None:
    limit, now = TimeLimit(3600.0, 0.0), 0.0
    while not limit.reached(now, step_s, save_s):
        now += max(step_s, 0.01)
    assert now + step_s + save_s < 3600.0
    assert now > 3600.0 - 60.0 - 2 * step_s - 2 * save_s - 0.02
