"""The check of a host before ranks are started on it again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import NamedTuple

import pytest

from mpitrain.process import host_check


class Usage(NamedTuple):
    free: int


def check(now: float, *failed: str) -> tuple[int, str]:
    words = [sys.executable, "-S", host_check.__file__, str(now), *failed]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr.strip()


def test_a_host_may_be_used_unless_its_clock_is_wrong() -> None:
    assert check(time.time()) == (0, "")
    status, reason = check(time.time() - 3600)
    assert status == 1 and " s ahead" in reason and "\n" not in reason


def test_only_the_host_that_has_failed_twice_is_not_used() -> None:
    assert check(time.time(), "another") == (0, "")
    status, reason = check(time.time(), socket.gethostname())
    assert status == 1 and "two attempts" in reason


@pytest.mark.parametrize("errors", [None, "0", "2", "lost"])
def test_a_gpu_with_errors(driver: str, errors: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", driver)
    if errors is not None:
        monkeypatch.setenv("SIMULATED_GPU_ERRORS", errors)
    words = [sys.executable, host_check.__file__, str(time.time())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    is_bad = errors in ("2", "lost")
    assert (done.returncode, "its GPU 1 " in done.stderr) == (is_bad, is_bad)
    assert not is_bad or str(errors) in done.stderr


def test_a_host_needs_disk_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_check, "_memory", lambda: {"MemTotal": 1 << 20, "MemAvailable": 1 << 14})
    assert "16 MiB" in host_check.problem(time.time())
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage(3 << 20))
    assert "3 MiB" in host_check.problem(time.time())
